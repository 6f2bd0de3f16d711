//! [`RankLink`]: a rank that computes stages without a pipeline, such as one that generates text.
//!
//! It has no program, no steps and no update. It sends messages to other ranks in an order that both sides
//! know, exchanges tensors with the ranks that compute its stages together with it, records its progress, and
//! shares the first failure with all ranks. Ranks may be threads or processes.
//!
//! ```
//! use std::time::Duration;
//!
//! use burn::tensor::{Device, Tensor};
//! use pipewright::rank_link::RankLink;
//! use pipewright::tensor::{pack, unpack};
//! use pipewright::transport::World;
//!
//! let [first, second] = RankLink::of_world(World::local(2), 1, Duration::from_secs(60)).try_into().expect("two ranks");
//! first.send(second.rank(), &"ones", pack(Tensor::<1>::ones([3], &Device::flex())));
//! let (name, tensors) = second.receive::<String>(first.rank())?;
//! let ones: Tensor<1> = unpack(tensors)?;
//! assert_eq!((name.as_str(), ones.dims()), ("ones", [3]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::byte_channel::ByteChannel;
use crate::collective::Group;
use crate::executor::{GroupLink, SharedEndpoint};
use crate::failure::{Abort, Cause, StepError};
use crate::ids::{StepNumber, WorldRank};
use crate::message::{Message, Payload, Tag, decoded, encoded};
use crate::nn::{TensorLink, TensorParallel};
use crate::progress::{Activity, ProgressBoard};
use crate::tensor::{TensorRank, Values};
use crate::transport::{Endpoint, LONGEST_WAIT, World};

/// A rank's connection to the other ranks of its world. Clones are the same connection. Only the rank's
/// thread sends, receives and computes with it; other threads may ask for progress and failures.
#[derive(Clone)]
pub struct RankLink(Arc<Linked>);

struct Linked {
    rank: WorldRank,
    endpoint: SharedEndpoint,
    abort: Abort,
    board: ProgressBoard,
    tensor: TensorRank,
    tensor_group: Arc<GroupLink>,
    detection_lag: Duration,
    /// The channel to the process of the first rank, if ranks run in several processes.
    bytes: Option<ByteChannel>,
    sent: MessageNumbers,
    received: MessageNumbers,
}

/// The number of the next message to each rank, or from it.
#[derive(Default)]
struct MessageNumbers(Mutex<HashMap<WorldRank, u32>>);

impl MessageNumbers {
    fn next(&self, peer: WorldRank) -> u32 {
        let mut numbers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let next = numbers.entry(peer).or_default();
        std::mem::replace(next, next.wrapping_add(1))
    }
}

impl fmt::Debug for RankLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RankLink").field("rank", &self.0.rank).finish_non_exhaustive()
    }
}

impl RankLink {
    /// How long a wait lasts before it checks whether a rank has failed.
    pub const LOOK: Duration = Duration::from_millis(100);

    /// Returns the links of this process's ranks of a world, in their order. `tensor_ranks` consecutive ranks
    /// compute their stages together. A process without heartbeats for `deadline` is lost. Exchanges between
    /// tensor ranks fail when no rank of the world makes progress for twice as long, so that a thread that
    /// watches the ranks can first report which of them computes.
    pub fn of_world(world: World, tensor_ranks: u32, deadline: Duration) -> Vec<Self> {
        let deadline = deadline.min(LONGEST_WAIT);
        world.set_deadline(deadline);
        let bytes = world.byte_channel();
        let (endpoints, board) = world.into_parts();
        board.set_tensor_ranks(tensor_ranks);
        let link =
            |endpoint| Self::new(endpoint, board.clone(), bytes.clone(), tensor_ranks.max(1), deadline);
        endpoints.into_iter().map(link).collect()
    }

    fn new(
        endpoint: Endpoint,
        board: ProgressBoard,
        bytes: Option<ByteChannel>,
        tensor_ranks: u32,
        deadline: Duration,
    ) -> Self {
        let (rank, abort) = (endpoint.rank(), endpoint.abort().clone());
        let first = rank.get() - rank.get() % tensor_ranks;
        let members: Vec<WorldRank> =
            (first..first.saturating_add(tensor_ranks).min(endpoint.ranks())).map(WorldRank::new).collect();
        let tensor = TensorRank { index: rank.get() - first, of: members.len() as u32 };
        let group = Group::new(members, rank).expect("the rank is one of several consecutive ranks");
        let detection_lag = endpoint.detection_lag(deadline);
        let endpoint = SharedEndpoint::new(endpoint);
        let patience = deadline.saturating_mul(2).min(LONGEST_WAIT);
        let tensor_group =
            Arc::new(GroupLink::without_pipeline(endpoint.clone(), group, board.clone(), patience));
        Self(Arc::new(Linked {
            rank,
            endpoint,
            abort,
            board,
            tensor,
            tensor_group,
            detection_lag,
            bytes,
            sent: MessageNumbers::default(),
            received: MessageNumbers::default(),
        }))
    }

