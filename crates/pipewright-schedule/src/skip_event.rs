//! The messages of skip connections in a timeline.
//!
//! A program does not contain these messages: the computation that makes their tensors sends them, and the
//! computation that uses the tensors receives them. So they are not [`Action`](crate::Action)s. A message
//! that goes to a later stage carries the tensors of the connection (`F`); one that goes to an earlier stage
//! carries their gradients (`B`).
//!
//! ```
//! use pipewright_schedule::skip_event::{SkipAction, SkipMessage};
//! use pipewright_schedule::{Microbatch, StageIndex};
//! let message = SkipMessage { from: StageIndex::new(0), to: StageIndex::new(4), microbatch: Microbatch::new(2) };
//! assert_eq!(SkipAction::Send(message).to_string(), "0SEND_SKIP_F2 to stage 4");
//! assert_eq!(SkipAction::Receive(message).to_string(), "4RECV_SKIP_F2 from stage 0");
//! ```

use std::fmt;

use crate::ids::{Microbatch, Rank, StageIndex};

/// A message of a skip connection, between stages on different ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SkipMessage {
    /// The stage that sends.
    pub from: StageIndex,
    /// The stage that receives.
    pub to: StageIndex,
    /// The microbatch of the tensors.
    pub microbatch: Microbatch,
}

/// The action of a rank that sends or receives a message of a skip connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SkipAction {
    /// `0SEND_SKIP_F2 to stage 4`
    Send(SkipMessage),
    /// `4RECV_SKIP_F2 from stage 0`
    Receive(SkipMessage),
}

/// A message of a skip connection at one of its ends, in seconds since the origin of the timeline.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SkipEvent {
    /// The rank.
    pub rank: Rank,
    /// The action.
    pub action: SkipAction,
    /// The start, in seconds.
    pub start: f64,
    /// The end, in seconds; not before `start`.
    pub end: f64,
}

impl SkipMessage {
    /// Returns whether the message carries gradients, back to the stage that made the tensors.
    pub fn is_gradient(self) -> bool {
        self.from > self.to
    }
}

impl SkipAction {
    /// The name of each combination of end and direction, as in the text form.
    pub(crate) const NAMES: [&str; 4] = ["SEND_SKIP_F", "RECV_SKIP_F", "SEND_SKIP_B", "RECV_SKIP_B"];

    /// Returns the message.
    pub fn message(self) -> SkipMessage {
        match self {
            Self::Send(message) | Self::Receive(message) => message,
        }
    }

    /// Returns the stage on the rank that acts.
    pub fn stage(self) -> StageIndex {
        match self {
            Self::Send(message) => message.from,
            Self::Receive(message) => message.to,
        }
    }

    /// Returns the end of the text form, which names the other stage.
    pub(crate) fn peer(self) -> String {
        match self {
            Self::Send(message) => format!(" to stage {}", message.to),
            Self::Receive(message) => format!(" from stage {}", message.from),
        }
    }

    /// Returns the place of the name among [`SkipAction::NAMES`].
    pub(crate) fn name_index(self) -> usize {
        usize::from(matches!(self, Self::Receive(_))) + 2 * usize::from(self.message().is_gradient())
    }
}

impl fmt::Display for SkipAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::NAMES[self.name_index()];
        write!(f, "{}{name}{}{}", self.stage(), self.message().microbatch, self.peer())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradients_go_back() {
        let message =
            SkipMessage { from: StageIndex::new(4), to: StageIndex::new(0), microbatch: Microbatch::new(2) };
        assert_eq!(SkipAction::Send(message).to_string(), "4SEND_SKIP_B2 to stage 0");
        assert_eq!(SkipAction::Receive(message).to_string(), "0RECV_SKIP_B2 from stage 4");
        assert_eq!(SkipAction::Receive(message).stage(), StageIndex::new(0));
    }
}
