//! Even: equally many layers for each stage, whatever they weigh.
//!
//! `n` layers in `k` stages: the first `n mod k` stages have `n / k + 1` layers, the others `n / k`.

use crate::partition::stages::Partition;

/// Cuts `layers` layers into `stages` stages, of which there are at least one and at most `layers`.
pub(super) fn cut(layers: usize, stages: usize) -> Partition {
    let (base, larger) = (layers / stages, layers % stages);
    Partition::from_starts((0..stages).map(|stage| stage * base + stage.min(larger)).collect(), layers)
}
