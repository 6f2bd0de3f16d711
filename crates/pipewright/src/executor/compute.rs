//! The actions that compute: `F`, `B`, `I`, `W`, and the overlap of a forward with a backward. The messages
//! that they need have arrived; `edges.rs` has their inputs and outputs. A hook may run them in its own way
//! ([`ActionHook::forward`](crate::hook::ActionHook::forward)).

use std::time::Instant;

use pipewright_schedule::recompute::backward_follows;
use pipewright_schedule::{Action, StageIndex};

use super::connection::Connection;
use super::context::RankContext;
use super::machine::Executor;
use super::recorder::Recorder;
use super::skip::append_skips;
use super::stages::{At, LocalStage, LocalStages};
use crate::failure::Cause;
use crate::hook::{ActionHook, BackwardRun, ForwardRun, OverlapRun, Place, Stages};
use crate::loss_scale::LossScaling;
use crate::message::Direction;
use crate::random::StreamKey;
use crate::stage::{
    BackwardState, BatchPart, ForwardState, ForwardTask, InputGradients, StageCompute, StageContext,
    StageError,
};

impl Executor {
    /// Runs an action that computes, and notes the times of its exchanges.
    pub(super) fn compute(&mut self, action: Action) -> Result<(), Cause> {
        self.run_action(action)?;
        let exchanges = self.connection.take_exchange_times();
        self.recorder.note_exchanges(exchanges, |half| part_of(action, half));
        Ok(())
    }

    fn run_action(&mut self, action: Action) -> Result<(), Cause> {
        match action {
            Action::Forward { stage, microbatch } => self.forward(action, At { stage, microbatch }),
            Action::Backward { stage, microbatch } => {
                self.backward(action, At { stage, microbatch })?;
                self.backward_weights(action, At { stage, microbatch }).map(drop)
            }
            Action::InputBackward { stage, microbatch } => self.backward(action, At { stage, microbatch }),
            Action::WeightBackward { stage, microbatch } => {
                self.weight_backward(action, At { stage, microbatch })
            }
            Action::Overlap(overlap) => {
                let at = |(stage, microbatch)| At { stage, microbatch };
                self.overlap(action, at(overlap.forward()), at(overlap.backward()))
            }
            _ => unreachable!("other actions do not compute"),
        }
    }

    /// Runs the forward and then the backward, or by turns if they exchange tokens, or both as the hook
    /// orders them.
    fn overlap(&mut self, overlap: Action, forward_at: At, backward_at: At) -> Result<(), Cause> {
        if runs_by_turns(&self.context, &self.stages, [forward_at.stage, backward_at.stage]) {
            return self.by_turns(overlap, forward_at, backward_at);
        }
        if self.context.hook().is_none() {
            for (half, part) in halves(overlap) {
                self.connection.set_half(Some(half));
                self.run_action(part)?;
            }
            self.connection.set_half(None);
            return Ok(());
        }
        let mut parts = overlap.parts();
        let (Some(first), Some(second)) = (parts.next(), parts.next()) else {
            unreachable!("an overlap has two parts")
        };
        let mut forward = self.begin_forward(forward_at)?;
        let mut backward = self.begin_backward(second, backward_at);
        let start = Instant::now();
        if let (rank, Some((hook, mut stages))) = (self.context.world_rank, self.hooked_stages()) {
            let (forward, backward) = (&mut forward, &mut backward);
            hook.overlap(&mut OverlapRun::new(rank, [first, second], &mut stages, forward, backward))?;
        }
        self.connection.set_half(None);
        self.finish_forward(first, forward_at, forward)?;
        self.finish_backward(second, backward_at, backward, Some(start))?;
        self.backward_weights(second, backward_at).map(drop)
    }

    /// Returns the hook, if there is one, and the stages as its functions use them.
    fn hooked_stages(&mut self) -> Option<(&dyn ActionHook, RecordedStages<'_>)> {
        let Self { context, stages, recorder, connection, .. } = self;
        Some((context.hook()?, RecordedStages { stages, recorder, connection }))
    }

