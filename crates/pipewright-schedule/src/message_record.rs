//! The messages of a measured step, which ranks sent to each other.
//!
//! The executor records a message at both of its ends. [`Timeline`](crate::Timeline) has the records next to its
//! events; the time of a record is the time of the event with the same rank and action. Predicted timelines do not have
//! records.
//!
//! ```
//! use std::sync::Arc;
//! use pipewright_schedule::Rank;
//! use pipewright_schedule::message_record::{MessageEnd, MessageRecord, TensorForm};
//!
//! let hidden = TensorForm { dtype: "f32".into(), shape: vec![4, 16] };
//! let message = MessageRecord {
//!     rank: Rank::new(0),
//!     end: MessageEnd::Action("0SEND_F2".parse()?),
//!     peer: Rank::new(1),
//!     bytes: 256,
//!     tensors: Arc::from([hidden]),
//! };
//! assert_eq!(message.to_string(), "0SEND_F2 to rank 1: 256 bytes, f32 [4, 16]");
//! # Ok::<(), pipewright_schedule::notation::ParseActionError>(())
//! ```

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::action::Action;
use crate::ids::Rank;
use crate::skip_event::SkipAction;
use crate::words::counted;

/// A message at one of its ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MessageRecord {
    /// The rank that sends or receives.
    pub rank: Rank,
    /// The action of the rank.
    pub end: MessageEnd,
    /// The rank at the other end.
    pub peer: Rank,
    /// The bytes of all tensors.
    pub bytes: u64,
    /// The tensors that the message contains, in their order. Gradients that do not exist are left out. If several
    /// ranks compute a stage together, these are the parts that one of them sends or receives.
    pub tensors: Arc<[TensorForm]>,
}

/// The action that sends or receives a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MessageEnd {
    /// A send or a receive of the program, between neighbouring stages.
    Action(Action),
    /// One end of a message of a skip connection.
    Skip(SkipAction),
}

/// The element type and the shape of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorForm {
    /// The name of the element type, such as `f32`, `bf16`, `i64` or `bool`.
    pub dtype: Cow<'static, str>,
    /// The size of each dimension.
    pub shape: Vec<usize>,
}

impl fmt::Display for MessageEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Action(action) => action.fmt(f),
            Self::Skip(action) => action.fmt(f),
        }
    }
}

impl fmt::Display for TensorForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.dtype, self.shape)
    }
}

impl fmt::Display for MessageRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { end, peer, bytes, tensors, .. } = self;
        let preposition = match end {
            // The text of a skip connection's action ends with the other stage.
            MessageEnd::Skip(_) => "on",
            MessageEnd::Action(action) if action.kind().is_send() => "to",
            MessageEnd::Action(_) => "from",
        };
        write!(f, "{end} {preposition} rank {peer}: {}", counted(*bytes, "byte"))?;
        tensors.iter().try_for_each(|tensor| write!(f, ", {tensor}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::StageIndex;
    use crate::skip_event::SkipMessage;

    #[test]
    fn both_ends_say_the_other_rank() {
        let of = |end, forms: &[(&'static str, &[usize])]| {
            let form = |&(dtype, shape): &(&'static str, &[usize])| TensorForm {
                dtype: dtype.into(),
                shape: shape.into(),
            };
            let tensors = forms.iter().map(form).collect();
            MessageRecord { rank: Rank::new(1), end, peer: Rank::new(3), bytes: 1, tensors }.to_string()
        };
        let receive = MessageEnd::Action("1RECV_B0".parse().expect("an action"));
        assert_eq!(of(receive, &[]), "1RECV_B0 from rank 3: 1 byte");
        let message = SkipMessage { from: StageIndex::new(1), to: StageIndex::new(3), microbatch: 2.into() };
        let forms: [(&str, &[usize]); 2] = [("bf16", &[2, 3]), ("i64", &[])];
        let expected = "1SEND_SKIP_F2 to stage 3 on rank 3: 1 byte, bf16 [2, 3], i64 []";
        assert_eq!(of(MessageEnd::Skip(SkipAction::Send(message)), &forms), expected);
    }
}
