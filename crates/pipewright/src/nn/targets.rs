//! The target ids of a loss, and the id of targets that do not count.

use burn::tensor::{Int, Tensor};
use pipewright_kernel::cross_entropy;

/// The target of a token that does not count in a loss. PyTorch and transformers use the same number
/// (`ignore_index`).
pub const IGNORED_TARGET: i64 = -100;

/// Returns the targets as indices into the vocabulary, with [`cross_entropy::IGNORED_TARGET`] for each that
/// is ignored.
///
/// # Panics
/// When a target that is not [`IGNORED_TARGET`] is outside the vocabulary.
pub(super) fn target_indices(targets: Tensor<1, Int>, vocabulary: usize) -> Vec<usize> {
    let index = |id: i64| match usize::try_from(id) {
        Ok(index) if index < vocabulary => index,
        _ if id == IGNORED_TARGET => cross_entropy::IGNORED_TARGET,
        _ => panic!("a target lies outside the vocabulary of {vocabulary}"),
    };
    targets.into_data().iter::<i64>().map(index).collect()
}

/// Returns the targets with 0 for each that is ignored.
pub(super) fn with_0_for_ignored(targets: Tensor<1, Int>) -> Tensor<1, Int> {
    let ignored = targets.clone().equal_elem(IGNORED_TARGET);
    targets.mask_fill(ignored, 0)
}
