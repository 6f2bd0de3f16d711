//! One handler for each kind of action; `compute.rs` has the handlers of the actions that compute. A handler
//! blocks only in the exchanges of a tensor group and of an expert group; in an overlap, one half may compute
//! while the other is blocked (`turns.rs`). If the tensors of an action have not arrived, the handler returns
//! the message that it waits for, and the action is tried again.
//!
//! A receive does nothing: it marks in the program where the message may arrive. The computation that uses
//! the message takes it, and waits if it has not arrived. So a rank continues to compute while the message of
//! an early receive is in transit.
//!
//! Between stages of one rank (the turn of a V placement) tensors are passed in place, and the program has no
//! communication for them. `boundary.rs` has both ends of a message between two ranks.

use pipewright_schedule::{Action, StageIndex};

use super::compute::{halves, part_of, runs_by_turns};
use super::losses::read_losses;
use super::machine::Executor;
use super::reduction::{add_sources, run_reduce_hook, run_wait_hook};
use super::stages::At;
use crate::failure::Cause;
use crate::message::{AwaitedMessage, Direction, Tag};
use crate::progress::{Blocked, Sending};
use crate::stage::StageError;

/// The error for a hook that sums gradients of experts over replicas that have different ones.
const SUM_OF_EXPERTS: &str = "the hook computes the sum over the replicas itself (`reduce_grad` without `ReduceRun::run`), and \
                              replicas hold experts of the stage together, so that their gradients belong to different \
                              parameters: call `ReduceRun::run`, or set `expert_parallel` to 1";

impl Executor {
    /// Runs the next action of the program, or returns what it waits for.
    pub(super) fn poll_action(&mut self) -> Result<Option<Blocked>, Cause> {
        let Some(action) = self.step.action(self.context.rank()) else {
            return Ok(self.poll_epilogue()?.map(Blocked::from));
        };
        let world_rank = self.world_rank();
        if self.recorder.enter()
            && let Some(hook) = self.context.hook()
        {
            if self.step.position == 0 && !self.step.program().is_forward_only() {
                hook.begin_step(world_rank, self.step.number);
            }
            hook.before(world_rank, action);
        }
        if let Some(sending) = self.unsent(action) {
            return Ok(Some(Blocked::Sending(sending)));
        }
        if let Some(awaited) = self.act_in_scope(action)? {
            return Ok(Some(Blocked::Receiving(awaited)));
        }
        self.note_exchange_sums(action);
        if !self.is_noted_later(action) {
            self.recorder.note(action);
        }
        if let Some(hook) = self.context.hook() {
            hook.after(world_rank, action);
        }
        self.recorder.leave();
        self.step.advance();
        self.connection.moved(self.step.position);
        Ok(None)
    }

    /// Notes the checksums of the tokens that the rank has sent in its current action.
    pub(super) fn note_exchange_sums(&mut self, action: Action) {
        self.checks.note_exchanges(self.connection.take_exchange_sums(), |half| part_of(action, half));
    }

    /// Returns whether the event of an action is added when its message is taken, or never if it moves nothing. It
    /// lasts from the first attempt to take the message until its arrival.
    fn is_noted_later(&self, action: Action) -> bool {
        match action {
            Action::RecvForward { .. } | Action::RecvBackward { .. } => true,
            // The mover of the rank says when it has moved the tensors.
            Action::Offload { .. } | Action::Reload { .. } => true,
            // The thread that reads says when it has read.
            Action::Unshard { stage } if self.streams.has(stage) => true,
            Action::Unshard { stage } => {
                let is_gathering = self.stages.get(stage).gathering.is_in_progress();
                self.context.is_sharded() && (self.context.hook().is_none() || is_gathering)
            }
            // It drops nothing.
            Action::Reshard { .. } => self.keeps_gathered(),
            _ => false,
        }
    }

    /// Returns the message of a `WAIT_SEND` action that has not left yet; `None` for every other action.
    fn unsent(&mut self, action: Action) -> Option<Sending> {
        let placement = &self.context.placement;
        let (direction, stage, microbatch) = match action {
            Action::WaitSendForward { stage, microbatch } => {
                (Direction::Forward, placement.next(stage)?, microbatch)
            }
            Action::WaitSendBackward { stage, microbatch } => {
                (Direction::Backward, placement.previous(stage)?, microbatch)
            }
            _ => return None,
        };
        let to = self.context.world_rank_of_stage(stage);
        let tag = Tag::Boundary { direction, stage, microbatch };
        if !self.connection.is_sent(to, tag) {
            return Some(Sending { to, tag });
        }
        self.recorder.note_sent();
        None
    }

    /// Runs `action` inside the hook's scope. Calls the hook only when the messages of the action have
    /// arrived; `act` then finds them in place.
    fn act_in_scope(&mut self, action: Action) -> Result<Option<AwaitedMessage>, Cause> {
        let Some(hook) = self.context.config.hook.clone() else { return self.act(action) };
        if let Some(awaited) = self.fetch(action)? {
            return Ok(Some(awaited));
        }
        let (rank, mut outcome) = (self.world_rank(), None);
        hook.around(rank, action, &mut || {
            outcome.get_or_insert_with(|| self.act(action));
        });
        outcome.unwrap_or_else(|| {
            let mistake = format!("the hook did not run {action}: a hook around an action must call `run`");
            Err(Cause::Mistake(mistake))
        })
    }

