//! One handler for each kind of action. No handler blocks: if the tensors of an action have not arrived, the handler
//! returns the message that it waits for, and the action is tried again.
//!
//! A receive only announces that a message will be used. The computation that uses the message takes it, and waits if
//! it has not arrived. So a rank continues to compute while the message of an early receive is in transit.
//!
//! Between stages of one rank (the turn of a V placement) tensors are passed in place, and the program has no
//! communication for them.

use std::time::{Duration, Instant};

use pipewright_schedule::recompute::backward_follows;
use pipewright_schedule::{Action, Microbatch, StageIndex};

use super::machine::Executor;
use crate::failure::Cause;
use crate::message::{AwaitedMessage, Direction, Tag};
use crate::progress::Sending;
use crate::random::StreamKey;
use crate::stage::{ForwardTask, InputGradients, StageContext};
use crate::tensor::{OptionalTensors, Values};

/// The reason why the tensors of an action exist.
const MADE_BEFORE: &str = "in a validated program, an earlier action has made the tensors of this one";

impl Executor {
    /// Runs `action`, or returns the message that it waits for.
    pub(super) fn act(&mut self, action: Action) -> Result<Option<AwaitedMessage>, Cause> {
        match action {
            Action::Forward { stage, microbatch } => self.forward(stage, microbatch),
            Action::Backward { stage, microbatch } => self.backward(stage, microbatch),
            Action::InputBackward { stage, microbatch } => self.backward_inputs(stage, microbatch),
            Action::WeightBackward { stage, microbatch } => self.split_weights(stage, microbatch),
            Action::Overlap(_) => self.overlap(action),
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

    /// Runs the forward and then the backward, or both as the hook orders them. Neither starts before both can run.
    fn overlap(&mut self, overlap: Action) -> Result<Option<AwaitedMessage>, Cause> {
        if let Some(awaited) = self.fetch(overlap)? {
            return Ok(Some(awaited));
        }
        let mut left: Vec<Action> = overlap.parts().collect();
        let Some(hook) = self.hook.clone() else {
            left.into_iter().try_for_each(|part| self.act(part).map(drop))?;
            return Ok(None);
        };
        let (rank, parts) = (self.world_rank, [left[0], left[1]]);
        let mut outcome = Ok(());
        hook.overlap(rank, parts, &mut |part| {
            let place = left.iter().position(|&one| one == part);
            if let (Some(place), true) = (place, outcome.is_ok()) {
                left.remove(place);
                outcome = self.act(part).map(drop);
            }
        });
        outcome?;
        match left.first() {
            Some(&action) => Err(Cause::LeftOut { action }),
            None => Ok(None),
        }
    }

    fn forward(
        &mut self,
        stage: StageIndex,
        microbatch: Microbatch,
    ) -> Result<Option<AwaitedMessage>, Cause> {
        if let Some(awaited) = self.fetch_inputs(stage, microbatch)? {
            return Ok(Some(awaited));
        }
        let inputs = self.take_inputs(stage, microbatch).expect(MADE_BEFORE)?;
        let (forward_only, place) = (self.program().is_forward_only(), microbatch.index());
        let replica = self.endpoint.coord().replica;
        let earlier = u64::from(self.accumulated) * u64::from(self.endpoint.replica_count());
        let random = StreamKey {
            seed: self.seed,
            step: self.step.input.step,
            microbatch: earlier + u64::from(replica * self.program().microbatches() + microbatch.get()),
        };
        let input = &self.step.input;
        let side_inputs = input.side_inputs.clone();
        // A forward that its backward follows at once has nothing to save.
        let recompute = self.recompute.applies_to(stage)
            && !backward_follows(self.program().row(self.rank), self.step.position);
        let task = ForwardTask {
            loss_weight: input.loss_weights[place] * input.loss_scale,
            keep_outputs: input.keep_outputs || input.kept_stages.contains(&stage),
            recompute,
        };
        let local_stage = self.local_stage(stage);
        let device = local_stage.runner.device();
        let target = local_stage.targets[place].take();
        let target = target.map(|target| target.into_iter().map(|value| value.to_device(device)).collect());
        let context = StageContext::new(stage, microbatch).with_side_inputs(side_inputs, device.clone());
        let forwarded = match forward_only {
            true => local_stage.runner.infer(&context, inputs, target)?,
            false => local_stage.runner.forward(&context.with_random(random), inputs, target, task)?,
        };
        local_stage.losses[place] = forwarded.loss;
        local_stage.auxiliary[place] = forwarded.auxiliary;
        self.give_outputs(stage, microbatch, forwarded.outputs)?;
        Ok(None)
    }

    /// Runs `B`: the input gradients, then at once the weight gradients.
    fn backward(
        &mut self,
        stage: StageIndex,
        microbatch: Microbatch,
    ) -> Result<Option<AwaitedMessage>, Cause> {
        match self.backward_inputs(stage, microbatch)? {
            None => self.backward_weights(stage, microbatch),
            awaited => Ok(awaited),
        }
    }

    /// Runs `W`: the weight gradients that `I` deferred. A stage that defers none still trains, but gains nothing from
    /// the split, which is logged once.
    fn split_weights(
        &mut self,
        stage: StageIndex,
        microbatch: Microbatch,
    ) -> Result<Option<AwaitedMessage>, Cause> {
        let local_stage = self.local_stage(stage);
        let tasks = local_stage.runner.backward_weights(microbatch)?;
        local_stage.undeferred.found();
        if tasks == 0 && !std::mem::replace(&mut local_stage.logged_empty_weight_backward, true) {
            tracing::info!(
                "stage {stage} has no layer that defers its weight gradients: `I` computes them, and `W` does nothing; \
                 layers of `pipewright::nn` defer theirs, and so do your own with `SplitBackward`"
            );
        }
        Ok(None)
    }

    fn backward_weights(
        &mut self,
        stage: StageIndex,
        microbatch: Microbatch,
    ) -> Result<Option<AwaitedMessage>, Cause> {
        self.local_stage(stage).runner.backward_weights(microbatch)?;
        Ok(None)
    }

    fn backward_inputs(
        &mut self,
        stage: StageIndex,
        microbatch: Microbatch,
    ) -> Result<Option<AwaitedMessage>, Cause> {
        if let Some(awaited) = self.fetch_gradients(stage, microbatch)? {
            return Ok(Some(awaited));
        }
        let place = microbatch.index();
        let mut gradients = match self.is_last(stage) {
            true => Vec::new(),
            false => self.local_stage(stage).output_gradients[place].take().expect(MADE_BEFORE),
        };
        self.append_skips(Direction::Backward, stage, microbatch, &mut gradients);
        let start = Instant::now();
        let InputGradients { mut gradients, recomputed } =
            self.local_stage(stage).runner.backward_inputs(microbatch, gradients)?;
        if !recomputed.is_zero() {
            self.note_recomputed(Action::Forward { stage, microbatch }, start, recomputed);
        }
        self.send_skips(Direction::Backward, stage, microbatch, &mut gradients);
        match self.placement().previous(stage) {
            Some(previous) if self.elsewhere(previous).is_none() => {
                self.local_stage(previous).output_gradients[place] = Some(gradients);
            }
            Some(_) => self.local_stage(stage).input_gradients[place] = Some(gradients),
            // The model's input data needs no gradient.
            None => {}
        }
        Ok(None)
    }

    fn send_forward(
        &mut self,
        stage: StageIndex,
        microbatch: Microbatch,
    ) -> Result<Option<AwaitedMessage>, Cause> {
        let outputs = self.local_stage(stage).outputs[microbatch.index()].take().expect(MADE_BEFORE);
        let next = self.placement().next(stage).expect("a validated program sends from no last stage");
        self.send(Direction::Forward, next, microbatch, outputs.into_iter().map(Some).collect());
        Ok(None)
    }

    fn send_backward(
        &mut self,
        stage: StageIndex,
        microbatch: Microbatch,
    ) -> Result<Option<AwaitedMessage>, Cause> {
        let gradients =
            self.local_stage(stage).input_gradients[microbatch.index()].take().expect(MADE_BEFORE);
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
            let inputs: Values = tensors.into_iter().flatten().collect();
            self.local_stage(stage).inputs[microbatch.index()] = Some(inputs);
            self.note_received(Action::RecvForward { stage, microbatch });
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
            self.local_stage(stage).output_gradients[microbatch.index()] = Some(gradients);
            self.note_received(Action::RecvBackward { stage, microbatch });
        }
        self.fetch_skips(Direction::Backward, stage, microbatch)
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
        self.send_tensors(to, Tag::Boundary { direction, stage, microbatch }, tensors);
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
