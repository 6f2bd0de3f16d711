//! The actions that compute: `F`, `B`, `I`, `W`, and the overlap of a forward with a backward. The messages that they
//! need have arrived; `edges.rs` has their inputs and outputs. A hook may run them in its own way ([`ActionHook::forward`](crate::hook::ActionHook::forward)).

use std::sync::Arc;
use std::time::Instant;

use pipewright_schedule::recompute::backward_follows;
use pipewright_schedule::{Action, Microbatch, Scope, StageIndex};

use super::actions::MADE_BEFORE;
use super::machine::Executor;
use crate::failure::Cause;
use crate::hook::{BackwardRun, ForwardRun, OverlapRun, Place, Stages};
use crate::message::Direction;
use crate::random::StreamKey;
use crate::stage::{
    BackwardState, BatchPart, ForwardState, ForwardTask, InputGradients, StageCompute, StageContext,
};

/// A stage and a microbatch.
type At = (StageIndex, Microbatch);

impl Executor {
    /// Runs an action that computes.
    pub(super) fn compute(&mut self, action: Action) -> Result<(), Cause> {
        match action {
            Action::Forward { stage, microbatch } => self.forward(action, (stage, microbatch)),
            Action::Backward { stage, microbatch } => {
                self.backward_inputs(action, (stage, microbatch))?;
                self.backward_weights(action, (stage, microbatch)).map(drop)
            }
            Action::InputBackward { stage, microbatch } => self.backward_inputs(action, (stage, microbatch)),
            Action::WeightBackward { stage, microbatch } => self.weight_backward(action, (stage, microbatch)),
            Action::Overlap(overlap) => self.overlap(action, overlap.forward(), overlap.backward()),
            _ => unreachable!("other actions do not compute"),
        }
    }

    /// Runs the forward and then the backward, or both as the hook orders them.
    fn overlap(&mut self, overlap: Action, forward_at: At, backward_at: At) -> Result<(), Cause> {
        let Some(hook) = self.hook.clone() else {
            return overlap.parts().try_for_each(|part| self.compute(part));
        };
        let mut parts = overlap.parts();
        let (Some(first), Some(second)) = (parts.next(), parts.next()) else {
            unreachable!("an overlap has two parts")
        };
        let rank = self.world_rank;
        let mut forward = self.begin_forward(forward_at)?;
        let mut backward = self.begin_backward(backward_at);
        let start = Instant::now();
        hook.overlap(&mut OverlapRun::new(rank, [first, second], self, &mut forward, &mut backward))?;
        self.finish_forward(first, forward_at, forward)?;
        self.finish_backward(second, backward_at, backward, start)?;
        self.backward_weights(second, backward_at).map(drop)
    }

    fn forward(&mut self, action: Action, at: At) -> Result<(), Cause> {
        let mut forward = self.begin_forward(at)?;
        match self.hook.clone() {
            None => self.local_stage(at.0).runner.forward(&mut forward)?,
            Some(hook) => {
                let place = Place { rank: self.world_rank, action };
                hook.forward(&mut ForwardRun::new(place, self, &mut forward))?;
            }
        }
        self.finish_forward(action, at, forward)
    }

    fn begin_forward(&mut self, (stage, microbatch): At) -> Result<ForwardState, Cause> {
        let inputs = self.take_inputs(stage, microbatch)?;
        let place = microbatch.index();
        let replica = self.endpoint.coord().replica;
        let earlier = u64::from(self.accumulated) * u64::from(self.endpoint.replica_count());
        let random = StreamKey {
            seed: self.seed,
            step: self.step.input.step,
            microbatch: earlier + u64::from(replica * self.program().microbatches() + microbatch.get()),
        };
        let (is_training, slices) = (!self.program().is_forward_only(), self.program().slices());
        let input = &self.step.input;
        let side_inputs = input.side_inputs.clone();
        // A forward that its backward follows at once has nothing to save.
        let recompute = self.recompute.applies_to(stage)
            && !backward_follows(self.program().row(self.rank), self.step.position);
        let task = ForwardTask {
            loss_weight: input.loss_weights[place] * input.slice_shares[place] * input.loss_scale,
            auxiliary_weight: input.loss_weights[place] / f64::from(slices.get()) * input.loss_scale,
            keep_outputs: input.keep_outputs || input.kept_stages.contains(&stage),
            recompute,
        };
        let local_stage = self.local_stage(stage);
        let device = local_stage.runner.device();
        let target = local_stage.targets[place].take();
        let target = target.map(|target| {
            let values = target.into_iter().map(|value| value.to_device(device)).collect();
            local_stage.runner.admitted(BatchPart::Target, values)
        });
        let target = target.transpose()?;
        let context = StageContext::of_number(stage, microbatch, slices);
        let context = context.with_side_inputs(side_inputs, device.clone());
        Ok(match is_training {
            true => ForwardState::new(context.with_random(random), inputs, target, Some(task)),
            false => ForwardState::new(context, inputs, target, None),
        })
    }

    fn finish_forward(
        &mut self,
        action: Action,
        (stage, microbatch): At,
        forward: ForwardState,
    ) -> Result<(), Cause> {
        if let Some(block) = forward.next_block() {
            return Err(Cause::BlocksLeft { action, block });
        }
        let local_stage = self.local_stage(stage);
        let forwarded = local_stage.runner.finish_forward(forward)?;
        local_stage.losses[microbatch.index()] = forwarded.loss;
        local_stage.auxiliary[microbatch.index()] = forwarded.auxiliary;
        self.step.loads.extend(forwarded.loads);
        self.give_outputs(stage, microbatch, forwarded.outputs)
    }

