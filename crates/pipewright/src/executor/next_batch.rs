//! The batches that a process has begun while another one runs.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The digests of the batches that a process has begun while another one runs, and on which the processes have not agreed, for
/// the gradient norm and the reports of that one. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct NextBatch(Arc<Mutex<Begun>>);

/// The batches that a process has begun.
#[derive(Debug, Default)]
struct Begun {
    /// The batches that the ranks of the process have, in order.
    sent: VecDeque<u64>,
    /// The one that follows them, which the ranks get later.
    waiting: Option<u64>,
}

impl NextBatch {
    fn lock(&self) -> MutexGuard<'_, Begun> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets the batches.
    pub(crate) fn clear(&self) {
        *self.lock() = Begun::default();
    }

    /// Sets the digest of the batch that the ranks get when the batches before it have ended.
    pub(crate) fn set_waiting(&self, digest: Option<u64>) {
        self.lock().waiting = digest;
    }

    /// Adds the digest of a batch that the ranks have.
    pub(crate) fn add_sent(&self, digest: u64) {
        self.lock().sent.push_back(digest);
    }

    /// Forgets the first batches that the ranks have, on which the processes agree.
    pub(super) fn take_sent(&self, count: usize) {
        let sent = &mut self.lock().sent;
        sent.drain(..count.min(sent.len()));
    }

    /// Returns the digest of the first batch.
    pub(super) fn digest(&self) -> Option<u64> {
        let begun = self.lock();
        begun.sent.front().copied().or(begun.waiting)
    }

    /// Returns the digests of the batches that the ranks have.
    pub(super) fn sent(&self) -> Vec<u64> {
        self.lock().sent.iter().copied().collect()
    }
}

/// Returns the digests with which all of these lists begin.
pub(super) fn common_digests(lists: impl IntoIterator<Item = Vec<u64>>) -> Vec<u64> {
    let common = |a: Vec<u64>, b: Vec<u64>| {
        a.into_iter().zip(b).take_while(|(a, b)| a == b).map(|(digest, _)| digest).collect()
    };
    lists.into_iter().reduce(common).unwrap_or_default()
}

/// Returns the digest that all of these are; `None` if they differ.
pub(super) fn common_digest(digests: impl IntoIterator<Item = Option<u64>>) -> Option<u64> {
    let mut digests = digests.into_iter();
    let first = digests.next().flatten();
    if digests.all(|digest| digest == first) { first } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_common_if_none_differs() {
        assert_eq!(common_digest([Some(5), Some(5)]), Some(5));
        for different in [[Some(5), Some(6)], [Some(5), None], [None, Some(5)], [None, None]] {
            assert_eq!(common_digest(different), None, "{different:?}");
        }
    }

    #[test]
    fn batches_are_common_until_one_differs() {
        let check = |lists: &[&[u64]], expected: &[u64]| {
            assert_eq!(common_digests(lists.iter().map(|list| list.to_vec())), expected, "{lists:?}");
        };
        check(&[&[5, 6], &[5, 6], &[5, 6, 7]], &[5, 6]);
        check(&[&[5, 6], &[5]], &[5]);
        check(&[&[5, 6], &[4, 6]], &[]);
        check(&[&[5], &[], &[5]], &[]);
    }

    #[test]
    fn a_batch_that_waits_is_not_one_that_the_ranks_have() {
        let (next, clone) = (NextBatch::default(), NextBatch::default());
        assert_eq!((next.digest(), next.sent()), (None, vec![]));
        next.set_waiting(Some(0));
        assert_eq!((next.digest(), next.sent()), (Some(0), vec![]));
        next.add_sent(7);
        next.add_sent(8);
        assert_eq!((next.digest(), next.sent(), clone.digest()), (Some(7), vec![7, 8], None));
        next.clone().take_sent(1);
        assert_eq!((next.digest(), next.sent()), (Some(8), vec![8]));
        next.take_sent(1);
        assert_eq!((next.digest(), next.sent()), (Some(0), vec![]));
        next.clear();
        assert_eq!(next.digest(), None);
    }
}
