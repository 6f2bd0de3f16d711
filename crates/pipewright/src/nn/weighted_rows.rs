//! Rows of a loss that count by weights.

use burn::tensor::{Int, Tensor};

use super::composed::at_least_single;
use super::row_sums::sum;

/// Returns the sum of all losses times their weights. A loss of weight 0 adds nothing, even if it is
/// infinite: the target of such a row is any id, whose logit may be masked.
pub(super) fn weighted_sum<const D: usize>(losses: Tensor<D>, weights: Tensor<D>) -> Tensor<1> {
    sum(losses.mask_fill(weights.clone().equal_elem(0.0), 0.0) * weights)
}

/// The targets and weights of rows. Rows of weight 0 have target 0.
pub(super) struct WeightedRows {
    pub(super) targets: Tensor<1, Int>,
    pub(super) weights: Tensor<1>,
    /// The sum of the weights; 1 if all are 0, because the sum of the losses is then 0, and so is their mean.
    pub(super) whole: Tensor<1>,
}

impl WeightedRows {
    /// Panics if the number of targets or of weights differs from the number of rows.
    pub(super) fn of(rows: usize, targets: Tensor<1, Int>, weights: Tensor<1>) -> Self {
        assert_eq!(targets.dims(), [rows], "one target per row");
        assert_eq!(weights.dims(), [rows], "one weight per row");
        let targets = targets.mask_fill(weights.clone().equal_elem(0.0), 0);
        let weights = at_least_single(weights);
        let whole = sum(weights.clone());
        let whole = whole.clone().mask_fill(whole.equal_elem(0.0), 1.0);
        Self { targets, weights, whole }
    }
}
