//! The batch that a process has begun while another one runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The digest of the batch that a process has begun while another one runs, for the reports of that one. Clones
/// share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct NextBatch(Arc<AtomicU64>);

impl NextBatch {
    /// Stands for no batch.
    const NONE: u64 = 0;

    /// Sets the digest of the next batch; `None` if there is none.
    pub(crate) fn set(&self, digest: Option<u64>) {
        self.0.store(digest.unwrap_or(Self::NONE), Ordering::Relaxed);
    }

    /// Returns the digest of the next batch.
    pub(super) fn digest(&self) -> Option<u64> {
        Some(self.0.load(Ordering::Relaxed)).filter(|digest| *digest != Self::NONE)
    }
}
