//! The indices of the engine, each its own type, so that a rank cannot be passed where a stage is meant.
//!
//! This file is for identity only: how stages map to ranks is [`crate::placement`]'s business.
//!
//! ```
//! use pipewright_schedule::StageIndex;
//! let stage = StageIndex::new(3);
//! assert_eq!(stage.index(), 3);
//! assert_eq!(stage.to_string(), "3");
//! ```

use std::fmt;

use serde::{Deserialize, Serialize};

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

            /// The number, to index a slice with.
            pub const fn index(self) -> usize {
                self.0 as usize
            }

            /// The number, as it is stored.
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

index_type! {
    /// A stage's place in the model, from 0 at the input to `stages - 1` at the loss.
    StageIndex
}

impl StageIndex {
    /// The stage before this one in the model, should there be one.
    pub(crate) fn before(self) -> Option<Self> {
        self.0.checked_sub(1).map(Self)
    }

    /// The stage after this one in the model, should there be one.
    pub(crate) fn after(self) -> Option<Self> {
        self.0.checked_add(1).map(Self)
    }
}

index_type! {
    /// A worker's place in the pipeline, from 0.
    Rank
}

index_type! {
    /// A microbatch's place in the batch, from 0.
    Microbatch
}

index_type! {
    /// A stage's place among the stages of its rank, from 0.
    Chunk
}
