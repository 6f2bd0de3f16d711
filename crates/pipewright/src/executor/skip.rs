//! Skip connections that go directly from one stage to another, and their gradients on the way back.
//!
//! [`Skips`](crate::stage::Skips) lists which of a stage's last inputs and outputs are skip connections. They
//! are passed on when the action that makes them ends: in place to a stage of this rank, otherwise in a
//! message of their own. The timeline has both ends of these messages ([`SkipEvent`]): a send within the
//! action that makes the tensors, and a receive before the action that uses them.
//!
//! # Why nothing blocks
//!
//! The program does not contain these messages, and need not. A forward that waits for one also waits for the
//! previous stage, which waits for the stage before it, and so on down to the stage that sends the message.
//! So in any order of actions in which the messages of the neighbours arrive, this message has been sent. In
//! a backward it has been sent for the same reason, with the order of the stages reversed.

use std::time::Instant;

use pipewright_schedule::{MessageEnd, SkipAction, SkipMessage};

use super::boundary::note_message;
use super::connection::on_device;
use super::machine::Executor;
use super::stages::{At, LocalStages};
use crate::failure::Cause;
use crate::message::{AwaitedMessage, Direction, Tag};
use crate::stage::{Skip, Skips};
use crate::tensor::OptionalTensors;

impl Executor {
    /// Removes skip connections from the end of a stage's `tensors` and passes each to its stage.
    pub(super) fn send_skips(
        &mut self,
        direction: Direction,
        At { stage: source, microbatch }: At,
        tensors: &mut OptionalTensors,
    ) {
        let Self { context, connection, stages, recorder, .. } = self;
        let skips = stages.get(source).skips();
        for &Skip { stage, tensors: count } in sent(&skips, direction).iter().rev() {
            let tensors = tensors.split_off(tensors.len().saturating_sub(count));
            if context.is_local(stage) {
                stages.get_mut(stage).put_skip((direction, source, microbatch), tensors);
                continue;
            }
            let start = Instant::now();
            let send = SkipAction::Send(SkipMessage { from: source, to: stage, microbatch });
            note_message(context, recorder, MessageEnd::Skip(send), stage, &tensors);
            let tag = Tag::Skip { direction, source, stage, microbatch };
            connection.send_tensors(context.world_rank_of_stage(stage), tag, tensors);
            recorder.note_skip_sent(send, start);
        }
    }

    /// Takes the skip connections of a stage that other ranks send, or returns a missing message.
    pub(super) fn fetch_skips(
        &mut self,
        direction: Direction,
        At { stage, microbatch }: At,
    ) -> Result<Option<AwaitedMessage>, Cause> {
        let Self { context, connection, stages, recorder, .. } = self;
        let local_stage = stages.get_mut(stage);
        let skips = local_stage.skips();
        for &Skip { stage: source, .. } in sent(&skips, opposite(direction)) {
            let key = (direction, source, microbatch);
            if context.is_local(source) || local_stage.has_skip(&key) {
                continue;
            }
            let tag = Tag::Skip { direction, source, stage, microbatch };
            let awaited = context.awaited(context.placement.rank_of(source), tag);
            let Some((sent, tensors)) = connection.take_tensors(awaited)? else {
                return Ok(Some(awaited));
            };
            recorder.note_exposed(sent);
            let receive = SkipAction::Receive(SkipMessage { from: source, to: stage, microbatch });
            note_message(context, recorder, MessageEnd::Skip(receive), source, &tensors);
            let tensors = on_device(tensors, local_stage.runner().device());
            local_stage.put_skip(key, tensors);
            recorder.note_skip_received(receive);
        }
        Ok(None)
    }
}

/// Appends the skip connections of a stage to the tensors of its neighbour.
pub(super) fn append_skips(
    stages: &mut LocalStages,
    direction: Direction,
    At { stage, microbatch }: At,
    tensors: &mut OptionalTensors,
) {
    let local_stage = stages.get_mut(stage);
    let skips = local_stage.skips();
    for &Skip { stage: source, .. } in sent(&skips, opposite(direction)) {
        tensors.extend(local_stage.take_skip(&(direction, source, microbatch)));
    }
}

/// Returns the skip connections that a stage sends in `direction`. It receives the skip connections that it
/// sends in the other direction.
fn sent(skips: &Skips, direction: Direction) -> &[Skip] {
    match direction {
        Direction::Forward => &skips.outputs,
        Direction::Backward => &skips.inputs,
    }
}

fn opposite(direction: Direction) -> Direction {
    match direction {
        Direction::Forward => Direction::Backward,
        Direction::Backward => Direction::Forward,
    }
}
