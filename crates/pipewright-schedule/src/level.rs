//! The three levels to which a program can be lowered, as the command line and the validator name them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The level to which a program is lowered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Only computation; the transfers between ranks are implied.
    Compute,
    /// Computation, and every send and receive between ranks.
    Comms,
    /// Computation and messages as in [`Level::Comms`], and the gathering of parameters and the reduction of gradients
    /// for sharded data parallelism.
    Full,
}

/// A text that is not the name of a [`Level`].
#[derive(Clone, PartialEq, Eq, Error)]
#[error("unknown level `{name}`; use `compute`, `comms` or `full`")]
pub struct UnknownLevel {
    /// The text.
    pub name: String,
}

crate::message_as_debug!(UnknownLevel);

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Compute => "compute",
            Self::Comms => "comms",
            Self::Full => "full",
        })
    }
}

impl FromStr for Level {
    type Err = UnknownLevel;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        [Self::Compute, Self::Comms, Self::Full]
            .into_iter()
            .find(|level| level.to_string() == text)
            .ok_or_else(|| UnknownLevel { name: text.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for level in [Level::Compute, Level::Comms, Level::Full] {
            assert_eq!(level.to_string().parse(), Ok(level));
        }
        let message = "unknown level `half`; use `compute`, `comms` or `full`";
        assert_eq!("half".parse::<Level>().map_err(|error| error.to_string()), Err(message.to_owned()));
    }
}
