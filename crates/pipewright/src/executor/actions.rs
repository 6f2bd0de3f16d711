//! One handler for each kind of action; `compute.rs` has those of the actions that compute. No handler blocks: if the
//! tensors of an action have not arrived, the handler returns the message that it waits for, and the action is tried
//! again.
//!
//! A receive only announces that a message will be used. The computation that uses the message takes it, and waits if
//! it has not arrived. So a rank continues to compute while the message of an early receive is in transit.
//!
//! Between stages of one rank (the turn of a V placement) tensors are passed in place, and the program has no
//! communication for them.

use std::time::Duration;

use pipewright_schedule::{Action, Microbatch, StageIndex};

use super::boundary::Crossing;
use super::machine::Executor;
use crate::failure::Cause;
use crate::message::{AwaitedMessage, Direction, Tag};
use crate::progress::Sending;
use crate::tensor::{OptionalTensors, Values};

/// The reason why the tensors of an action exist.
pub(super) const MADE_BEFORE: &str =
    "in a validated program, an earlier action has made the tensors of this one";

impl Executor {
    /// Runs `action`, or returns the message that it waits for.
    pub(super) fn act(&mut self, action: Action) -> Result<Option<AwaitedMessage>, Cause> {
        match action {
            Action::Forward { .. }
            | Action::Backward { .. }
            | Action::InputBackward { .. }
            | Action::WeightBackward { .. }
            | Action::Overlap(_) => match self.fetch(action)? {
                None => self.compute(action).map(|()| None),
                awaited => Ok(awaited),
            },
            Action::SendForward { stage, microbatch } => self.send_forward(stage, microbatch),
            Action::SendBackward { stage, microbatch } => self.send_backward(stage, microbatch),
            // The computation that uses the message takes it.
            Action::RecvForward { .. } | Action::RecvBackward { .. } => Ok(None),
            // `Executor::poll_action` runs this action only after its message has left.
            Action::WaitSendForward { .. } | Action::WaitSendBackward { .. } => Ok(None),
            Action::ReduceGrad { stage } => {
                self.start_reduction(stage)?;
                Ok(None)
            }
            Action::WaitReduceGrad { stage } => Ok(self.awaited_reduction(stage)),
            Action::Unshard { stage } => {
                self.unshard(stage);
                Ok(None)
            }
            Action::Reshard { stage } => {
                self.release(stage);
                Ok(None)
            }
        }
    }

    /// Returns the message of a `WAIT_SEND` action that has not left yet; `None` for every other action.
    pub(super) fn unsent(&mut self, action: Action) -> Option<Sending> {
        let (direction, stage, microbatch) = match action {
            Action::WaitSendForward { stage, microbatch } => {
                (Direction::Forward, self.placement().next(stage)?, microbatch)
            }
            Action::WaitSendBackward { stage, microbatch } => {
                (Direction::Backward, self.placement().previous(stage)?, microbatch)
            }
            _ => return None,
        };
        let to = self.endpoint.world_rank_of(self.placement().rank_of(stage));
        let tag = Tag::Boundary { direction, stage, microbatch };
        if !self.endpoint.is_sent(to, tag) {
            return Some(Sending { to, tag });
        }
        self.step.exposed += self.step.entered.map_or(Duration::ZERO, |entered| entered.elapsed());
        None
    }

    /// Runs `action` inside the hook's scope. Calls the hook only when the messages of the action have arrived.
    pub(super) fn act_in_scope(&mut self, action: Action) -> Result<Option<AwaitedMessage>, Cause> {
        let Some(hook) = self.hook.clone() else { return self.act(action) };
        if let Some(awaited) = self.fetch(action)? {
            return Ok(Some(awaited));
        }
        let (rank, mut outcome) = (self.world_rank, None);
        hook.around(rank, action, &mut || {
            outcome.get_or_insert_with(|| self.act(action));
        });
        outcome.unwrap_or(Err(Cause::LeftOut { action }))
    }

    /// Takes the messages that an action needs, or returns the first missing one.
    fn fetch(&mut self, action: Action) -> Result<Option<AwaitedMessage>, Cause> {
        match action {
            Action::Forward { stage, microbatch } => self.fetch_inputs(stage, microbatch),
            Action::Backward { stage, microbatch } | Action::InputBackward { stage, microbatch } => {
                self.fetch_gradients(stage, microbatch)
            }
            Action::Overlap(_) => action.parts().find_map(|part| self.fetch(part).transpose()).transpose(),
            Action::WaitReduceGrad { stage } => Ok(self.awaited_reduction(stage)),
            _ => Ok(None),
        }
    }

