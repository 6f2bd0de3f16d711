//! Exchanges between ranks in the middle of a stage's forward or backward: the ranks that compute a stage
//! together, and the replicas that hold the experts of a stage together.
//!
//! They block the thread that computes. Everything else that a rank waits for is part of its state machine.
//! While one half of an overlap waits for an exchange, the other half may compute (`turns.rs`).
//!
//! # Why it cannot block for ever
//!
//! The ranks of a group have the same stages and run the same program, so they make the same exchanges in the
//! same order. A rank sends its own tensors to all others before it waits for theirs. So the group runs its
//! program as one rank would, and a validated program ends. For replicas, this is one program for the whole
//! expert group: each of its actions is the same action of all replicas. If two batches overlap, each numbers its
//! exchanges apart, and the ranks of a group begin an action together (`group_turns.rs`). The halves of an overlap number
//! their exchanges apart, so that each half exchanges with the same half of the others. A rank that waits has
//! the deadline of any other wait, and a failure of any rank wakes it.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use burn::tensor::Device;

use super::context::RankContext;
use super::exchange_time::Span;
use super::shared_endpoint::{SharedEndpoint, wait_in_attempt};
use super::turns::{OtherFailed, Turn};
use crate::collective::{Exchange, Group};
use crate::device::Devices;
use crate::failure::Cause;
use crate::memory::RankMemory;
use crate::message::{AwaitedMessage, Direction, MessageError, Payload, Tag};
use crate::nn::TensorLink;
use crate::progress::{Activity, ProgressBoard};
use crate::tensor::{OptionalTensors, Value, ValueKind, Values};
use crate::transport::Endpoint;
use crate::verification::checksum;

/// A rank's connection to the other ranks of one of its groups.
pub(crate) struct GroupLink {
    endpoint: SharedEndpoint,
    group: Group,
    /// The tag of an exchange, from the half of an overlap that makes it and the number of its earlier ones
    /// in the attempt.
    tag: fn(Option<Direction>, u32) -> Tag,
    devices: Devices,
    board: ProgressBoard,
    memory: RankMemory,
    deadline: Duration,
    /// The numbers of exchanges in this attempt ([`Rounds`]).
    rounds: [AtomicU32; 3],
    /// The rank's thread, from its first step on.
    thread: OnceLock<ThreadId>,
    /// The times of the exchanges since they were taken; `None` if nothing takes them.
    times: Option<Mutex<ExchangeTimes>>,
    /// The checksums of what the rank sends; `None` if nothing takes them.
    sums: Option<Mutex<ExchangeSums>>,
    /// The half of an overlap that runs on the rank's thread, if the halves do not run by turns.
    half: Mutex<Option<Direction>>,
}

/// The numbers of exchanges in an attempt: of actions that run alone, and of the halves of overlaps.
pub(super) type Rounds = [u32; 3];

/// The checksums of what a rank has sent since they were taken.
#[derive(Debug, Default)]
struct ExchangeSums {
    /// Whether they are noted: only in a step that may be repeated.
    are_noted: bool,
    sums: Vec<ExchangeSum>,
}

/// The checksum of what a rank has sent in an exchange.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExchangeSum {
    /// The half of an overlap that exchanged; `None` in an action that ran alone.
    pub(super) half: Option<Direction>,
    pub(super) sum: u64,
}

/// The times of a rank's exchanges in an action.
#[derive(Debug, Default)]
pub(super) struct ExchangeTimes {
    pub(super) exchanges: Vec<ExchangeSpan>,
    /// The times in which the messages for this rank were under way.
    pub(super) messages: Vec<Span>,
    /// The times in which the rank waited for exchanges and computed nothing, in order.
    pub(super) waits: Vec<Span>,
}

/// The time from the moment at which a rank had sent its tensors until the others' had arrived. It contains the
/// wait for a rank that sends later.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExchangeSpan {
    /// The half of an overlap that exchanged; `None` in an action that ran alone.
    pub(super) half: Option<Direction>,
    pub(super) start: Instant,
    pub(super) end: Instant,
}

impl fmt::Debug for GroupLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GroupLink").field("group", &self.group).finish_non_exhaustive()
    }
}

impl GroupLink {
    pub(super) fn new(
        endpoint: SharedEndpoint,
        context: &RankContext,
        group: &Group,
        tag: fn(Option<Direction>, u32) -> Tag,
        board: ProgressBoard,
        memory: RankMemory,
    ) -> Self {
        let config = &context.config;
        let link = Self::without_pipeline(endpoint, group.clone(), board, config.deadline);
        Self { tag, devices: config.devices.clone(), memory, ..link }
    }

    /// Returns the connection, which notes the times of its exchanges for [`GroupLink::take_times`].
    pub(super) fn with_times(self) -> Self {
        Self { times: Some(Mutex::default()), ..self }
    }

