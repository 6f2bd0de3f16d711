//! Exchanges between ranks in the middle of a stage's forward or backward: the ranks that compute a stage
//! together, and the replicas that hold the experts of a stage together.
//!
//! They block the rank's thread. Everything else that a rank waits for is part of its state machine.
//!
//! # Why it cannot block for ever
//!
//! The ranks of a group have the same stages and run the same program, so they make the same exchanges in the
//! same order. A rank sends its own tensors to all others before it waits for theirs. So the group runs its
//! program as one rank would, and a validated program ends. For replicas, this is one program for the whole
//! expert group: each of its actions is the same action of all replicas. A rank that waits has the deadline
//! of any other wait, and a failure of any rank wakes it.

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::ThreadId;
use std::time::Duration;

use burn::tensor::Device;

use super::context::RankContext;
use super::shared_endpoint::{SharedEndpoint, wait_for_message};
use crate::collective::{Exchange, Group};
use crate::device::Devices;
use crate::failure::Cause;
use crate::memory::RankMemory;
use crate::message::{AwaitedMessage, MessageError, Payload, Tag};
use crate::nn::TensorLink;
use crate::progress::{Activity, ProgressBoard};
use crate::tensor::{OptionalTensors, Value, ValueKind, Values};
use crate::transport::Endpoint;

/// A rank's connection to the other ranks of one of its groups.
pub(crate) struct GroupLink {
    endpoint: SharedEndpoint,
    group: Group,
    /// The tag of an exchange, from the number of earlier ones in the attempt.
    tag: fn(u32) -> Tag,
    devices: Devices,
    board: ProgressBoard,
    memory: RankMemory,
    deadline: Duration,
    /// The number of exchanges in this attempt.
    rounds: AtomicU32,
    /// The rank's thread, from its first step on.
    thread: OnceLock<ThreadId>,
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
        tag: fn(u32) -> Tag,
        board: ProgressBoard,
        memory: RankMemory,
    ) -> Self {
        let config = context.config();
        let link = Self::without_pipeline(endpoint, group.clone(), board, config.deadline);
        Self { tag, devices: config.devices.clone(), memory, ..link }
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
            tag: |round| Tag::TensorGroup { round },
            devices: Devices::default(),
            board,
            memory: RankMemory::new(),
            deadline,
            rounds: AtomicU32::new(0),
            thread: OnceLock::new(),
        }
    }

    /// Starts an attempt at a step: an earlier one may have failed at different places on the ranks.
    pub(super) fn begin_step(&self) {
        self.rounds.store(0, Ordering::Relaxed);
        self.thread.get_or_init(|| std::thread::current().id());
    }

    /// Returns the tensors of all ranks, in the order of the group, on the devices of this rank's tensors.
    pub(super) fn all_gather(&self, own: OptionalTensors) -> Result<Vec<OptionalTensors>, Cause> {
        self.exchange(vec![own; self.group.members().len()])
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
    fn exchange(&self, mut to_ranks: Vec<OptionalTensors>) -> Result<Vec<OptionalTensors>, Cause> {
        let tag = (self.tag)(self.rounds.fetch_add(1, Ordering::Relaxed));
        let own = std::mem::take(&mut to_ranks[self.group.index()]);
        let devices: Vec<Option<Device>> = own.iter().map(|tensor| Some(tensor.as_ref()?.device())).collect();
        let mut endpoint = self.endpoint.lock();
        for (index, to) in self.group.others() {
            let tensors = std::mem::take(&mut to_ranks[index]);
            let copies = self.copies_for(&endpoint, self.devices.of(to), tensors);
            endpoint.send(to, tag, Payload::Tensors(copies));
        }
        let mut exchange = Exchange::among(&self.group, tag, own);
        while let Some(awaited) = exchange.poll(|awaited| self.take(&mut endpoint, awaited))? {
            self.wait(&mut endpoint, awaited)?;
        }
        drop(endpoint);
        let here = |list: OptionalTensors| {
            let moved = list.into_iter().zip(&devices).map(|(tensor, device)| match device {
                Some(device) => tensor.map(|tensor| tensor.to_device(device)),
                None => tensor,
            });
            moved.collect()
        };
        Ok(exchange.into_contents().map(here).collect())
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

    fn take(
        &self,
        endpoint: &mut Endpoint,
        AwaitedMessage { from, tag }: AwaitedMessage,
    ) -> Result<Option<(std::time::Instant, OptionalTensors)>, MessageError> {
        let Some(message) = endpoint.try_take(from, tag) else { return Ok(None) };
        self.board.keep_alive(endpoint.rank());
        let sent = message.sent();
        let tensors = message.into_tensors()?;
        self.memory.take_over(tensors.iter().flatten());
        Ok(Some((sent, tensors)))
    }

    fn wait(&self, endpoint: &mut Endpoint, awaited: AwaitedMessage) -> Result<(), Cause> {
        let rank = endpoint.rank();
        self.board.set_activity(rank, Activity::Waits(awaited));
        let waited = wait_for_message(endpoint, &self.board, self.deadline);
        if endpoint.abort().is_raised() {
            let first = endpoint.abort().first().map_or(rank, |error| error.rank);
            return Err(Cause::Aborted { first });
        }
        waited?;
        self.board.set_activity(rank, Activity::Computes);
        Ok(())
    }
}

impl TensorLink for GroupLink {
    fn exchange(&self, to_ranks: Vec<Values>) -> Vec<Values> {
        // Another thread would send in the rank's name.
        let is_here = self.thread.get().is_none_or(|&thread| thread == std::thread::current().id());
        assert!(
            is_here,
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