    fn send_forward(
        &mut self,
        stage: StageIndex,
        microbatch: Microbatch,
    ) -> Result<Option<AwaitedMessage>, Cause> {
        let outputs = self.local_stage(stage).outputs[microbatch.index()].take().expect(MADE_BEFORE);
        let next = self.placement().next(stage).expect("a validated program sends from no last stage");
        let mut outputs = outputs.into_iter().map(Some).collect();
        self.show_message(Action::SendForward { stage, microbatch }, &mut outputs)?;
        self.send(Direction::Forward, next, microbatch, outputs);
        Ok(None)
    }

    fn send_backward(
        &mut self,
        stage: StageIndex,
        microbatch: Microbatch,
    ) -> Result<Option<AwaitedMessage>, Cause> {
        let gradients = self.local_stage(stage).input_gradients[microbatch.index()].take();
        let mut gradients = gradients.expect(MADE_BEFORE);
        self.show_message(Action::SendBackward { stage, microbatch }, &mut gradients)?;
        let previous = self.placement().previous(stage);
        let previous = previous.expect("a validated program sends no gradient from the first stage");
        self.send(Direction::Backward, previous, microbatch, gradients);
        Ok(None)
    }

    /// Takes a forward's inputs if another rank sends them and they are not here yet, or returns the first missing
    /// message.
    fn fetch_inputs(
        &mut self,
        stage: StageIndex,
        microbatch: Microbatch,
    ) -> Result<Option<AwaitedMessage>, Cause> {
        if let Some(awaited) = self.fetch_parameters(stage)? {
            return Ok(Some(awaited));
        }
        let Some(source) = self.placement().previous(stage) else { return Ok(None) };
        if self.elsewhere(source).is_some() && self.local_stage(stage).inputs[microbatch.index()].is_none() {
            let awaited = self.boundary(Direction::Forward, source, stage, microbatch);
            let Some(tensors) = self.take_tensors(awaited, stage)? else { return Ok(Some(awaited)) };
            let mut tensors = self.whole(Crossing { from: source, to: stage, microbatch }, tensors)?;
            let receive = Action::RecvForward { stage, microbatch };
            self.show_message(receive, &mut tensors)?;
            let inputs: Values = tensors.into_iter().flatten().collect();
            self.local_stage(stage).inputs[microbatch.index()] = Some(inputs);
            self.note_received(receive);
        }
        self.fetch_skips(Direction::Forward, stage, microbatch)
    }

    /// As [`Executor::fetch_inputs`], for the gradients that a backward starts from.
    fn fetch_gradients(
        &mut self,
        stage: StageIndex,
        microbatch: Microbatch,
    ) -> Result<Option<AwaitedMessage>, Cause> {
        if let Some(awaited) = self.fetch_parameters(stage)? {
            return Ok(Some(awaited));
        }
        let Some(source) = self.placement().next(stage) else { return Ok(None) };
        let is_missing = self.local_stage(stage).output_gradients[microbatch.index()].is_none();
        if self.elsewhere(source).is_some() && is_missing {
            let awaited = self.boundary(Direction::Backward, source, stage, microbatch);
            let Some(gradients) = self.take_tensors(awaited, stage)? else { return Ok(Some(awaited)) };
            let mut gradients = self.whole(Crossing { from: source, to: stage, microbatch }, gradients)?;
            let receive = Action::RecvBackward { stage, microbatch };
            self.show_message(receive, &mut gradients)?;
            self.local_stage(stage).output_gradients[microbatch.index()] = Some(gradients);
            self.note_received(receive);
        }
        self.fetch_skips(Direction::Backward, stage, microbatch)
    }

    /// Lets the hook see the tensors of a message, and replace them.
    fn show_message(&self, action: Action, tensors: &mut OptionalTensors) -> Result<(), Cause> {
        match &self.hook {
            Some(hook) => Ok(hook.message(self.world_rank, action, tensors)?),
            None => Ok(()),
        }
    }

    /// Sends a boundary's tensors to the rank of `stage`.
    fn send(
        &mut self,
        direction: Direction,
        stage: StageIndex,
        microbatch: Microbatch,
        tensors: OptionalTensors,
    ) {
        let to = self.endpoint.world_rank_of(self.placement().rank_of(stage));
        let parts = self.parts(tensors);
        self.send_tensors(to, Tag::Boundary { direction, stage, microbatch }, parts);
    }

    /// Returns the message of a boundary from the rank of `source` to `stage`.
    fn boundary(
        &self,
        direction: Direction,
        source: StageIndex,
        stage: StageIndex,
        microbatch: Microbatch,
    ) -> AwaitedMessage {
        let from = self.placement().rank_of(source);
        self.awaited(from, Tag::Boundary { direction, stage, microbatch })
    }
}