    /// Returns the rank.
    pub fn rank(&self) -> WorldRank {
        self.0.rank
    }

    /// Returns the rank's place among the ranks that compute its stages together, with its connection to
    /// them. An exchange that fails unwinds with a [`Cause`] as its payload.
    pub fn tensor(&self) -> TensorParallel {
        let link: Arc<dyn TensorLink> = self.0.tensor_group.clone();
        TensorParallel::new(self.0.tensor, link)
    }

    /// Sends a value and tensors to another rank, without waiting.
    pub fn send<T: Serialize + ?Sized>(&self, to: WorldRank, head: &T, tensors: Values) {
        let has_tensors = !tensors.is_empty();
        let head = Payload::of(&(has_tensors, head));
        let tensors = has_tensors.then(|| Payload::Tensors(tensors.into_iter().map(Some).collect()));
        for payload in std::iter::once(head).chain(tensors) {
            let number = self.0.sent.next(to);
            self.0.endpoint.lock().send(to, Tag::Ordered { number }, payload);
        }
    }

    /// Returns the next value and its tensors from another rank, as soon as they have arrived. It waits for as
    /// long as no rank fails and no process is lost, because a rank may have nothing to do for any time.
    ///
    /// # Errors
    /// When a rank fails, or the message is not such a value.
    pub fn receive<T: DeserializeOwned>(&self, from: WorldRank) -> Result<(T, Values), Cause> {
        let (has_tensors, head): (bool, T) = self.next_message(from)?.read()?;
        let tensors = if has_tensors { self.next_message(from)?.into_tensors()? } else { Vec::new() };
        Ok((head, tensors.into_iter().flatten().collect()))
    }

    fn next_message(&self, from: WorldRank) -> Result<Message, Cause> {
        let number = self.0.received.next(from);
        loop {
            let mut endpoint = self.0.endpoint.lock();
            if let Some(message) = endpoint.try_take(from, Tag::Ordered { number }) {
                return Ok(message);
            }
            if let Some(first) = self.failure() {
                return Err(Cause::Aborted { first: first.rank });
            }
            endpoint.wait(Instant::now() + Self::LOOK);
        }
    }

    /// Sends a value to the process of the first rank, for [`RankLink::next_report`]. Within one process it
    /// does nothing. A short value may arrive before a long one that was reported earlier
    /// ([`ByteChannel`]).
    pub fn report<T: Serialize + ?Sized>(&self, value: &T) {
        if let Some(bytes) = &self.0.bytes {
            bytes.send(WorldRank::new(0), encoded(value).to_vec());
        }
    }

    /// Returns the next value that a rank of another process has reported, in the process of the first rank;
    /// `None` if there is none yet.
    ///
    /// # Errors
    /// When a rank fails, or the bytes are not such a value. Values that were reported before come first.
    pub fn next_report<T: DeserializeOwned>(&self) -> Result<Option<T>, Cause> {
        let Some(bytes) = &self.0.bytes else { return Ok(None) };
        let failure = self.failure();
        let wait = if failure.is_some() { Duration::ZERO } else { Self::LOOK };
        match (bytes.incoming().recv_timeout(wait), failure) {
            (Ok((from, bytes)), _) => Ok(Some(decoded(from, Tag::Report, &bytes)?)),
            (Err(_), Some(first)) => Err(Cause::Aborted { first: first.rank }),
            (Err(_), None) => Ok(None),
        }
    }

    /// Records that the rank begins to compute.
    pub fn begin(&self) {
        self.0.board.set_activity(self.0.rank, Activity::Computes);
    }

    /// Records that the rank has computed something, and waits for more.
    pub fn end(&self) {
        self.0.board.keep_alive(self.0.rank);
        self.0.board.set_activity(self.0.rank, Activity::NoStep);
    }

    /// Returns a number that grows whenever any rank of the world makes progress. The numbers of other
    /// processes arrive with their heartbeats.
    pub fn moves(&self) -> u64 {
        self.0.board.moves()
    }

    /// Returns how much longer than the deadline it may take until a process without heartbeats counts as
    /// lost.
    pub fn detection_lag(&self) -> Duration {
        self.0.detection_lag
    }

