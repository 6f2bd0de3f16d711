//! The batch that a process has begun while another one runs.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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
    use super::*;

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
