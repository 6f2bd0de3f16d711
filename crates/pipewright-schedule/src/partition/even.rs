//! The `even` method: the same number of layers for each stage, whatever their weights.
//!
//! With `n` layers and `k` stages, the first `n mod k` stages have `n / k + 1` layers, the others `n / k`.

use crate::partition::stages::Partition;

/// Cuts `layers` layers into `stages` stages. `stages` is between 1 and `layers`.
pub(super) fn cut(layers: usize, stages: usize) -> Partition {
    let (base, larger) = (layers / stages, layers % stages);
    Partition::from_starts((0..stages).map(|stage| stage * base + stage.min(larger)).collect(), layers)
}
