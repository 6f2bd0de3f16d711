//! The indices of the engine. Each is a type of its own, so that a rank cannot be passed where a stage is
//! expected.
//!
//! Indices only identify; [`crate::placement`] maps stages to ranks.
//!
//! ```
//! use pipewright_schedule::StageIndex;
//! let stage = StageIndex::new(3);
//! assert_eq!(stage.index(), 3);
//! assert_eq!(stage.to_string(), "3");
//! ```

use std::cmp::Ordering;
use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Declares one index type over `u32`.
macro_rules! index_type {
    ($(#[$attribute:meta])* $name:ident) => {
        $(#[$attribute])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(u32);

        impl $name {
            /// Wraps a bare number.
            pub const fn new(value: u32) -> Self {
                Self(value)
            }

            /// Returns the number as an index into a slice.
            pub const fn index(self) -> usize {
                self.0 as usize
            }

            /// Returns the number.
            pub const fn get(self) -> u32 {
                self.0
            }
        }

        impl From<u32> for $name {
            fn from(value: u32) -> Self {
                Self(value)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }
    };
}

/// The position of a stage in the model, from 0 at the input to `stages - 1` at the loss; at most
/// [`StageIndex::LARGEST`].
///
/// It takes three bytes, so that an [`crate::Action`] takes eight.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct StageIndex([u8; 3]);

/// A number that is above [`StageIndex::LARGEST`].
#[derive(Clone, Copy, PartialEq, Eq, Error)]
#[error("stage {number} is above the largest, {}; number stages from 0 without gaps", StageIndex::LARGEST)]
pub struct StageTooLarge {
    /// The number.
    pub number: u32,
}

crate::error_text::message_as_debug!(StageTooLarge);

impl StageIndex {
    /// The largest stage, far above the size of any cluster.
    pub const LARGEST: u32 = (1 << 24) - 1;

    /// Wraps a bare number.
    ///
    /// # Panics
    /// When `value` is above [`StageIndex::LARGEST`]. For numbers from user input, use [`TryFrom`].
    pub const fn new(value: u32) -> Self {
        assert!(value <= Self::LARGEST, "a stage is at most `StageIndex::LARGEST`");
        let [low, middle, high, _] = value.to_le_bytes();
        Self([low, middle, high])
    }

    /// Returns the number as an index into a slice.
    #[inline]
    pub const fn index(self) -> usize {
        self.get() as usize
    }

    /// Returns the number.
    #[inline]
    pub const fn get(self) -> u32 {
        let [low, middle, high] = self.0;
        u32::from_le_bytes([low, middle, high, 0])
    }

    /// Returns the previous stage of the model; `None` for the first stage.
    pub(crate) fn before(self) -> Option<Self> {
        self.get().checked_sub(1).map(Self::new)
    }

    /// Returns the number of the next stage; `None` if it would be above [`StageIndex::LARGEST`].
    pub(crate) fn after(self) -> Option<Self> {
        Self::try_from(self.get() + 1).ok()
    }
}

impl TryFrom<u32> for StageIndex {
    type Error = StageTooLarge;

    fn try_from(number: u32) -> Result<Self, StageTooLarge> {
        if number <= Self::LARGEST { Ok(Self::new(number)) } else { Err(StageTooLarge { number }) }
    }
}

impl From<StageIndex> for u32 {
    fn from(stage: StageIndex) -> Self {
        stage.get()
    }
}

impl Ord for StageIndex {
    fn cmp(&self, other: &Self) -> Ordering {
        self.get().cmp(&other.get())
    }
}

impl PartialOrd for StageIndex {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Debug for StageIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("StageIndex").field(&self.get()).finish()
    }
}

impl fmt::Display for StageIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.get(), f)
    }
}

index_type! {
    /// The position of a worker in the pipeline, from 0.
    Rank
}

index_type! {
    /// The position of a microbatch in the batch, from 0. If microbatches are cut into slices, the number of
    /// a slice ([`crate::slices`]).
    Microbatch
}

index_type! {
    /// The position of a slice in its microbatch, from 0.
    Slice
}

index_type! {
    /// The position of a stage among the stages of its rank, from 0.
    Chunk
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_is_its_number() {
        for number in [0, 1, 255, 256, 65_535, 65_536, StageIndex::LARGEST] {
            let stage = StageIndex::new(number);
            assert_eq!((stage.get(), stage.to_string()), (number, number.to_string()));
            assert_eq!(serde_json::to_string(&stage).expect("a number"), number.to_string());
            assert_eq!(serde_json::from_str::<StageIndex>(&number.to_string()).expect("a stage"), stage);
        }
        assert_eq!(format!("{:?}", StageIndex::new(256)), "StageIndex(256)");
    }

    #[test]
    fn stages_are_ordered_as_numbers() {
        let ascending = [0, 1, 255, 256, 65_535, 65_536, StageIndex::LARGEST].map(StageIndex::new);
        assert!(ascending.is_sorted_by(|a, b| a < b));
        assert_eq!(StageIndex::new(255).after(), Some(StageIndex::new(256)));
        assert_eq!(StageIndex::new(StageIndex::LARGEST).after(), None);
        assert_eq!(StageIndex::new(0).before(), None);
    }

    #[test]
    fn larger_numbers_are_refused() {
        let message = "stage 16777216 is above the largest, 16777215; number stages from 0 without gaps";
        assert_eq!(StageIndex::try_from(1 << 24).expect_err("too large").to_string(), message);
        let read = serde_json::from_str::<StageIndex>("16777216").expect_err("too large");
        assert!(read.to_string().starts_with(message), "{read}");
    }
}