    /// Runs both halves of an overlap by turns: one of them computes while the other waits for its exchange.
    fn by_turns(&mut self, overlap: Action, forward_at: At, backward_at: At) -> Result<(), Cause> {
        let [first, second] =
            [Direction::Forward, Direction::Backward].map(|half| part_of(overlap, Some(half)));
        let mut forward = self.begin_forward(forward_at)?;
        let mut backward = self.begin_backward(second, backward_at);
        let microbatch = backward_at.microbatch;
        let stages = self.stages.two_mut([forward_at.stage, backward_at.stage]);
        let [forward_runner, backward_runner] = stages.map(LocalStage::runner_mut);
        let spans = self.backward_threads.run(
            self.context.world_rank,
            &self.connection.memory,
            || forward_runner.forward(&mut forward),
            || {
                backward_runner.backward(&mut backward)?;
                backward_runner.backward_weights(microbatch, &mut |_| ()).map(drop)
            },
        )?;
        self.recorder.note_halves(spans, |half| part_of(overlap, half));
        self.finish_forward(first, forward_at, forward)?;
        self.finish_backward(second, backward_at, backward, None)
    }

    fn forward(&mut self, action: Action, at: At) -> Result<(), Cause> {
        let mut forward = self.begin_forward(at)?;
        let place = Place { rank: self.context.world_rank, action };
        let outcome = match self.hooked_stages() {
            Some((hook, mut stages)) => hook.forward(&mut ForwardRun::new(place, &mut stages, &mut forward)),
            None => self.stages.get_mut(at.stage).runner_mut().forward(&mut forward),
        };
        if matches!(outcome, Err(StageError::NotFinite { .. })) {
            self.checks.note_failed_forward(at);
        }
        outcome?;
        self.finish_forward(action, at, forward)
    }

    fn begin_forward(&mut self, at @ At { stage, microbatch }: At) -> Result<ForwardState, Cause> {
        let inputs = self.take_inputs(at)?;
        let (recomputes, random) = (self.recomputes(at), self.random(at));
        let input = self.step.input();
        let (index, slices) = (microbatch.index(), input.program.slices());
        let has_backward = input.program.as_program().trained().runs_backward(stage);
        let task = ForwardTask {
            loss_weight: input.loss_weights[index] * input.slice_shares[index] * input.loss_scale,
            auxiliary_weight: input.loss_weights[index] / f64::from(slices.get()) * input.loss_scale,
            keep_outputs: input.keep_outputs || input.kept_stages.contains(&stage),
            recompute: recomputes,
            has_backward,
        };
        let local_stage = self.stages.get_mut(stage);
        let target = local_stage.batch.targets.take_if_present(microbatch);
        let device = local_stage.runner().device();
        let target = target.map(|target| {
            let values = target.into_iter().map(|value| value.to_device(device)).collect();
            local_stage.runner().admitted(BatchPart::Target, values)
        });
        let target = target.transpose()?;
        let stage_context = StageContext::of_number(stage, microbatch, slices);
        let stage_context = stage_context.with_side_inputs(input.side_inputs.clone(), device.clone());
        let stage_context = if input.searches {
            // With a larger scale, infinite gradients only lower the scale.
            stage_context.with_watch(input.loss_scale <= LossScaling::SMALLEST)
        } else {
            stage_context
        };
        Ok(if input.program.is_forward_only() {
            ForwardState::new(stage_context, inputs, target, None)
        } else {
            ForwardState::new(stage_context.with_random(random), inputs, target, Some(task))
        })
    }

    /// Returns whether a forward keeps its inputs only. A forward that its backward follows at once has
    /// nothing to save.
    fn recomputes(&mut self, At { stage, microbatch }: At) -> bool {
        let Self { context, stages, step, .. } = self;
        let program = step.program();
        if program.is_forward_only() || !program.as_program().trained().runs_backward(stage) {
            return false;
        }
        let Some(choice) = context.config.recompute.of(stage) else { return false };
        let keeps = stages.get_mut(stage).batch.kept_forwards.forward(choice.keep, microbatch);
        !keeps && !backward_follows(program.row(context.rank()), step.position)
    }