    /// Returns the connection of a rank that belongs to no pipeline to its tensor group.
    pub(crate) fn without_pipeline(
        endpoint: SharedEndpoint,
        group: Group,
        board: ProgressBoard,
        deadline: Duration,
    ) -> Self {
        Self {
            endpoint,
            group,
            tag: |half, round| Tag::TensorGroup { half, round },
            devices: Devices::default(),
            board,
            memory: RankMemory::new(),
            deadline,
            rounds: Default::default(),
            thread: OnceLock::new(),
            times: None,
            sums: None,
            half: Mutex::default(),
        }
    }

    /// Returns the connection, which can note checksums of what the rank sends ([`GroupLink::note_sums`]).
    pub(super) fn with_sums(self) -> Self {
        Self { sums: Some(Mutex::default()), ..self }
    }

    /// Starts an attempt at a step: an earlier one may have failed at different places on the ranks.
    pub(super) fn begin_step(&self) {
        self.rounds.iter().for_each(|rounds| rounds.store(0, Ordering::Relaxed));
        self.thread.get_or_init(|| std::thread::current().id());
        self.take_times();
        self.set_half(None);
        if let Some(sums) = &self.sums {
            *locked(sums) = ExchangeSums::default();
        }
    }

    /// Exchanges the numbers of exchanges of this attempt with the numbers of another one, which continues.
    pub(super) fn switch_rounds(&self, parked: &mut Rounds) {
        for (own, parked) in self.rounds.iter().zip(parked) {
            *parked = own.swap(*parked, Ordering::Relaxed);
        }
    }

    /// Notes checksums for [`GroupLink::take_sums`] until the next attempt begins, if the connection can.
    pub(super) fn note_sums(&self) {
        if let Some(sums) = &self.sums {
            locked(sums).are_noted = true;
        }
    }

    /// Sets the half of an overlap that runs on the rank's thread; `None` after the overlap.
    pub(super) fn set_half(&self, half: Option<Direction>) {
        *locked(&self.half) = half;
    }

    /// Takes out the times of the exchanges since the last call.
    pub(super) fn take_times(&self) -> ExchangeTimes {
        let times = self.times.as_ref();
        times.map(|times| std::mem::take(&mut *locked(times))).unwrap_or_default()
    }

    /// Takes out the checksums of what the rank has sent since the last call.
    pub(super) fn take_sums(&self) -> Vec<ExchangeSum> {
        self.sums.as_ref().map(|sums| std::mem::take(&mut locked(sums).sums)).unwrap_or_default()
    }

    /// Sends tensors to all other ranks, and returns the exchange with theirs, in the order of the group. It does not block.
    pub(super) fn begin_all_gather(&self, own: OptionalTensors) -> Exchange<OptionalTensors> {
        let tag = (self.tag)(None, self.rounds[index(None)].fetch_add(1, Ordering::Relaxed));
        let mut endpoint = self.endpoint.lock();
        for (_, to) in self.group.others() {
            let copies = self.copies_for(&endpoint, self.devices.of(to), own.clone());
            endpoint.send(to, tag, Payload::Tensors(copies));
        }
        Exchange::among(&self.group, tag, own)
    }

    /// Returns the tensors of all ranks, in the order of the group, to the first rank; to the others their
    /// own tensors only.
    pub(super) fn gather_on_first(&self, own: OptionalTensors) -> Result<Vec<OptionalTensors>, Cause> {
        let mut to_ranks = vec![OptionalTensors::new(); self.group.members().len()];
        // A rank's own list stays with it.
        to_ranks[self.group.index()] = own.clone();
        to_ranks[0] = own;
        self.exchange(to_ranks)
    }

    /// Sends a list of tensors to each rank, and returns the lists that the ranks have sent to this one, on
    /// the devices of its own list. Both are in the order of the group.
    pub(super) fn exchange(&self, mut to_ranks: Vec<OptionalTensors>) -> Result<Vec<OptionalTensors>, Cause> {
        let turn = Turn::current();
        let half = turn.as_ref().map(|turn| turn.half).or_else(|| *locked(&self.half));
        let tag = (self.tag)(half, self.rounds[index(half)].fetch_add(1, Ordering::Relaxed));
        // Also what the rank keeps: an expert computes the rows of its own replica too.
        let noted = self.sums.as_ref().filter(|sums| locked(sums).are_noted);
        let noted = noted.map(|sums| (sums, to_ranks.concat()));
        let own = std::mem::take(&mut to_ranks[self.group.index()]);
        let devices: Vec<Option<Device>> = own.iter().map(|tensor| Some(tensor.as_ref()?.device())).collect();
        let mut endpoint = self.endpoint.lock();
        for (index, to) in self.group.others() {
            let tensors = std::mem::take(&mut to_ranks[index]);
            let copies = self.copies_for(&endpoint, self.devices.of(to), tensors);
            endpoint.send(to, tag, Payload::Tensors(copies));
        }
        // The other half of an overlap sends and receives while this one waits.
        drop(endpoint);
        let start = Instant::now();
        // The others need not wait for the checksum.
        if let Some((sums, sent)) = noted {
            let sum = checksum(sent.into_iter().map(|tensor| tensor.map(Value::into_data)));
            locked(sums).sums.push(ExchangeSum { half, sum });
        }
        let (mut exchange, mut end) = (Exchange::among(&self.group, tag, own), start);
        while let Some(awaited) = exchange.poll(|awaited| self.take(awaited, &mut end))? {
            self.wait(awaited, turn.as_ref())?;
        }
        if let Some(turn) = &turn {
            turn.compute();
        }
        if let Some(times) = &self.times {
            locked(times).exchanges.push(ExchangeSpan { half, start, end });
        }
        let on_own_devices = |list: OptionalTensors| {
            let moved = list.into_iter().zip(&devices).map(|(tensor, device)| match device {
                Some(device) => tensor.map(|tensor| tensor.to_device(device)),
                None => tensor,
            });
            moved.collect()
        };
        Ok(exchange.into_contents().map(on_own_devices).collect())
    }