    /// Returns whether a rank computes, as far as this process knows.
    pub fn is_busy(&self, rank: WorldRank) -> bool {
        self.0.board.is_busy(rank)
    }

    /// Reports a failure of this rank to all ranks, which ends their waits. The first one counts.
    pub fn fail(&self, cause: Cause) {
        self.0.endpoint.lock().fail(Self::error(self.0.rank, cause));
    }

    /// Does what [`RankLink::fail`] does for any `rank`, on another thread than the rank's. Ranks of the same
    /// process notice it at the end of their waits.
    pub fn give_up(&self, rank: WorldRank, cause: Cause) {
        self.0.abort.raise(Self::error(rank, cause));
    }

    fn error(rank: WorldRank, cause: Cause) -> StepError {
        StepError { rank, step: StepNumber::default(), action: None, cause }
    }

    /// Returns the first failure of any rank.
    pub fn failure(&self) -> Option<StepError> {
        self.0.abort.first()
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use burn::tensor::{Device, Tensor};

    use super::*;
    use crate::tensor::{pack, unpack};

    const LONG: Duration = Duration::from_secs(60);

    fn links(ranks: u32, tensor_ranks: u32) -> Vec<RankLink> {
        RankLink::of_world(World::local(ranks), tensor_ranks, LONG)
    }

    #[test]
    fn messages_arrive_in_their_order() {
        let [first, second] = links(2, 1).try_into().expect("two ranks");
        let ones = |count: usize| pack(Tensor::<1>::ones([count], &Device::flex()));
        for count in 0..3usize {
            let tensors = if count == 1 { Vec::new() } else { ones(count + 1) };
            first.send(second.rank(), &count, tensors);
        }
        for count in 0..3usize {
            let (head, tensors) = second.receive::<usize>(first.rank()).expect("it was sent");
            let sizes: Vec<usize> = tensors.iter().map(|tensor| tensor.shape().num_elements()).collect();
            assert_eq!((head, sizes), (count, if count == 1 { vec![] } else { vec![count + 1] }));
        }
    }

    #[test]
    fn tensor_ranks_add_and_a_failure_ends_every_wait() {
        let links = links(5, 2);
        let places: Vec<TensorRank> = links.iter().map(|link| link.tensor().rank()).collect();
        let place = |index, of| TensorRank { index, of };
        assert_eq!(places, [place(0, 2), place(1, 2), place(0, 2), place(1, 2), place(0, 1)]);
        let sums = links.iter().map(|link| {
            let link = link.clone();
            thread::spawn(move || {
                let x = Tensor::<2>::full([1, 1], f64::from(link.rank().get()), &Device::flex());
                link.tensor().sum(x).into_data().iter::<f32>().collect::<Vec<_>>()
            })
        });
        let sums: Vec<_> =
            sums.collect::<Vec<_>>().into_iter().map(|sum| sum.join().expect("a sum")).collect();
        assert_eq!(sums, [[1.0], [1.0], [5.0], [5.0], [4.0]]);

        let waits = links[1..3].iter().map(|link| {
            let link = link.clone();
            thread::spawn(move || match link.rank().get() {
                1 => link.receive::<u32>(WorldRank::new(0)).map(drop).expect_err("rank 3 fails").to_string(),
                _ => {
                    let sum = || link.tensor().sum(Tensor::<2>::ones([1, 1], &Device::flex()));
                    let payload = std::panic::catch_unwind(std::panic::AssertUnwindSafe(sum));
                    let payload = payload.map(drop).expect_err("rank 3 fails");
                    payload.downcast::<Cause>().expect("a cause").to_string()
                }
            })
        });
        let waits: Vec<_> = waits.collect();
        links[3].fail(Cause::Panic { message: "no".to_owned() });
        for wait in waits {
            assert_eq!(wait.join().expect("no panic"), "aborted because rank 3 failed");
        }
        assert_eq!(links[0].failure().map(|error| error.rank.get()), Some(3));
    }

    #[test]
    fn progress_is_seen_by_all_ranks() {
        let links = links(2, 1);
        let before = links[0].moves();
        links[1].begin();
        assert_eq!([0, 1].map(|rank| links[0].is_busy(WorldRank::new(rank))), [false, true]);
        links[1].end();
        assert!(links[0].moves() > before && !links[0].is_busy(WorldRank::new(1)));
        let sent = unpack::<Tensor<1>>(Vec::new());
        assert!(sent.is_err(), "no tensors");
    }
}