    /// Returns the key of the random numbers of a microbatch, which is numbered over all replicas and over
    /// the batches of the step.
    fn random(&self, At { microbatch, .. }: At) -> StreamKey {
        let Self { context, step, accumulation, .. } = self;
        let input = step.input();
        let earlier = u64::from(accumulation.microbatches) * u64::from(context.replica_count());
        let number = input.first_microbatch() + microbatch.get();
        StreamKey { seed: context.config.seed, step: input.step, microbatch: earlier + u64::from(number) }
    }

    fn finish_forward(&mut self, action: Action, at: At, forward: ForwardState) -> Result<(), Cause> {
        if let Some(block) = forward.next_block() {
            return Err(blocks_left(action, block));
        }
        let local_stage = self.stages.get_mut(at.stage);
        let forwarded = local_stage.runner_mut().finish_forward(forward)?;
        self.checks.note_forward(at, &forwarded);
        if let Some(loss) = forwarded.loss {
            local_stage.batch.losses.put(at.microbatch, loss);
        }
        local_stage.batch.auxiliary.put(at.microbatch, forwarded.auxiliary);
        self.recorder.add_loads(forwarded.loads);
        self.pass_outputs(at, forwarded.outputs)
    }

    fn backward(&mut self, action: Action, at: At) -> Result<(), Cause> {
        let mut backward = self.begin_backward(action, at);
        let start = Instant::now();
        let place = Place { rank: self.context.world_rank, action };
        match self.hooked_stages() {
            Some((hook, mut stages)) => {
                hook.backward(&mut BackwardRun::new(place, &mut stages, &mut backward))?;
            }
            None => self.stages.get_mut(at.stage).runner_mut().backward(&mut backward)?,
        }
        self.finish_backward(action, at, backward, Some(start))
    }

    fn begin_backward(&mut self, action: Action, at @ At { stage, microbatch }: At) -> BackwardState {
        let mut gradients = if self.context.is_last(stage) {
            Vec::new()
        } else {
            self.stages.get_mut(stage).batch.output_gradients.take(microbatch)
        };
        append_skips(&mut self.stages, Direction::Backward, at, &mut gradients);
        self.stages.get_mut(stage).batch.kept_forwards.backward(microbatch);
        let is_whole = !matches!(action, Action::InputBackward { .. });
        self.stages.get_mut(stage).runner_mut().begin_backward(microbatch, gradients, is_whole)
    }

    /// Ends a backward. `start` is its beginning, from which a forward that it has computed again is
    /// recorded. It is `None` in an overlap whose halves run by turns: the forward of the other half runs in
    /// the same time.
    fn finish_backward(
        &mut self,
        action: Action,
        at: At,
        backward: BackwardState,
        start: Option<Instant>,
    ) -> Result<(), Cause> {
        if let Some(block) = backward.next_block() {
            return Err(blocks_left(action, block));
        }
        let InputGradients { gradients, sides, recomputed } = backward.into_input_gradients()?;
        if !sides.is_empty() {
            self.stages.get_mut(at.stage).batch.side_gradients.put(at.microbatch, sides);
        }
        self.checks.note_backward(action, at, &gradients);
        if let Some(start) = start.filter(|_| !recomputed.is_zero()) {
            let At { stage, microbatch } = at;
            self.recorder.note_recomputed(Action::Forward { stage, microbatch }, start, recomputed);
        }
        self.pass_gradients(at, gradients)
    }

    /// Runs `W`: the weight gradients that `I` deferred. A stage that defers none still trains, but gains
    /// nothing from the split, which is logged once.
    fn weight_backward(&mut self, action: Action, at @ At { stage, .. }: At) -> Result<(), Cause> {
        let tasks = self.backward_weights(action, at)?;
        // A function of a hook's may have computed the weight gradients in `I`.
        let is_empty = tasks == 0 && self.context.hook().is_none();
        let local_stage = self.stages.get_mut(stage);
        local_stage.undeferred.note_run();
        // A stage whose parameters are frozen has no weight gradients.
        let is_new = || !local_stage.is_empty_w_logged && !local_stage.runner().undeferred().is_empty();
        if is_empty && is_new() {
            local_stage.is_empty_w_logged = true;
            tracing::info!(
                "stage {stage} has no layer that defers its weight gradients: `I` computes them, and `W` does nothing; \
                 layers of `pipewright::nn` defer theirs, and so do your own with `SplitBackward`"
            );
        }
        Ok(())
    }

