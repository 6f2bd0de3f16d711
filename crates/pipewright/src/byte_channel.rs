//! [`ByteChannel`]: messages of bytes between the processes of a run that belong to no step, such as copies of
//! the state. They share the network with the messages of the ranks, and no rank waits for them.

use std::fmt;
use std::sync::Arc;

use crossbeam_channel::{Receiver, unbounded};

use crate::ids::WorldRank;

type SendFunction = dyn Fn(WorldRank, Vec<u8>) + Send + Sync;

/// The channel of a process to the others. Clones are the same channel: a message is taken once.
///
/// A short message may overtake a long one from the same process: over MPI, a message counts as arrived when all its
/// bytes have. So each message says what it belongs to, such as the offset of a piece or the number of a question, and
/// a receiver takes messages in any order. If the order matters, the sender waits for an answer in between.
///
/// The queue of messages that have arrived has no limit, so a sender waits for answers.
#[derive(Clone)]
pub struct ByteChannel {
    rank: WorldRank,
    send: Arc<SendFunction>,
    incoming: Receiver<(WorldRank, Vec<u8>)>,
    is_open: Arc<dyn Fn() -> bool + Send + Sync>,
}

impl fmt::Debug for ByteChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ByteChannel").field("rank", &self.rank).finish_non_exhaustive()
    }
}

impl ByteChannel {
    /// Returns the channel of a rank. `send` never waits; `is_open` is false when the run has failed.
    #[cfg_attr(not(feature = "mpi"), expect(dead_code, reason = "only processes have one"))]
    pub(crate) fn new(
        rank: WorldRank,
        send: impl Fn(WorldRank, Vec<u8>) + Send + Sync + 'static,
        incoming: Receiver<(WorldRank, Vec<u8>)>,
        is_open: impl Fn() -> bool + Send + Sync + 'static,
    ) -> Self {
        Self { rank, send: Arc::new(send), incoming, is_open: Arc::new(is_open) }
    }

    /// Returns the channels of a number of ranks within this process.
    pub fn group(ranks: u32) -> Vec<Self> {
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..ranks).map(|_| unbounded()).unzip();
        let senders: Arc<[_]> = senders.into();
        let channel = |(rank, incoming): (u32, _)| {
            let (rank, senders) = (WorldRank::new(rank), senders.clone());
            let send = move |to: WorldRank, bytes| {
                if let Some(sender) = senders.get(to.get() as usize) {
                    // A rank whose channel was dropped takes no message.
                    let _ = sender.send((rank, bytes));
                }
            };
            Self { rank, send: Arc::new(send), incoming, is_open: Arc::new(|| true) }
        };
        (0..).zip(receivers).map(channel).collect()
    }

    /// Returns the rank of this process.
    pub fn rank(&self) -> WorldRank {
        self.rank
    }

    /// Sends a message without waiting.
    pub fn send(&self, to: WorldRank, bytes: Vec<u8>) {
        (self.send)(to, bytes);
    }

    /// Returns the messages that arrive, with their senders.
    pub fn incoming(&self) -> &Receiver<(WorldRank, Vec<u8>)> {
        &self.incoming
    }

    /// Returns whether the run has not failed. After a failure, the other processes may not answer.
    pub fn is_open(&self) -> bool {
        (self.is_open)()
    }
}