    fn backward_inputs(&mut self, action: Action, at: At) -> Result<(), Cause> {
        let mut backward = self.begin_backward(at);
        let start = Instant::now();
        match self.hook.clone() {
            None => self.local_stage(at.0).runner.backward(&mut backward)?,
            Some(hook) => {
                let place = Place { rank: self.world_rank, action };
                hook.backward(&mut BackwardRun::new(place, self, &mut backward))?;
            }
        }
        self.finish_backward(action, at, backward, start)
    }

    /// Computes a forward again before the gradients for its backward are taken, so that it runs while they are on their
    /// way. It also runs first where they have arrived: the ranks of a tensor group exchange parts of the forward and of
    /// the gradients, all in the same order. Where a hook watches the actions, the forward is left to the backward.
    pub(super) fn recompute_early(&mut self, stage: StageIndex, microbatch: Microbatch) -> Result<(), Cause> {
        if self.hook.is_some() || !self.recompute.applies_to(stage) {
            return Ok(());
        }
        let start = Instant::now();
        if self.local_stage(stage).runner.recompute(microbatch)? {
            self.note_recomputed(Action::Forward { stage, microbatch }, start, start.elapsed());
        }
        Ok(())
    }

    fn begin_backward(&mut self, (stage, microbatch): At) -> BackwardState {
        let mut gradients = match self.is_last(stage) {
            true => Vec::new(),
            false => self.local_stage(stage).output_gradients[microbatch.index()].take().expect(MADE_BEFORE),
        };
        self.append_skips(Direction::Backward, stage, microbatch, &mut gradients);
        self.local_stage(stage).runner.begin_backward(microbatch, gradients)
    }

    fn finish_backward(
        &mut self,
        action: Action,
        (stage, microbatch): At,
        backward: BackwardState,
        start: Instant,
    ) -> Result<(), Cause> {
        if let Some(block) = backward.next_block() {
            return Err(Cause::BlocksLeft { action, block });
        }
        let InputGradients { mut gradients, recomputed } = backward.into_input_gradients()?;
        if !recomputed.is_zero() {
            self.note_recomputed(Action::Forward { stage, microbatch }, start, recomputed);
        }
        self.check_gradients(stage, microbatch, &gradients)?;
        self.send_skips(Direction::Backward, stage, microbatch, &mut gradients);
        let place = microbatch.index();
        match self.placement().previous(stage) {
            Some(previous) if self.elsewhere(previous).is_none() => {
                self.local_stage(previous).output_gradients[place] = Some(gradients);
            }
            Some(_) => self.local_stage(stage).input_gradients[place] = Some(gradients),
            None if self.step.input.wanted_gradients.contains(&true) => {
                self.local_stage(stage).input_gradients[place] = Some(gradients);
            }
            // The model's input data needs no gradient.
            None => {}
        }
        Ok(())
    }

    /// Runs `W`: the weight gradients that `I` deferred. A stage that defers none still trains, but gains nothing from
    /// the split, which is logged once.
    fn weight_backward(&mut self, action: Action, at: At) -> Result<(), Cause> {
        let tasks = self.backward_weights(action, at)?;
        let (stage, _) = at;
        // A function of a hook's may have computed the weight gradients in `I`.
        let is_empty = tasks == 0 && self.hook.is_none();
        let local_stage = self.local_stage(stage);
        local_stage.undeferred.found();
        // A stage whose parameters are frozen has no weight gradients.
        if is_empty
            && !local_stage.logged_empty_weight_backward
            && !local_stage.runner.undeferred().is_empty()
        {
            local_stage.logged_empty_weight_backward = true;
            tracing::info!(
                "stage {stage} has no layer that defers its weight gradients: `I` computes them, and `W` does nothing; \
                 layers of `pipewright::nn` defer theirs, and so do your own with `SplitBackward`"
            );
        }
        Ok(())
    }

    /// Computes the weight gradients that are left. Returns their number.
    fn backward_weights(&mut self, action: Action, (stage, microbatch): At) -> Result<usize, Cause> {
        let (hook, rank) = (self.hook.clone(), self.world_rank);
        let runner = &mut self.local_stage(stage).runner;
        let tasks = runner.backward_weights(microbatch, &mut |work| {
            if let Some(hook) = &hook {
                hook.weights(rank, action, work);
            }
        })?;
        Ok(tasks)
    }
}

impl Stages for Executor {
    fn stage(&self, stage: StageIndex) -> &dyn StageCompute {
        &*self.stages[self.placement().chunk_of(stage).index()].runner
    }

    fn stage_mut(&mut self, stage: StageIndex) -> &mut dyn StageCompute {
        &mut *self.local_stage(stage).runner
    }

    fn note_scope(&mut self, name: &str, start: Instant, end: Instant) {
        let origin = self.step.input.origin;
        let seconds = |at: Instant| at.saturating_duration_since(origin).as_secs_f64();
        self.step.scopes.push(Scope {
            rank: self.endpoint.timeline_row(),
            name: Arc::from(name),
            start: seconds(start),
            end: seconds(end),
        });
    }
}
