//! A rank's connection to the other ranks: it sends messages, takes messages that have arrived, and shows the
//! rank's progress to the others. Only [`Connection::wait`] waits.

use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::tensor::Device;
use pipewright_schedule::ClockSkew;
use serde::de::DeserializeOwned;

use super::context::RankContext;
use super::group_link::{ExchangeSum, ExchangeTimes, GroupLink, Rounds};
use super::shared_endpoint::{SharedEndpoint, wait_for_message};
use crate::collective::Exchange;
use crate::device::Devices;
use crate::failure::{Abort, Cause, StepError};
use crate::ids::{Attempt, StepNumber, WorldRank};
use crate::memory::RankMemory;
use crate::message::{AwaitedMessage, Direction, Message, Payload, Tag};
use crate::nn::{ExpertParallel, TensorParallel};
use crate::progress::{Activity, ProgressBoard};
use crate::tensor::{OptionalTensors, Value};
use crate::transport::Endpoint;
use crate::verification::Verify;

/// A rank's connection to the other ranks.
pub(crate) struct Connection {
    rank: WorldRank,
    /// Locked for each call, because the links to the rank's groups use it too.
    endpoint: SharedEndpoint,
    abort: Abort,
    /// The attempt that runs, or that ran last.
    attempt: Attempt,
    /// Whether sent tensors keep their storage. If not, the sender frees it as soon as the message is
    /// encoded.
    moves_storage: bool,
    /// The devices of all ranks of the world.
    devices: Devices,
    /// The exchanges between the ranks that compute stages together with this one.
    pub(super) tensor_group: Arc<GroupLink>,
    expert_group: Arc<GroupLink>,
    board: ProgressBoard,
    deadline: Duration,
    pub(super) memory: RankMemory,
    /// The time in which the rank has sent tensors in this attempt.
    pub(super) sending: Duration,
    /// The bytes of the boundaries' tensors that the rank has sent in this attempt.
    pub(super) boundary_bytes: u64,
}

/// The figures of an attempt that continues later ([`Connection::switch`]).
#[derive(Default)]
pub(super) struct ParkedAttempt {
    attempt: Attempt,
    sending: Duration,
    boundary_bytes: u64,
    /// The numbers of exchanges in the tensor group and in the expert group.
    rounds: [Rounds; 2],
}

impl Connection {
    pub(crate) fn new(
        endpoint: Endpoint,
        context: &RankContext,
        board: ProgressBoard,
        memory: RankMemory,
    ) -> Self {
        let (abort, moves_storage) = (endpoint.abort().clone(), !endpoint.is_distributed());
        let endpoint = SharedEndpoint::new(endpoint);
        let link =
            |group, tag| GroupLink::new(endpoint.clone(), context, group, tag, board.clone(), memory.clone());
        let tensor_group = link(&context.tensor_group, |half, round| Tag::TensorGroup { half, round });
        let expert_group = link(&context.expert_group, |half, round| Tag::ExpertGroup { half, round });
        let expert_group = match context.config.verify {
            Verify::Off => expert_group.with_times(),
            Verify::OnSuspicion => expert_group.with_times().with_sums(),
        };
        let (tensor_group, expert_group) = (Arc::new(tensor_group), Arc::new(expert_group));
        Self {
            rank: context.world_rank,
            endpoint,
            abort,
            attempt: Attempt::default(),
            moves_storage,
            devices: context.config.devices.clone(),
            tensor_group,
            expert_group,
            board,
            deadline: context.config.deadline,
            memory,
            sending: Duration::ZERO,
            boundary_bytes: 0,
        }
    }

    /// Starts an attempt at a step or at another exchange of all ranks.
    pub(super) fn begin(&mut self, attempt: Attempt) {
        self.attempt = attempt;
        self.board.set_attempt(self.rank, attempt);
        self.endpoint.lock().begin_step(attempt);
        self.tensor_group.begin_step();
        self.expert_group.begin_step();
        (self.sending, self.boundary_bytes) = (Duration::ZERO, 0);
        self.moved(0);
        self.set_activity(Activity::Computes);
    }

    /// Starts an attempt while another one continues. The rank is in the attempts `alive`, the first and the last.
    pub(super) fn begin_next(&mut self, attempt: Attempt, alive: [Attempt; 2]) {
        self.abort.begin_next(attempt, alive[0]);
        self.board.set_attempt(self.rank, attempt);
        self.attempt = attempt;
        self.switch_rounds(&mut Default::default());
        (self.sending, self.boundary_bytes) = (Duration::ZERO, 0);
        self.endpoint.lock().continue_in(attempt, alive);
    }

    /// Counts the peaks of memory and of sends from now on, for the batch that ends next.
    pub(super) fn restart_peaks(&self) {
        self.memory.restart_peak();
        self.endpoint.lock().restart_sends();
    }

