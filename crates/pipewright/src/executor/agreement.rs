//! The comparison of batches before a step, if the ranks belong to several processes ([`crate::batch::StepForm`]).
//!
//! What each process knows goes up the tree of all ranks ([`Tag::StepForms`]). The root compares it and sends the result
//! down ([`Tag::AgreedStep`]), so all processes take the step, or all return the same error.

use std::sync::Arc;

use super::machine::Executor;
use super::step::{Outcome, Phase, StepInput, StepState};
use crate::batch::{AgreedBatch, BatchDisagreement, StepForm, agree};
use crate::collective::Exchange;
use crate::ids::{Attempt, StepNumber, WorldRank};
use crate::message::{MessageError, Payload, Tag, decoded, encoded};
use crate::progress::Activity;

/// What all processes agree on, or why they do not.
pub(crate) type Agreement = Result<AgreedBatch, BatchDisagreement>;

impl Executor {
    /// Starts to compare what this process knows of a step with the other processes; [`Executor::poll`] continues it.
    pub(crate) fn begin_agreeing(&mut self, step: StepNumber, attempt: Attempt, form: StepForm) {
        self.endpoint.begin_step(attempt);
        let input = StepInput::empty(step, self.step.input.program.clone());
        self.step = StepState::new(StepInput { attempt, ..input });
        let own = vec![(self.world_rank, form)];
        let children = self.endpoint.world_tree().children();
        self.step.phase = Phase::StepForms(Exchange::gather(own, Tag::StepForms, children));
        self.board.set_activity(self.world_rank, Activity::Computes);
    }

    /// Passes on what this rank's subtree knows. The root compares all of it.
    pub(super) fn pass_forms(&mut self, forms: Vec<(WorldRank, StepForm)>) -> Phase {
        if let Some(parent) = self.endpoint.world_tree().parent() {
            self.endpoint.send_world(parent, Tag::StepForms, Payload::of(&forms));
            return Phase::AgreedStep(Exchange::one(parent, Tag::AgreedStep));
        }
        Phase::AgreedStep(Exchange::complete(encoded(&agree(&forms))))
    }

    /// Passes on what all processes agree on.
    pub(super) fn pass_agreement(&mut self, agreement: &Arc<[u8]>) -> Result<Phase, MessageError> {
        let tree = self.endpoint.world_tree().clone();
        self.send_bytes(tree.children(), Tag::AgreedStep, agreement);
        let from = tree.parent().unwrap_or(self.world_rank);
        let agreed = Some(decoded(from, Tag::AgreedStep, agreement)?);
        Ok(Phase::Done(Outcome { agreed, ..Outcome::default() }))
    }

    /// Returns what all processes agree on. Call once, when they have compared their batches.
    pub(crate) fn agreed(&mut self) -> Option<Agreement> {
        self.take_outcome().agreed
    }
}
