//! The target ids of a loss, and the id of targets that do not count.

use burn::tensor::{Int, Tensor};

/// The target of a token that does not count in a loss. PyTorch and transformers use the same number
/// (`ignore_index`).
pub const IGNORED: i64 = -100;

/// The rows of a loss that count, with their targets.
pub(super) struct CountedRows {
    /// The targets of the rows that count, as indices into the vocabulary.
    pub(super) targets: Vec<usize>,
    /// The rows that count; `None` if all of them do.
    pub(super) rows: Option<Vec<usize>>,
}

impl CountedRows {
    /// Reads the targets of all rows.
    ///
    /// # Panics
    /// When a target that is not [`IGNORED`] is outside the vocabulary.
    pub(super) fn of(targets: Tensor<1, Int>, vocabulary: usize) -> Self {
        let ids: Vec<i64> = targets.into_data().iter::<i64>().collect();
        let counted = ids.iter().enumerate().filter(|(_, id)| **id != IGNORED);
        let (rows, targets): (Vec<usize>, Vec<usize>) =
            counted.map(|(row, &id)| (row, usize::try_from(id).unwrap_or(usize::MAX))).unzip();
        assert!(
            targets.iter().all(|&id| id < vocabulary),
            "a target lies outside the vocabulary of {vocabulary}"
        );
        let rows = (rows.len() < ids.len()).then_some(rows);
        Self { targets, rows }
    }
}

/// Returns the targets with 0 for each that is ignored, and weights of 1 and 0 for the others and for these.
pub(super) fn with_weights(targets: Tensor<1, Int>) -> (Tensor<1, Int>, Tensor<1>) {
    let ignored = targets.clone().equal_elem(IGNORED);
    (targets.mask_fill(ignored.clone(), 0), ignored.bool_not().float())
}
