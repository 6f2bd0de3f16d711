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

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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

/// The digest of the batch that a process has begun while another one runs, for the gradient norm and the
/// reports of that one. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct NextBatch(Arc<Mutex<Option<Begun>>>);

/// A batch that a process has begun.
#[derive(Clone, Copy, Debug)]
struct Begun {
    digest: u64,
    /// Whether the ranks of the process have the batch already.
    is_sent: bool,
}

impl NextBatch {
    fn lock(&self) -> MutexGuard<'_, Option<Begun>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the digest of the next batch, which the ranks get when the batch before has ended; `None` if no batch
    /// follows.
    pub(crate) fn set(&self, digest: Option<u64>) {
        *self.lock() = digest.map(|digest| Begun { digest, is_sent: false });
    }

    /// Sets the digest of the next batch, which the ranks have already.
    pub(crate) fn set_sent(&self, digest: u64) {
        *self.lock() = Some(Begun { digest, is_sent: true });
    }

    /// Returns the digest of the next batch.
    pub(super) fn digest(&self) -> Option<u64> {
        self.lock().map(|begun| begun.digest)
    }

    /// Returns the digest of the next batch if the ranks have it.
    pub(super) fn sent(&self) -> Option<u64> {
        self.lock().filter(|begun| begun.is_sent).map(|begun| begun.digest)
    }
}

/// Returns the digest that all of these are; `None` if they differ.
pub(super) fn common_digest(digests: impl IntoIterator<Item = Option<u64>>) -> Option<u64> {
    let mut digests = digests.into_iter();
    let first = digests.next().flatten();
    if digests.all(|digest| digest == first) { first } else { None }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Tensor};

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

    #[test]
    fn digests_are_common_if_none_differs() {
        assert_eq!(common_digest([Some(5), Some(5)]), Some(5));
        for different in [[Some(5), Some(6)], [Some(5), None], [None, Some(5)], [None, None]] {
            assert_eq!(common_digest(different), None, "{different:?}");
        }
    }

    #[test]
    fn a_batch_that_waits_is_not_one_that_the_ranks_have() {
        let (next, clone) = (NextBatch::default(), NextBatch::default());
        assert_eq!((next.digest(), next.sent()), (None, None));
        next.set(Some(0));
        assert_eq!((next.digest(), next.sent()), (Some(0), None));
        next.set_sent(7);
        assert_eq!((next.digest(), next.sent(), clone.digest()), (Some(7), Some(7), None));
        next.set(None);
        assert_eq!((next.clone().digest(), next.sent()), (None, None));
    }
}
