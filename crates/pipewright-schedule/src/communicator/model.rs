//! The communicators that a program can be judged on.

use std::collections::VecDeque;
use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::action::Action;
use crate::ids::{Rank, StageIndex};

/// The properties of a communicator that decide whether a program finishes with the right tensors.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Communicator {
    /// The operations that wait for each other.
    pub streams: Streams,
    /// When a send completes. It has no effect with [`Streams::Buffered`].
    pub sends: Sends,
    /// The operations that start together. It has no effect with [`Streams::Buffered`].
    pub groups: Groups,
}

/// The queues in which a rank's operations run one after another.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Streams {
    /// Messages are tagged and buffered: no operation waits for another one.
    #[default]
    Buffered,
    /// One queue for each directed pair of ranks: the k-th send meets the k-th receive.
    Edge,
    /// One queue for each pair of ranks, for both directions.
    Pair,
    /// One queue for each rank.
    Rank,
}

/// When a send completes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub enum Sends {
    /// When its receive runs.
    #[default]
    Rendezvous,
    /// At once.
    Eager,
    /// At once if the message has at most `limit` bytes, otherwise when its receive runs.
    EagerUpTo {
        /// The largest message that is sent at once, in bytes.
        limit: u64,
        /// The bytes of the tensors between stage `s` and stage `s + 1`, for each `s`; the last entry also
        /// counts for all later stages. A gradient has the size of its activation.
        messages: Vec<u64>,
    },
}

/// The operations that start together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Groups {
    /// Each operation is by itself.
    #[default]
    Single,
    /// Sends and receives that follow each other in a row, without a computation or a wait between them, are
    /// one group: they run at the same time (NCCL user guide, "Point-to-point communication").
    Consecutive,
}

/// Writes the streams, and after colons the settings that differ from the default: `pair`, `rank:grouped`,
/// `rank:eager`, or `rank:eager=1024/4096/512` with the limit and then the sizes of the messages.
impl fmt::Display for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.streams.fmt(f)?;
        match &self.sends {
            Sends::Rendezvous => {}
            Sends::Eager => f.write_str(":eager")?,
            Sends::EagerUpTo { limit, messages } => {
                write!(f, ":eager={limit}")?;
                messages.iter().try_for_each(|bytes| write!(f, "/{bytes}"))?;
            }
        }
        match self.groups {
            Groups::Single => Ok(()),
            Groups::Consecutive => f.write_str(":grouped"),
        }
    }
}

impl FromStr for Communicator {
    type Err = UnknownStreams;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut settings = text.split(':');
        let streams = settings.next().unwrap_or_default().parse()?;
        let mut communicator = Self { streams, ..Self::default() };
        for setting in settings {
            match setting {
                "grouped" => communicator.groups = Groups::Consecutive,
                "eager" => communicator.sends = Sends::Eager,
                other => {
                    communicator.sends = limited(other).ok_or_else(|| UnknownStreams(text.to_owned()))?;
                }
            }
        }
        Ok(communicator)
    }
}

/// Reads `eager=LIMIT/BYTES/...`.
fn limited(setting: &str) -> Option<Sends> {
    let numbers = setting.strip_prefix("eager=")?.split('/').map(str::parse);
    let mut numbers = numbers.collect::<Result<VecDeque<u64>, _>>().ok()?;
    let limit = numbers.pop_front()?;
    (!numbers.is_empty()).then(|| Sends::EagerUpTo { limit, messages: numbers.into() })
}

/// The peer and the direction that a queue of a rank is for, if it is not for all. Operations with equal keys
/// are in one queue.
pub(crate) type QueueKey = (Option<Rank>, Option<bool>);

impl Streams {
    /// All kinds of streams, from the one with the fewest waits to the one with the most.
    pub const ALL: [Self; 4] = [Self::Buffered, Self::Edge, Self::Pair, Self::Rank];

    /// Returns the streams called `name`, or all kinds for `all`.
    ///
    /// # Errors
    /// When no streams have this name.
    pub fn parse_choice(name: &str) -> Result<Vec<Self>, UnknownStreams> {
        if name == "all" { Ok(Self::ALL.to_vec()) } else { Ok(vec![name.parse()?]) }
    }

    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Buffered => "buffered",
            Self::Edge => "edge",
            Self::Pair => "pair",
            Self::Rank => "rank",
        }
    }

    /// Returns whether a receive gets the message of its send, whatever their order.
    pub fn is_tagged(self) -> bool {
        self == Self::Buffered
    }

    /// Returns the key of the queue of a rank for its sends to `peer`, or for its receives from it.
    pub(crate) fn key(self, peer: Rank, is_send: bool) -> QueueKey {
        match self {
            Self::Buffered | Self::Edge => (Some(peer), Some(is_send)),
            Self::Pair => (Some(peer), None),
            Self::Rank => (None, None),
        }
    }

    /// Returns what a verdict on these streams assumes, with its source.
    pub fn assumption(self) -> &'static str {
        match self {
            Self::Buffered => "messages are tagged and buffered, as on Pipewright's transports",
            Self::Edge => {
                "one queue per directed pair of ranks, without tags, as in PyTorch 2.15 with \
                 `torch.distributed.config.pipeline_per_edge_p2p` (torch/distributed/pipelining/_p2p.py), and on Gloo \
                 (bench/peer/defer_recv.py)"
            }
            Self::Pair => {
                "one queue per pair of ranks for both directions, as in NCCL with a communicator per pair: an \
                 operation blocks the GPU's stream until it ends (NCCL user guide, \"Point To Point Communication \
                 Functions\")"
            }
            Self::Rank => {
                "one queue per rank, as in NCCL with one communicator for all: an operation blocks the GPU's stream \
                 until it ends (NCCL user guide, \"Point To Point Communication Functions\")"
            }
        }
    }
}

impl fmt::Display for Streams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that no kind of streams has.
#[derive(Clone, PartialEq, Eq, Error)]
#[error("`{0}` is not a transport; use buffered, edge, pair, rank or all")]
pub struct UnknownStreams(String);

crate::error_text::message_as_debug!(UnknownStreams);

impl FromStr for Streams {
    type Err = UnknownStreams;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|streams| streams.name() == name)
            .ok_or_else(|| UnknownStreams(name.to_owned()))
    }
}

impl Sends {
    /// Returns sends that complete at once if their message has at most `limit` bytes; with no limit or 0,
    /// none does. `messages` has the sizes as in [`Sends::EagerUpTo`]; if it is empty, all messages are
    /// smaller than the limit.
    pub fn eager_up_to(limit: Option<u64>, messages: Vec<u64>) -> Self {
        match limit.filter(|&limit| limit > 0) {
            None => Self::Rendezvous,
            Some(_) if messages.is_empty() => Self::Eager,
            Some(limit) => Self::EagerUpTo { limit, messages },
        }
    }

    /// Returns whether the message of `send` is sent at once.
    pub(crate) fn sends_at_once(&self, send: Action) -> bool {
        self.is_eager(match send {
            Action::SendBackward { stage, .. } => stage.before().unwrap_or(stage),
            other => other.stage(),
        })
    }

    /// Returns whether a message between `stage` and the next stage is sent at once.
    fn is_eager(&self, stage: StageIndex) -> bool {
        match self {
            Self::Rendezvous => false,
            Self::Eager => true,
            Self::EagerUpTo { limit, messages } => {
                let bytes = messages.get(stage.index()).or(messages.last());
                bytes.is_some_and(|bytes| bytes <= limit)
            }
        }
    }
}
