//! How a rank sends messages and takes those that have arrived. Nothing in here waits.

use std::sync::Arc;
use std::time::Instant;

use burn::tensor::Device;
use pipewright_schedule::{Rank, StageIndex};
use serde::de::DeserializeOwned;

use super::machine::Executor;
use crate::collective::Exchange;
use crate::failure::Cause;
use crate::message::{Message, Payload, Tag};
use crate::progress::Waiting;
use crate::tensor::{OptionalTensors, Value};

impl Executor {
    /// Sends tensors to a rank of the world; their storage goes with them.
    pub(super) fn send_tensors(&mut self, to: Rank, tag: Tag, tensors: OptionalTensors) {
        let start = Instant::now();
        if self.endpoint.moves_storage() {
            // The receiver counts these bytes from here on.
            self.memory.give_away(tensors.iter().flatten());
        }
        self.endpoint.send_world(to, tag, Payload::Tensors(tensors));
        self.step.exposed += start.elapsed();
    }

    /// Sends tensors that this rank keeps using. They leave in storage of their own; encoding makes that too.
    pub(super) fn send_copies(&mut self, to: Rank, tag: Tag, mut tensors: OptionalTensors) {
        if self.endpoint.moves_storage() {
            tensors = tensors.into_iter().map(|tensor| tensor.map(Value::copied)).collect();
        }
        self.send_tensors(to, tag, tensors);
    }

    /// Sends the same bytes to several ranks: the last one has the largest subtree and gets them first.
    pub(super) fn send_bytes(&mut self, to: &[Rank], tag: Tag, bytes: &Arc<[u8]>) {
        for &to in to.iter().rev() {
            self.endpoint.send_world(to, tag, Payload::Bytes(bytes.clone()));
        }
    }

    /// Takes a message if it has arrived.
    fn take(&mut self, waiting: Waiting) -> Option<Message> {
        let message = self.endpoint.try_take_world(waiting.from, waiting.tag)?;
        // An arrival counts as a move, so that a deadline starts again.
        self.board.moved(self.world_rank, self.step.position);
        Some(message)
    }

    /// Takes what has arrived of an exchange of values, or says what is missing.
    pub(super) fn receive<T: DeserializeOwned>(
        &mut self,
        exchange: &mut Exchange<T>,
    ) -> Result<Option<Waiting>, Cause> {
        exchange.poll(|waiting| {
            let Some(message) = self.take(waiting) else { return Ok(None) };
            let sent = message.sent();
            Ok(Some((sent, message.read()?)))
        })
    }

    /// As [`Executor::receive`], for bytes that this rank passes on as they are.
    pub(super) fn receive_bytes(
        &mut self,
        exchange: &mut Exchange<Arc<[u8]>>,
    ) -> Result<Option<Waiting>, Cause> {
        exchange.poll(|waiting| {
            let Some(message) = self.take(waiting) else { return Ok(None) };
            let sent = message.sent();
            Ok(Some((sent, message.into_bytes()?)))
        })
    }

    /// As [`Executor::receive`], for tensors, which go to `device`.
    pub(super) fn receive_tensors(
        &mut self,
        exchange: &mut Exchange<OptionalTensors>,
        device: &Device,
    ) -> Result<Option<Waiting>, Cause> {
        exchange.poll(|waiting| {
            let Some((sent, tensors)) = self.try_take_tensors(waiting)? else { return Ok(None) };
            let moved = tensors.into_iter().map(|tensor| tensor.map(|tensor| tensor.to_device(device)));
            Ok(Some((sent, moved.collect())))
        })
    }

    /// Takes tensors for a stage of this rank, if they have arrived.
    pub(super) fn take_tensors(
        &mut self,
        waiting: Waiting,
        stage: StageIndex,
    ) -> Result<Option<OptionalTensors>, Cause> {
        let Some((sent, tensors)) = self.try_take_tensors(waiting)? else { return Ok(None) };
        self.note_exposed(sent);
        let device = self.local_stage(stage).runner.device();
        let moved = tensors.into_iter().map(|tensor| tensor.map(|tensor| tensor.to_device(&device)));
        Ok(Some(moved.collect()))
    }

    /// Takes tensors, if they have arrived, with the time at which they were sent.
    fn try_take_tensors(&mut self, waiting: Waiting) -> Result<Option<(Instant, OptionalTensors)>, Cause> {
        let Some(message) = self.take(waiting) else { return Ok(None) };
        let sent = message.sent();
        let tensors = message.into_tensors()?;
        self.memory.take_over(tensors.iter().flatten());
        Ok(Some((sent, tensors)))
    }

    /// Counts the time in which the rank was idle while a message was on its way: from when it was sent, or from when the
    /// rank began to wait if that was later, until now. Waiting for a message that is not sent yet is a bubble.
    pub(super) fn note_exposed(&mut self, sent: Instant) {
        let waiting_since = self.step.entered.unwrap_or_else(Instant::now);
        self.step.exposed += waiting_since.max(sent).elapsed();
    }
}
