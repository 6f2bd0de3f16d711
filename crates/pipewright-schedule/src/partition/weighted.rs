//! The `weighted` method: a greedy cut by weight that equals the cut of PyTorch's reference.
//!
//! Layers are added to a stage until its weight reaches its share, or until the remaining layers are needed
//! to give each later stage one. The share is the remaining weight at the start of the stage divided by the
//! number of remaining stages. If all weights are 0, the cut is even.
//!
//! The greedy cut is not optimal: a stage that narrowly misses its share takes the next layer, however heavy
//! it is. See
//! [`super::optimal`].

use crate::partition::stages::Partition;

/// Cuts layers with these weights into `stages` stages. `stages` is between 1 and the number of layers.
pub(super) fn cut(weights: &[u64], stages: usize) -> Partition {
    let mut left: u128 = weights.iter().map(|&weight| u128::from(weight)).sum();
    if left == 0 {
        return Partition::even(weights.len(), stages);
    }
    let mut starts = vec![0];
    let mut stage_weight = 0;
    for (layer, &weight) in weights.iter().enumerate() {
        let open = stages - starts.len();
        if open == 0 {
            break;
        }
        stage_weight += u128::from(weight);
        // The share is `left / (open + 1)`; the product keeps the comparison exact.
        let has_share = stage_weight * (open as u128 + 1) >= left;
        let must_close = weights.len() - layer - 1 == open;
        if has_share || must_close {
            starts.push(layer + 1);
            left -= stage_weight;
            stage_weight = 0;
        }
    }
    Partition::from_starts(starts, weights.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(weights: &[u64], stages: usize, expected: &[u128]) {
        assert_eq!(cut(weights, stages).weights(weights), expected);
    }

    #[test]
    fn a_stage_closes_at_its_share() {
        check(&[1, 1, 1, 1], 2, &[2, 2]);
        check(&[5, 5, 6, 6], 3, &[10, 6, 6]);
        check(&[9, 1, 1, 1], 2, &[9, 3]);
        check(&[1, 1, 1, 9], 2, &[3, 9]);
    }

    #[test]
    fn every_stage_keeps_a_layer() {
        check(&[1, 1, 9], 3, &[1, 1, 9]);
        check(&[0, 0, 0, 1], 4, &[0, 0, 0, 1]);
        check(&[u64::MAX, u64::MAX], 2, &[u128::from(u64::MAX); 2]);
    }
}
