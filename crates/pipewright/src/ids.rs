//! The numbers of a run, each a type of its own: ranks of the world, steps of training, and attempts of a
//! pipeline.
//!
//! [`pipewright_schedule::Rank`] is a rank within its pipeline: a row of the program. A [`WorldRank`] counts over all
//! replicas of the pipeline, and identifies a thread or a process. [`Mesh`](crate::mesh::Mesh) converts one
//! to the other.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Declares a type over a bare number.
macro_rules! number_type {
    ($(#[$attribute:meta])* $name:ident: $number:ty) => {
        $(#[$attribute])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name($number);

        impl $name {
            /// Wraps a bare number.
            pub const fn new(value: $number) -> Self {
                Self(value)
            }

            /// Returns the number.
            pub const fn get(self) -> $number {
                self.0
            }
        }

        impl From<$number> for $name {
            fn from(value: $number) -> Self {
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

number_type! {
    /// A rank of the world: a thread or a process, counted from 0 over all replicas of a pipeline.
    WorldRank: u32
}

number_type! {
    /// A step of training, counted from 1; 0 is the time before the first. A restored checkpoint may
    /// decrease it.
    StepNumber: u64
}

number_type! {
    /// A command that all ranks of a pipeline run together: a step, or collecting parameters. It never
    /// decreases, so it tells messages and failures of one command from an earlier one's with the same step
    /// number.
    Attempt: u64
}

impl WorldRank {
    /// Returns the number as an index into a slice.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl StepNumber {
    /// Returns the number of the next step.
    pub(crate) const fn next(self) -> Self {
        Self(self.0 + 1)
    }

    /// Returns the number of the step before; 0 if it is the first one.
    pub(crate) const fn previous(self) -> Self {
        Self(self.0.saturating_sub(1))
    }
}

impl Attempt {
    /// Returns the number of the next attempt.
    pub(crate) const fn next(self) -> Self {
        Self(self.0 + 1)
    }
}
