//! Skip connections that go directly from one stage to another, and their gradients on the way back.
//!
//! [`Skips`](crate::stage::Skips) lists which of a stage's last inputs and outputs are skip connections. They are
//! passed on when the action that makes them ends: in place to a stage of this rank, otherwise in a message of their
//! own. The timeline has both ends of these messages ([`SkipEvent`]): a send within the action that makes the tensors,
//! and a receive before the action that uses them.
//!
//! # Why nothing blocks
//!
//! The program does not contain these messages, and need not. A forward that waits for one also waits for the previous
//! stage, which waits for the stage before it, and so on down to the stage that sends the message. So in any order of
//! actions in which the messages of the neighbours arrive, this message has been sent. The same holds for the backward,
//! from the other end.

use std::time::Instant;

use pipewright_schedule::{Microbatch, SkipAction, SkipEvent, SkipMessage, StageIndex};

use super::machine::Executor;
use crate::failure::Cause;
use crate::message::{AwaitedMessage, Direction, Tag};
use crate::stage::{Skip, Skips};
use crate::tensor::OptionalTensors;

impl Executor {
    /// Removes skip connections from the end of a stage's `tensors` and passes each to its stage.
    pub(super) fn send_skips(
        &mut self,
        direction: Direction,
        source: StageIndex,
        microbatch: Microbatch,
        tensors: &mut OptionalTensors,
    ) {
        let routes = self.local_stage(source).routes.clone();
        for &Skip { stage, tensors: count } in sent(&routes, direction).iter().rev() {
            let tensors = tensors.split_off(tensors.len().saturating_sub(count));
            let Some(to) = self.elsewhere(stage) else {
                self.local_stage(stage).skips.insert((direction, source, microbatch), tensors);
                continue;
            };
            let to = self.endpoint.world_rank_of(to);
            let start = Instant::now();
            self.send_tensors(to, Tag::Skip { direction, source, stage, microbatch }, tensors);
            let message = SkipMessage { from: source, to: stage, microbatch };
            self.note_skip(SkipAction::Send(message), start);
        }
    }

    /// Takes the skip connections of `stage` that other ranks send, or returns a missing message.
    pub(super) fn fetch_skips(
        &mut self,
        direction: Direction,
        stage: StageIndex,
        microbatch: Microbatch,
    ) -> Result<Option<AwaitedMessage>, Cause> {
        let routes = self.local_stage(stage).routes.clone();
        for &Skip { stage: source, .. } in sent(&routes, opposite(direction)) {
            let key = (direction, source, microbatch);
            let Some(from) = self.elsewhere(source) else { continue };
            if self.local_stage(stage).skips.contains_key(&key) {
                continue;
            }
            let awaited = self.awaited(from, Tag::Skip { direction, source, stage, microbatch });
            let Some(tensors) = self.take_tensors(awaited, stage)? else { return Ok(Some(awaited)) };
            self.local_stage(stage).skips.insert(key, tensors);
            let start = self.step.entered.unwrap_or_else(Instant::now);
            let message = SkipMessage { from: source, to: stage, microbatch };
            self.note_skip(SkipAction::Receive(message), start);
            // The computation begins at the earliest now.
            self.step.entered = Some(Instant::now());
        }
        Ok(None)
    }

    /// Adds the event of one end of a message, from `start` until the current time.
    fn note_skip(&mut self, action: SkipAction, start: Instant) {
        let origin = self.step.input.origin;
        self.step.skips.push(SkipEvent {
            rank: self.endpoint.timeline_row(),
            action,
            start: start.saturating_duration_since(origin).as_secs_f64(),
            end: origin.elapsed().as_secs_f64(),
        });
    }

    /// Appends the skip connections of `stage` to the tensors of its neighbour.
    pub(super) fn append_skips(
        &mut self,
        direction: Direction,
        stage: StageIndex,
        microbatch: Microbatch,
        tensors: &mut OptionalTensors,
    ) {
        let routes = self.local_stage(stage).routes.clone();
        for &Skip { stage: source, .. } in sent(&routes, opposite(direction)) {
            let skips = self.local_stage(stage).skips.remove(&(direction, source, microbatch));
            tensors.extend(skips.expect("a stage runs only when its skip connections are here"));
        }
    }
}

/// Returns the skip connections that a stage sends in `direction`. It receives those that it sends in the other
/// direction.
fn sent(routes: &Skips, direction: Direction) -> &[Skip] {
    match direction {
        Direction::Forward => &routes.outputs,
        Direction::Backward => &routes.inputs,
    }
}

fn opposite(direction: Direction) -> Direction {
    match direction {
        Direction::Forward => Direction::Backward,
        Direction::Backward => Direction::Forward,
    }
}
