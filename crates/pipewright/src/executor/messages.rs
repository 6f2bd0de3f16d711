//! Sending messages, and taking messages that have arrived. Nothing in this file waits.

use std::sync::Arc;
use std::time::Instant;

use burn::tensor::Device;
use pipewright_schedule::StageIndex;
use serde::de::DeserializeOwned;

use super::machine::Executor;
use crate::collective::Exchange;
use crate::failure::Cause;
use crate::ids::WorldRank;
use crate::message::{AwaitedMessage, Message, Payload, Tag};
use crate::tensor::{OptionalTensors, Value};

impl Executor {
    /// Sends tensors to a rank of the world. Between threads their storage is transferred to the receiver, on whose
    /// device it then is.
    pub(super) fn send_tensors(&mut self, to: WorldRank, tag: Tag, mut tensors: OptionalTensors) {
        let start = Instant::now();
        if let Some(device) = self.endpoint.device_of(to) {
            tensors =
                tensors.into_iter().map(|tensor| tensor.map(|tensor| tensor.to_device(device))).collect();
        }
        if self.endpoint.moves_storage() {
            // This rank stops counting these bytes. The receiver counts them when it takes the message.
            self.memory.give_away(tensors.iter().flatten());
        }
        self.endpoint.send_world(to, tag, Payload::Tensors(tensors));
        self.step.exposed += start.elapsed();
    }

    /// Sends tensors that this rank keeps using. They are copied first, unless encoding them or moving them to the
    /// receiver's device makes a copy.
    pub(super) fn send_copies(&mut self, to: WorldRank, tag: Tag, mut tensors: OptionalTensors) {
        if self.endpoint.moves_storage() {
            let receiver = self.endpoint.device_of(to);
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
            self.endpoint.send_world(to, tag, Payload::Bytes(bytes.clone()));
        }
    }

    /// Takes a message if it has arrived.
    fn take(&mut self, awaited: AwaitedMessage) -> Option<Message> {
        let message = self.endpoint.try_take_world(awaited.from, awaited.tag)?;
        // An arrival counts as progress and restarts the deadline.
        self.board.moved(self.world_rank, self.step.position);
        Some(message)
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

    /// As [`Executor::receive`], for bytes that this rank passes on without decoding.
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

    /// As [`Executor::receive`], for tensors, which are moved to `device`.
    pub(super) fn receive_tensors(
        &mut self,
        exchange: &mut Exchange<OptionalTensors>,
        device: &Device,
    ) -> Result<Option<AwaitedMessage>, Cause> {
        exchange.poll(|awaited| {
            let Some((sent, tensors)) = self.try_take_tensors(awaited)? else { return Ok(None) };
            let moved = tensors.into_iter().map(|tensor| tensor.map(|tensor| tensor.to_device(device)));
            Ok(Some((sent, moved.collect())))
        })
    }

    /// Takes tensors for a stage of this rank, if they have arrived. Moves those that came in the processor's memory to the
    /// stage's device, and counts the time in which the rank waited for them.
    pub(super) fn take_tensors(
        &mut self,
        awaited: AwaitedMessage,
        stage: StageIndex,
    ) -> Result<Option<OptionalTensors>, Cause> {
        let Some((sent, tensors)) = self.try_take_tensors(awaited)? else { return Ok(None) };
        self.note_exposed(sent);
        let device = self.local_stage(stage).runner.device();
        let moved = tensors.into_iter().map(|tensor| tensor.map(|tensor| tensor.to_device(device)));
        Ok(Some(moved.collect()))
    }

    /// Takes tensors, if they have arrived, with the time at which they were sent.
    fn try_take_tensors(
        &mut self,
        awaited: AwaitedMessage,
    ) -> Result<Option<(Instant, OptionalTensors)>, Cause> {
        let Some(message) = self.take(awaited) else { return Ok(None) };
        let sent = message.sent();
        let tensors = message.into_tensors()?;
        self.memory.take_over(tensors.iter().flatten());
        Ok(Some((sent, tensors)))
    }

    /// Counts the time in which the rank was idle while a message was in transit. This time starts when the message was
    /// sent or when the rank began to wait, whichever is later, and ends at the current time. Waiting for a message
    /// that is not sent yet is a bubble.
    pub(super) fn note_exposed(&mut self, sent: Instant) {
        let waiting_since = self.step.entered.unwrap_or_else(Instant::now);
        self.step.exposed += waiting_since.max(sent).elapsed();
    }
}
