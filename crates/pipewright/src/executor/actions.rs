//! One handler for each kind of action; `compute.rs` has those of the actions that compute. A handler blocks only in
//! the exchanges of a tensor group. If the tensors of an action have not arrived, the handler returns the message that it
//! waits for, and the action is tried again.
//!
//! A receive does nothing: it marks in the program where the message may arrive. The computation that uses the message
//! takes it, and waits if it has not arrived. So a rank continues to compute while the message of an early receive is in transit.
//!
//! Between stages of one rank (the turn of a V placement) tensors are passed in place, and the program has no
//! communication for them. `boundary.rs` has both ends of a message between two ranks.

use std::time::Duration;

use pipewright_schedule::Action;

use super::machine::Executor;
use crate::failure::Cause;
use crate::message::{AwaitedMessage, Direction, Tag};
use crate::progress::Sending;

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
            Action::ReduceGrad { stage } => self.reduce(action, stage).map(|()| None),
            Action::WaitReduceGrad { stage } => match self.awaited_reduction(stage) {
                None => self.end_reduction(action, stage).map(|()| None),
                awaited => Ok(awaited),
            },
            Action::Unshard { stage } => self.unshard(action, stage).map(|()| None),
            Action::Reshard { stage } => self.reshard(action, stage).map(|()| None),
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

    /// Runs `action` inside the hook's scope. Calls the hook only when the messages of the action have arrived; `act` then
    /// finds them in place.
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
                if let Some(awaited) = self.fetch_parameters(stage)? {
                    return Ok(Some(awaited));
                }
                self.recompute_early(stage, microbatch)?;
                self.fetch_gradients(stage, microbatch)
            }
            Action::Overlap(_) => action.parts().find_map(|part| self.fetch(part).transpose()).transpose(),
            Action::WaitReduceGrad { stage } => Ok(self.awaited_reduction(stage)),
            _ => Ok(None),
        }
    }
}
