//! The comparison of batches before a step, if the ranks belong to several processes ([`crate::batch::StepForm`]).
//!
//! What each process knows goes up the tree of all ranks ([`Tag::StepForms`]). The root compares it and sends the result
//! down ([`Tag::AgreedStep`]), so all processes take the step, or all return the same error.

use std::sync::Arc;

use crate::batch::{AgreedBatch, BatchDisagreement, StepForm, agree};
use crate::ids::WorldRank;
use crate::message::{MessageError, Tag, decoded, encoded};

/// What all processes agree on, or why they do not.
pub(crate) type Agreement = Result<AgreedBatch, BatchDisagreement>;

/// Compares what all ranks know. Returns the message of the root.
pub(super) fn root_agreement(forms: &[(WorldRank, StepForm)]) -> Arc<[u8]> {
    encoded(&agree(forms))
}

pub(super) fn decode_agreement(from: WorldRank, message: &Arc<[u8]>) -> Result<Agreement, MessageError> {
    decoded(from, Tag::AgreedStep, message)
}
