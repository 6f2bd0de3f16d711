//! The thread that encodes messages whose tensors are on a device.
//!
//! Reading a tensor waits until its device has computed it and has copied it to the processor's memory. The
//! rank's thread does not wait for that: it gives its device more work, and this thread reads. So copies and
//! computation overlap. The back end copies into buffers that it reuses, and the frame's buffer is reused
//! too.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use burn::tensor::Device;
use crossbeam_channel::{Receiver, Sender};
use pipewright_schedule::{Action, StageIndex};

use super::mpi_thread::{Command, ThreadShared};
use super::sends::SentMessage;
use crate::device::computes_behind;
use crate::failure::{Abort, Cause, StepError};
use crate::message::{Direction, Message, Payload, Tag};
use crate::progress::ProgressBoard;
use crate::tensor::Value;
use crate::transport::wire::{self, Frame};

/// Encodes messages and passes them to the MPI thread.
#[derive(Clone)]
pub(super) struct Encoder {
    pub(super) commands: Sender<Command>,
    pub(super) shared: Arc<ThreadShared>,
}

impl Encoder {
    pub(super) fn send(&self, message: SentMessage, envelope: Message) {
        let mut frame = self.shared.buffer();
        wire::encode(Frame::Message(envelope), self.shared.clock.moment(), &mut frame);
        // If the MPI thread has ended, it failed and raised the abort flag.
        let _ = self.commands.send(Command::Send(message, frame));
    }

    /// Ends the send of a message that cannot be encoded. The rank need not be woken: its step has failed.
    fn drop_message(&self, message: &SentMessage) {
        self.shared.sends.complete(message);
    }
}

/// A message that waits for its device.
type Waiting = (SentMessage, Message);

/// The messages of this process that wait for a device. Their thread starts with the first one.
pub(super) struct DeviceSends {
    encoder: Encoder,
    abort: Abort,
    board: ProgressBoard,
    thread: Option<(Sender<Waiting>, JoinHandle<()>)>,
}

impl DeviceSends {
    pub(super) fn new(encoder: Encoder, abort: Abort, board: ProgressBoard) -> Self {
        Self { encoder, abort, board, thread: None }
    }

    /// Sends a message: at once if all its tensors are in the processor's memory, otherwise when the device
    /// has computed them.
    pub(super) fn send(&mut self, message: SentMessage, envelope: Message) {
        if !is_on_a_device(&envelope.payload) {
            return self.encoder.send(message, envelope);
        }
        if self.thread.is_none() {
            self.thread = self.start().ok();
        }
        match &self.thread {
            // The thread does not end before the sender is dropped.
            Some((waiting, _)) => drop(waiting.send((message, envelope))),
            None => self.encoder.send(message, envelope),
        }
    }

    fn start(&self) -> std::io::Result<(Sender<Waiting>, JoinHandle<()>)> {
        let (sender, waiting) = crossbeam_channel::unbounded();
        let (encoder, abort, board) = (self.encoder.clone(), self.abort.clone(), self.board.clone());
        let work = move || encode_all(&waiting, &encoder, &abort, &board);
        let thread = std::thread::Builder::new().name("device-sends".to_owned()).spawn(work)?;
        Ok((sender, thread))
    }
}

impl Drop for DeviceSends {
    /// Waits for the last messages, unless a rank has failed: its device may never answer.
    fn drop(&mut self) {
        let Some((waiting, thread)) = self.thread.take() else { return };
        drop(waiting);
        if !self.abort.is_raised() {
            let _ = thread.join();
        }
    }
}

/// Encodes messages in their order, until the endpoint is dropped. A message that cannot be read fails its
/// step.
fn encode_all(waiting: &Receiver<Waiting>, encoder: &Encoder, abort: &Abort, board: &ProgressBoard) {
    for (message, envelope) in waiting {
        let (rank, attempt, tag) = (envelope.from, envelope.attempt, envelope.tag);
        // Burn reports a failed device by a panic.
        match catch_unwind(AssertUnwindSafe(|| read(envelope))) {
            Ok(envelope) => encoder.send(message, envelope),
            Err(payload) => {
                let cause = match Cause::from_panic(&*payload) {
                    Cause::Panic { message } => Cause::Device { message },
                    cause => cause,
                };
                let step = board.step();
                abort.raise_in(attempt, &StepError { rank, step, action: action(tag), cause });
                encoder.drop_message(&message);
            }
        }
    }
}

/// Copies the tensors of a message to the processor's memory when they are computed.
fn read(message: Message) -> Message {
    let host = Device::flex();
    let payload = match message.payload {
        Payload::Tensors(tensors) => {
            let read = |tensor: Option<Value>| tensor.map(|tensor| tensor.to_device(&host));
            Payload::Tensors(tensors.into_iter().map(read).collect())
        }
        bytes @ Payload::Bytes(_) => bytes,
    };
    Message { payload, ..message }
}

/// Returns the action that sends a message with this tag; `None` if no action of a program does.
fn action(tag: Tag) -> Option<Action> {
    let Tag::Boundary { direction, stage, microbatch } = tag else { return None };
    Some(match direction {
        Direction::Forward => {
            Action::SendForward { stage: StageIndex::new(stage.get().checked_sub(1)?), microbatch }
        }
        Direction::Backward => {
            Action::SendBackward { stage: StageIndex::new(stage.get().checked_add(1)?), microbatch }
        }
    })
}

fn is_on_a_device(payload: &Payload) -> bool {
    match payload {
        Payload::Tensors(tensors) => tensors.iter().flatten().any(|tensor| computes_behind(&tensor.device())),
        Payload::Bytes(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_names_the_action_that_sends() {
        let (stage, microbatch) = (StageIndex::new(3), 5.into());
        let text = |direction| {
            action(Tag::Boundary { direction, stage, microbatch }).map(|action| action.to_string())
        };
        assert_eq!(text(Direction::Forward).as_deref(), Some("2SEND_F5"));
        assert_eq!(text(Direction::Backward).as_deref(), Some("4SEND_B5"));
        assert_eq!(action(Tag::Squares), None);
    }
}
