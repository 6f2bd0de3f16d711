//! The causes that delay an action.

use crate::action::Action;
use crate::ids::Rank;
use crate::simulate::Tensor;
use crate::timeline::QueueWait;

/// A computation of a timeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cell {
    /// The rank in the timeline.
    pub rank: Rank,
    /// The index among the rank's events that compute.
    pub index: usize,
}

/// Why an action did not start earlier.
#[derive(Debug, Clone, PartialEq)]
pub enum Cause {
    /// It is the first action of its rank, and needs no message.
    Start,
    /// It started when the action before it ended.
    Order,
    /// It waited for a message.
    Message {
        /// The action that made the tensor.
        from: Cell,
        /// The tensor.
        tensor: Tensor,
        /// The operation behind which the message waited in a queue of the communicator.
        in_line: Option<QueueWait>,
    },
    /// The rank waited for communication of its own.
    Wait(Wait),
    /// Nothing is missing in the timeline: the runtime or the machine took the time.
    Delay,
}

/// A wait of a rank that is an action: an `UNSHARD`, or a wait for a send or for a sum of gradients.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Wait {
    /// The rank that waits.
    pub rank: Rank,
    /// The action.
    pub action: Action,
    /// The end of the wait, in seconds.
    pub until: f64,
    /// The computation after which the communication began; for a sum over replicas, the one that was last.
    pub after: Option<Cell>,
}