    /// Runs `action`, or returns the message that it waits for.
    fn act(&mut self, action: Action) -> Result<Option<AwaitedMessage>, Cause> {
        if let Some(awaited) = self.await_group(action)? {
            return Ok(Some(awaited));
        }
        if let Some(awaited) = self.fetch(action)? {
            return Ok(Some(awaited));
        }
        match action {
            Action::Forward { .. }
            | Action::Backward { .. }
            | Action::InputBackward { .. }
            | Action::WeightBackward { .. }
            | Action::Overlap(_) => {
                self.compute(action)?;
            }
            Action::SendForward { stage, microbatch } => {
                self.send_forward(At { stage, microbatch })?;
            }
            Action::SendBackward { stage, microbatch } => {
                self.send_backward(At { stage, microbatch })?;
            }
            // The computation that uses the message takes it.
            Action::RecvForward { .. } | Action::RecvBackward { .. } => {}
            // `poll_action` runs this action only after its message has left.
            Action::WaitSendForward { .. } | Action::WaitSendBackward { .. } => {}
            Action::ReduceGrad { stage } => self.reduce(action, stage)?,
            Action::WaitReduceGrad { stage } => {
                let is_due = self.reduces();
                if !is_due && self.stages.get(stage).has_own_experts() {
                    return Ok(None);
                }
                run_wait_hook(&self.context, self.stages.get_mut(stage), action, is_due)?;
            }
            Action::Unshard { .. } => self.unshard(action)?,
            Action::Reshard { .. } => self.reshard(action)?,
            Action::Offload { stage, microbatch } => self.offload(At { stage, microbatch })?,
            Action::Reload { stage, microbatch } => self.reload(At { stage, microbatch })?,
        }
        Ok(None)
    }

    /// Takes the messages that an action needs, or returns the first missing one.
    fn fetch(&mut self, action: Action) -> Result<Option<AwaitedMessage>, Cause> {
        let Action::Overlap(overlap) = action else { return self.fetch_for(action, true) };
        // A backward that runs by turns computes its forward again while the other half waits.
        let stages = [overlap.forward().0, overlap.backward().0];
        let recomputes = !runs_by_turns(&self.context, &self.stages, stages);
        let awaited = halves(action).find_map(|(half, part)| {
            self.connection.set_half(Some(half));
            self.fetch_for(part, recomputes).transpose()
        });
        self.connection.set_half(None);
        awaited.transpose()
    }

    /// Takes the messages that an action needs. The action is not an overlap. If `recomputes` and the action
    /// is a backward, its forward is computed again.
    fn fetch_for(&mut self, action: Action, recomputes: bool) -> Result<Option<AwaitedMessage>, Cause> {
        if let Action::Backward { stage, microbatch } | Action::InputBackward { stage, microbatch } = action {
            self.await_reload(At { stage, microbatch })?;
        }
        match action {
            Action::Forward { stage, microbatch } => self.fetch_inputs(At { stage, microbatch }),
            Action::Backward { stage, microbatch } | Action::InputBackward { stage, microbatch } => {
                if let Some(awaited) = self.fetch_parameters(stage)? {
                    return Ok(Some(awaited));
                }
                if recomputes {
                    self.recompute_early(At { stage, microbatch })?;
                }
                self.fetch_gradients(At { stage, microbatch })
            }
            Action::WaitReduceGrad { stage } => Ok(self.reductions.awaited(stage)),
            _ => Ok(None),
        }
    }

    /// Runs `REDUCE_GRAD`, or lets the hook run it.
    fn reduce(&mut self, action: Action, stage: StageIndex) -> Result<(), Cause> {
        let is_due = self.reduces();
        let has_own_experts = self.stages.get(stage).has_own_experts();
        if !is_due && has_own_experts {
            // The gradients of an expert are several sums, one for each replica, until they are due.
            return Ok(());
        }
        if is_due {
            self.checks.note_gradients(self.stages.get(stage));
        }
        if is_due && self.context.hook().is_some() {
            // The hook finds one gradient for each parameter.
            add_sources(self.stages.get_mut(stage));
        }
        if run_reduce_hook(&self.context, self.stages.get_mut(stage), action, is_due)? {
            return self.start_reduction(stage);
        }
        if is_due && has_own_experts {
            return Err(StageError::function(SUM_OF_EXPERTS).into());
        }
        if is_due {
            self.reductions.leave_to_hook(stage);
        }
        Ok(())
    }

    /// Returns whether gradients are summed over replicas at the end of this step.
    pub(super) fn reduces(&self) -> bool {
        self.context.replica_count() > 1 && self.step.input().update
    }

    /// Starts to sum a stage's gradients over the replicas, unless the sum has begun or the step sums none.
    /// Their checksums must have been noted, because the sums replace them.
    /// Fails if a loss is not finite.
    pub(super) fn start_reduction(&mut self, stage: StageIndex) -> Result<(), Cause> {
        if !self.reduces() || self.reductions.has(stage) {
            return Ok(());
        }
        // The losses of a repetition are read when its bits are confirmed.
        if !self.step.input().is_repetition() {
            read_losses(&mut self.stages, &mut self.recorder, self.step.input())?;
        }
        self.reductions.start(&self.context, &mut self.connection, self.stages.get_mut(stage))
    }
}