    /// Exchanges the attempt that runs with one that is parked. The rank is in the attempts `alive`, the first and the last.
    pub(super) fn switch(&mut self, parked: &mut ParkedAttempt, alive: [Attempt; 2]) {
        std::mem::swap(&mut self.attempt, &mut parked.attempt);
        std::mem::swap(&mut self.sending, &mut parked.sending);
        std::mem::swap(&mut self.boundary_bytes, &mut parked.boundary_bytes);
        self.switch_rounds(&mut parked.rounds);
        self.endpoint.lock().continue_in(self.attempt, alive);
    }

    /// Exchanges the numbers of exchanges of two attempts.
    fn switch_rounds(&self, parked: &mut [Rounds; 2]) {
        let [of_tensor_group, of_expert_group] = parked;
        self.tensor_group.switch_rounds(of_tensor_group);
        self.expert_group.switch_rounds(of_expert_group);
    }

    /// Takes out the times of the exchanges of tokens since the last call.
    pub(super) fn take_exchange_times(&self) -> ExchangeTimes {
        self.expert_group.take_times()
    }

    /// Takes out the checksums of the tokens that the rank has sent since the last call; none if steps are
    /// not verified.
    pub(super) fn take_exchange_sums(&self) -> Vec<ExchangeSum> {
        self.expert_group.take_sums()
    }

    /// Notes the checksums of the tokens that the rank sends, until the next attempt begins.
    pub(super) fn note_exchange_sums(&self) {
        self.expert_group.note_sums();
    }

    /// Sets the half of an overlap that runs on the rank's thread; `None` after the overlap.
    pub(super) fn set_half(&self, half: Option<Direction>) {
        self.expert_group.set_half(half);
    }

    /// Returns the exchanges of the rank's groups for the modules of the stages.
    pub(crate) fn tensor_parallel(&self, context: &RankContext) -> TensorParallel {
        let experts = ExpertParallel::new(context.expert_rank(), self.expert_group.clone());
        TensorParallel::new(context.tensor_rank(), self.tensor_group.clone()).with_expert_parallel(experts)
    }

    /// Returns the rank whose failure stops this one, if a rank has failed in its attempt or before.
    pub(super) fn stopped_by(&self) -> Option<WorldRank> {
        if !self.abort.is_raised_in(self.attempt) {
            return None;
        }
        Some(self.abort.first_in(self.attempt).map_or(self.rank, |error| error.rank))
    }

    /// Returns whether a rank has failed in an attempt or before.
    pub(super) fn is_stopped_in(&self, attempt: Attempt) -> bool {
        self.abort.is_raised_in(attempt)
    }

    /// Raises the abort flag in this attempt and in later ones, and wakes every waiting rank.
    pub(super) fn fail(&self, error: StepError) {
        // A rank that waits in an earlier attempt is woken and begins its wait anew, so the pipeline's wait begins anew too.
        self.board.keep_alive(self.rank);
        self.endpoint.lock().fail(error);
    }

    /// Records that the rank has done its actions before `position`, which restarts the deadline of all
    /// ranks.
    pub(super) fn moved(&self, position: usize) {
        self.board.moved(self.rank, position);
    }

    /// Records the step that the rank begins.
    pub(super) fn set_step(&self, step: StepNumber) {
        self.board.set_step(self.rank, step);
    }

    /// Records what the rank is doing.
    pub(super) fn set_activity(&self, activity: Activity) {
        self.board.set_activity(self.rank, activity);
    }

    /// Returns the progress of all ranks, one line for each.
    pub(super) fn progress_report(&self) -> String {
        self.board.report()
    }

    /// Sleeps until a message arrives or a rank fails.
    ///
    /// # Errors
    /// When no rank has made progress for the whole deadline.
    pub(super) fn wait(&mut self) -> Result<(), Cause> {
        wait_for_message(&mut self.endpoint.lock(), &self.board, self.deadline)
    }

    /// Sends tensors to a rank of the world. Between threads their storage is transferred to the receiver, on
    /// whose device it then is.
    pub(super) fn send_tensors(&mut self, to: WorldRank, tag: Tag, mut tensors: OptionalTensors) {
        let start = Instant::now();
        if let Some(device) = self.device_of(to) {
            tensors =
                tensors.into_iter().map(|tensor| tensor.map(|tensor| tensor.to_device(device))).collect();
        }
        if self.moves_storage {
            // This rank stops counting these bytes. The receiver counts them when it takes the message.
            self.memory.give_away(tensors.iter().flatten());
        }
        self.send(to, tag, Payload::Tensors(tensors));
        self.sending += start.elapsed();
    }

    /// Sends the tensors of a boundary, and counts their bytes.
    pub(super) fn send_boundary(&mut self, to: WorldRank, tag: Tag, tensors: OptionalTensors) {
        self.boundary_bytes += tensors.iter().flatten().map(|tensor| tensor.bytes() as u64).sum::<u64>();
        self.send_tensors(to, tag, tensors);
    }

