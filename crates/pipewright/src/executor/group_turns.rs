//! Actions that the ranks of a tensor group or an expert group begin together while batches overlap.
//!
//! These ranks exchange tensors in the middle of an action, and block until these arrive (`group_link.rs`). A rank that
//! blocks does not continue the batch that ends meanwhile: it passes on no squares and no norm. If one rank of a group
//! began an action while another one still waited for its message, this message might come from a rank that waits for
//! that norm, and none of them would continue.
//!
//! So a rank that has the messages of an action says so to the others ([`Tag::GroupReady`]), and begins the action when
//! all of them have said it. With experts, these are the tensor groups of all replicas of the expert group: a rank that
//! waits in one group may be awaited in the other one. While a rank waits for the others, it continues the batch that
//! ends. Then the action needs only ranks of the group, and each of them begins it next: all run the same row, and what
//! the end of a batch exchanges in the group does not block (`copies.rs`).

use pipewright_schedule::Action;

use super::machine::Executor;
use super::stages::At;
use crate::collective::Exchange;
use crate::failure::Cause;
use crate::message::{AwaitedMessage, Direction, Payload, Tag};

impl Executor {
    /// Returns whether the rank begins its actions together with others.
    pub(super) fn takes_group_turns(&self) -> bool {
        self.overlap.is_some() && self.context.action_group.members().len() > 1
    }

    /// Returns a message for which an action waits: one of its own, or one of a rank of the group that has not said that it
    /// has its own.
    pub(super) fn await_group(&mut self, action: Action) -> Result<Option<AwaitedMessage>, Cause> {
        if !self.takes_group_turns() || !action.is_compute() {
            return Ok(None);
        }
        if self.step.group_turn.is_none() {
            if let Some(awaited) = self.missing(action)? {
                return Ok(Some(awaited));
            }
            self.recorder.note_arrived();
            let Self { context, connection, step, .. } = self;
            let tag = Tag::GroupReady { position: step.position as u32 };
            for (_, to) in context.action_group.others() {
                connection.send(to, tag, Payload::of(&()));
            }
            step.group_turn = Some(Exchange::among(&context.action_group, tag, ()));
        }
        let Self { connection, step, .. } = self;
        step.group_turn.as_mut().map_or(Ok(None), |ready| connection.receive(ready))
    }

    /// Returns a message that an action needs and that has not arrived: rows of sharded parameters, or a message of another
    /// stage. The action takes the latter, because the ranks of the group convert its tensors together.
    fn missing(&mut self, action: Action) -> Result<Option<AwaitedMessage>, Cause> {
        if let Action::Forward { stage, .. }
        | Action::Backward { stage, .. }
        | Action::InputBackward { stage, .. } = action
            && let Some(awaited) = self.fetch_parameters(stage)?
        {
            return Ok(Some(awaited));
        }
        let placement = &self.context.placement;
        let (direction, stage, microbatch, source) = match action {
            Action::Forward { stage, microbatch } => {
                (Direction::Forward, stage, microbatch, placement.previous(stage))
            }
            Action::Backward { stage, microbatch } | Action::InputBackward { stage, microbatch } => {
                (Direction::Backward, stage, microbatch, placement.next(stage))
            }
            _ => return Ok(None),
        };
        let Some(source) = source else { return Ok(None) };
        if !self.context.is_local(source) {
            let awaited = self.boundary_message(direction, source, At { stage, microbatch });
            if !self.connection.has_arrived(awaited) {
                return Ok(Some(awaited));
            }
        }
        self.fetch_skips(direction, At { stage, microbatch })
    }
}