    /// Returns copies for the receiver, on its device, which this rank no longer counts. No copy is made if
    /// encoding or moving the tensors makes one.
    fn copies_for(
        &self,
        endpoint: &Endpoint,
        receiver: Option<&Device>,
        tensors: OptionalTensors,
    ) -> OptionalTensors {
        if endpoint.is_distributed() {
            return tensors;
        }
        let copy = |tensor: Value| match receiver {
            Some(device) if *device != tensor.device() => tensor.to_device(device),
            // Tensors of other kinds are never changed in place, and cannot be copied by an operation.
            _ if tensor.kind() != ValueKind::Float => tensor,
            _ => tensor.copied(),
        };
        let copies: OptionalTensors = tensors.into_iter().map(|tensor| tensor.map(copy)).collect();
        self.memory.give_away(copies.iter().flatten());
        copies
    }

    /// Takes a message if it has arrived. `latest` becomes the time of its arrival if that is later.
    fn take(
        &self,
        AwaitedMessage { from, tag }: AwaitedMessage,
        latest: &mut Instant,
    ) -> Result<Option<(Instant, OptionalTensors)>, MessageError> {
        let Some(message) = self.endpoint.lock().try_take(from, tag) else { return Ok(None) };
        self.board.keep_alive(self.group.own());
        let (sent, arrived) = (message.sent(), message.arrived());
        *latest = arrived.max(*latest);
        if let Some(times) = &self.times {
            // The clocks of two processes may disagree a little.
            locked(times).messages.push((sent.min(arrived), arrived));
        }
        let tensors = message.into_tensors()?;
        self.memory.take_over(tensors.iter().flatten());
        Ok(Some((sent, tensors)))
    }

    /// Lets the other half of the overlap compute, if it can. Otherwise waits until a message arrives.
    fn wait(&self, awaited: AwaitedMessage, turn: Option<&Turn>) -> Result<(), Cause> {
        let rank = self.group.own();
        match turn.map_or(Ok(false), Turn::give_way) {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            // `BackwardThreads::run` drops this error, and returns the error of the other half.
            Err(OtherFailed) => return Err(Cause::Aborted { first: rank }),
        }
        self.board.set_activity(rank, Activity::Waits(awaited));
        let start = Instant::now();
        let mut endpoint = self.endpoint.lock();
        let waited = wait_in_attempt(&mut endpoint, &self.board, self.deadline);
        if let Some(first) = endpoint.failure() {
            return Err(Cause::Aborted { first: first.rank });
        }
        waited?;
        if let Some(times) = &self.times {
            locked(times).waits.push((start, Instant::now()));
        }
        if let Some(turn) = turn {
            turn.message_arrived();
        }
        self.board.set_activity(rank, Activity::Computes);
        Ok(())
    }
}

/// Returns the index of a half's number of exchanges.
fn index(half: Option<Direction>) -> usize {
    match half {
        None => 0,
        Some(Direction::Forward) => 1,
        Some(Direction::Backward) => 2,
    }
}

fn locked<T>(notes: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // Nothing panics under the lock.
    notes.lock().unwrap_or_else(PoisonError::into_inner)
}

impl TensorLink for GroupLink {
    fn exchange(&self, to_ranks: Vec<Values>) -> Vec<Values> {
        // Another thread would send in the rank's name, unless it runs the rank's backward in an overlap.
        let is_own = |&thread: &ThreadId| thread == std::thread::current().id();
        let is_on_rank = self.thread.get().is_none_or(is_own) || Turn::current().is_some();
        assert!(
            is_on_rank,
            "a module that exchanges tensors computes on its ranks only: run it in `Pipeline::module`"
        );
        let to_ranks = to_ranks.into_iter().map(|list| list.into_iter().map(Some).collect()).collect();
        match GroupLink::exchange(self, to_ranks) {
            Ok(lists) => lists.into_iter().map(|list| list.into_iter().flatten().collect()).collect(),
            // A tensor operation returns no error. The driver reports it as the cause of the action's
            // failure.
            Err(cause) => std::panic::resume_unwind(Box::new(cause)),
        }
    }

    fn keep_alive(&self) {
        self.board.keep_alive(self.group.own());
    }
}