    /// Sends tensors that this rank keeps using. They are copied first, unless encoding them or moving them
    /// to the receiver's device makes a copy.
    pub(super) fn send_copies(&mut self, to: WorldRank, tag: Tag, mut tensors: OptionalTensors) {
        if self.moves_storage {
            let receiver = self.device_of(to);
            let own = |tensor: Value| match receiver {
                Some(device) if *device != tensor.device() => tensor,
                _ => tensor.copied(),
            };
            tensors = tensors.into_iter().map(|tensor| tensor.map(own)).collect();
        }
        self.send_tensors(to, tag, tensors);
    }

    /// Sends the same bytes to several ranks. The last rank has the largest subtree and gets them first.
    pub(super) fn send_bytes(&mut self, to: &[WorldRank], tag: Tag, bytes: &Arc<[u8]>) {
        for &to in to.iter().rev() {
            self.send(to, tag, Payload::Bytes(bytes.clone()));
        }
    }

    /// Sends a message to a rank of the world.
    pub(super) fn send(&mut self, to: WorldRank, tag: Tag, payload: Payload) {
        self.endpoint.lock().send(to, tag, payload);
    }

    /// Returns the device to which tensors for a rank are moved before they are sent. `None` if it is not
    /// known, or if messages are encoded, which takes the tensors off their device.
    fn device_of(&self, rank: WorldRank) -> Option<&Device> {
        self.devices.of(rank).filter(|_| self.moves_storage)
    }

    /// Returns whether the message with `tag` to a rank of the world has left.
    pub(super) fn is_sent(&self, to: WorldRank, tag: Tag) -> bool {
        self.endpoint.lock().is_sent(to, tag)
    }

    /// Takes the messages of an exchange of values that have arrived, or returns a missing one.
    pub(super) fn receive<T: DeserializeOwned>(
        &mut self,
        exchange: &mut Exchange<T>,
    ) -> Result<Option<AwaitedMessage>, Cause> {
        exchange.poll(|awaited| {
            let Some(message) = self.take(awaited) else { return Ok(None) };
            let sent = message.sent();
            Ok(Some((sent, message.read()?)))
        })
    }

    /// Like [`Connection::receive`], for bytes that this rank passes on without decoding.
    pub(super) fn receive_bytes(
        &mut self,
        exchange: &mut Exchange<Arc<[u8]>>,
    ) -> Result<Option<AwaitedMessage>, Cause> {
        exchange.poll(|awaited| {
            let Some(message) = self.take(awaited) else { return Ok(None) };
            let sent = message.sent();
            Ok(Some((sent, message.into_bytes()?)))
        })
    }

    /// Like [`Connection::receive`], for tensors, which are moved to `device`.
    pub(super) fn receive_tensors(
        &mut self,
        exchange: &mut Exchange<OptionalTensors>,
        device: &Device,
    ) -> Result<Option<AwaitedMessage>, Cause> {
        exchange.poll(|awaited| {
            let taken = self.take_tensors(awaited)?;
            Ok(taken.map(|(sent, tensors)| (sent, on_device(tensors, device))))
        })
    }

    /// Takes tensors if they have arrived. Returns them with the time at which they were sent.
    pub(super) fn take_tensors(
        &mut self,
        awaited: AwaitedMessage,
    ) -> Result<Option<(Instant, OptionalTensors)>, Cause> {
        let Some(message) = self.take(awaited) else { return Ok(None) };
        let sent = message.sent();
        let tensors = message.into_tensors()?;
        self.memory.take_over(tensors.iter().flatten());
        Ok(Some((sent, tensors)))
    }

    /// Returns whether a message has arrived that was not taken.
    pub(super) fn has_arrived(&self, awaited: AwaitedMessage) -> bool {
        self.endpoint.lock().has_arrived(awaited.from, awaited.tag)
    }

    /// Takes a message if it has arrived.
    fn take(&mut self, awaited: AwaitedMessage) -> Option<Message> {
        let message = self.endpoint.lock().try_take(awaited.from, awaited.tag)?;
        // An arrival counts as progress and restarts the deadline.
        self.board.keep_alive(self.rank);
        Some(message)
    }

    /// Returns the largest number of boundary messages that were in flight at once in this attempt.
    pub(super) fn sends_in_flight(&self) -> u32 {
        self.endpoint.lock().sends_in_flight()
    }

    /// Returns an instant on the clock that all processes share, in seconds; 0 within one process.
    pub(super) fn common_seconds(&self, at: Instant) -> f64 {
        self.endpoint.lock().common_seconds(at).unwrap_or_default()
    }

    /// Returns the accuracy of [`Connection::common_seconds`].
    pub(super) fn clock_skew(&self, at: Instant) -> Option<ClockSkew> {
        self.endpoint.lock().clock_skew(at)
    }
}

/// Moves tensors to `device`.
pub(super) fn on_device(tensors: OptionalTensors, device: &Device) -> OptionalTensors {
    tensors.into_iter().map(|tensor| tensor.map(|tensor| tensor.to_device(device))).collect()
}
