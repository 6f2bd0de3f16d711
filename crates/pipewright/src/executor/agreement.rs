//! The comparison of batches before a step, if the ranks belong to several processes
//! ([`crate::batch::StepForm`]).
//!
//! A hash of what each process knows goes up the tree of all ranks ([`Tag::StepDigest`]), and whether all are
//! equal goes down ([`Tag::SameStep`]). Equal processes have nothing to learn from each other and take the
//! step. Otherwise what they know goes up the tree, merged at each rank ([`Tag::StepForms`]), and the root
//! sends the result down ([`Tag::AgreedStep`]). So all processes take the step, or all return the same error.
//! Processes that pass only the parts of a batch that they need always differ, and pay for both exchanges.
//!
//! No message is needed if a process has the next batch before a step ends. The reports of the step then have
//! the hashes of the next batches ([`NextBatch`](super::NextBatch)), and the summary says whether all are
//! equal.
//!
//! # Why it precedes the step
//!
//! No message of the step itself can carry the hash. Processes whose batches differ may run different
//! programs, and would wait for each other's messages until the deadline instead of returning the difference.
//! And a process that does not know the weights of the microbatches needs them in its first forward.

use std::sync::Arc;

use super::parameters::hash_of;
use crate::batch::{AgreedBatch, BatchDisagreement, StepForm, StepForms};
use crate::collective::Exchange;
use crate::ids::WorldRank;
use crate::message::{MessageError, Tag, decoded, encoded};

/// The batch on which all processes agree, or why they do not.
pub(crate) type Agreement = Result<AgreedBatch, BatchDisagreement>;

/// Returns what the processes agree on if the reports have shown that all of them have this next batch.
/// `common` is the digest that all of them have.
pub(crate) fn agreed_before(common: Option<u64>, form: StepForm) -> Option<Agreement> {
    (common == Some(digest(&form))).then(|| agree_alike(form))
}

/// Returns a hash that is the same for equal forms in every process of one build.
pub(crate) fn digest(form: &StepForm) -> u64 {
    hash_of(&encoded(form))
}

/// Returns what the processes agree on if all of them have this form.
pub(crate) fn agree_alike(form: StepForm) -> Agreement {
    StepForms::new(WorldRank::new(0), form).agree()
}

/// Merges what the ranks of a subtree know.
pub(super) fn merge_forms(forms: Exchange<StepForms>) -> StepForms {
    let merged = forms.into_contents().reduce(StepForms::merge);
    merged.expect("a subtree has at least one rank")
}

/// Decodes what all processes agree on.
pub(super) fn decode_agreement(from: WorldRank, message: &Arc<[u8]>) -> Result<Agreement, MessageError> {
    decoded(from, Tag::AgreedStep, message)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Tensor};

    use super::super::next_batch::common_digest;
    use super::*;
    use crate::batch::{Batch, Purpose, SplitRule};
    use crate::message::AwaitedMessage;

    fn form(rows: usize) -> StepForm {
        let rows = Tensor::<2>::zeros([rows, 2], &Device::flex());
        let batch = Batch::split(rows.clone(), rows, SplitRule::balanced(6)).expect("it splits");
        batch.form(Purpose::Update { learning_rate: 0.5 })
    }

    #[test]
    fn a_batch_that_all_reports_announce_is_agreed() {
        let common = Some(digest(&form(13)));
        assert_eq!(agreed_before(common, form(13)), Some(agree_alike(form(13))));
        assert_eq!(agreed_before(common, form(12)), None);
        assert_eq!(agreed_before(None, form(13)), None);
    }

    /// Returns the common digest of a rank with this form and children with these digests.
    fn common(own: &StepForm, children: &[Option<u64>]) -> Option<u64> {
        let ranks: Vec<WorldRank> = (1..=children.len() as u32).map(WorldRank::new).collect();
        let mut digests = Exchange::gather(Some(digest(own)), Tag::StepDigest, &ranks);
        let take = |AwaitedMessage { from, .. }| -> Result<_, ()> {
            Ok(Some((std::time::Instant::now(), children[from.index() - 1])))
        };
        assert_eq!(digests.poll(take), Ok(None));
        common_digest(digests.into_contents())
    }

    #[test]
    fn a_subtree_has_a_digest_if_all_its_ranks_know_the_same() {
        let (same, other) = (Some(digest(&form(13))), Some(digest(&form(12))));
        assert_ne!(same, other);
        assert_eq!(common(&form(13), &[]), same);
        assert_eq!(common(&form(13), &[same, same]), same);
        assert_eq!(common(&form(13), &[same, other]), None);
        assert_eq!(common(&form(13), &[None, same]), None);
    }
}