    /// Computes the weight gradients that are left. Returns their number.
    fn backward_weights(&mut self, action: Action, At { stage, microbatch }: At) -> Result<usize, Cause> {
        let (hook, rank) = (self.context.hook(), self.context.world_rank);
        let runner = self.stages.get_mut(stage).runner_mut();
        let tasks = runner.backward_weights(microbatch, &mut |work| {
            if let Some(hook) = hook {
                hook.weights(rank, action, work);
            }
        })?;
        Ok(tasks)
    }

    /// Computes a forward again before the gradients for its backward are taken, so that it runs while they are
    /// on their way. It also runs first where they have arrived: the ranks of a tensor group exchange parts of
    /// the forward and of the gradients, all in the same order. Where a hook watches the actions, or the ranks of a
    /// group begin them together, the forward is left to the backward.
    pub(super) fn recompute_early(&mut self, At { stage, microbatch }: At) -> Result<(), Cause> {
        let takes_turns = self.takes_group_turns();
        let Self { context, stages, recorder, .. } = self;
        if takes_turns || context.hook().is_some() || !context.config.recompute.applies_to(stage) {
            return Ok(());
        }
        let start = Instant::now();
        if stages.get_mut(stage).runner_mut().recompute(microbatch)? {
            recorder.note_recomputed(Action::Forward { stage, microbatch }, start, start.elapsed());
        }
        Ok(())
    }
}

/// Returns whether the halves of an overlap run by turns: a forward of the first stage and a backward of the
/// second. They do if at least one of them exchanges tokens, in which case the other one can compute
/// meanwhile. A hook runs both itself. A stage cannot compute two things at once.
pub(super) fn runs_by_turns(
    context: &RankContext,
    stages: &LocalStages,
    [forward, backward]: [StageIndex; 2],
) -> bool {
    let exchanges = |stage| stages.get(stage).has_own_experts();
    let has_groups = context.expert_rank().of > 1 && context.hook().is_none();
    has_groups && forward != backward && (exchanges(forward) || exchanges(backward))
}

/// Returns the halves of an overlap.
pub(super) fn halves(overlap: Action) -> impl Iterator<Item = (Direction, Action)> {
    [Direction::Forward, Direction::Backward].into_iter().zip(overlap.parts())
}

/// Returns a half of an overlap, or the whole action.
pub(super) fn part_of(action: Action, half: Option<Direction>) -> Action {
    halves(action).find(|&(own, _)| Some(own) == half).map_or(action, |(_, part)| part)
}

/// The stages of a rank and the record of its step, as a hook's functions use them.
struct RecordedStages<'a> {
    stages: &'a mut LocalStages,
    recorder: &'a mut Recorder,
    connection: &'a Connection,
}

impl Stages for RecordedStages<'_> {
    fn stage(&self, stage: StageIndex) -> &dyn StageCompute {
        self.stages.get(stage).runner()
    }

    fn stage_mut(&mut self, stage: StageIndex) -> &mut dyn StageCompute {
        self.stages.get_mut(stage).runner_mut()
    }

    fn begin_half(&mut self, half: Direction) {
        self.connection.set_half(Some(half));
    }

    fn note_scope(&mut self, name: &str, start: Instant, end: Instant) {
        self.recorder.note_scope(name, start, end);
    }
}

/// Returns the error of a function that left out blocks. `block` was to run next.
fn blocks_left(action: Action, block: usize) -> Cause {
    Cause::Mistake(format!(
        "the function that runs {action} left out block {block} and those behind it: run all blocks, or call `run_all`"
    ))
}
