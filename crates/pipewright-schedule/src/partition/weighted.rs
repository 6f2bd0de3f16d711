//! Weighted: a greedy cut by weight, layer by layer, that matches the reference's cut.
//!
//! A stage is closed as soon as its weight reaches its share, the weight that is left at its start divided by
//! the stages that are left; or when each later stage needs one of the layers that are left. Without any
//! weight the cut is even.
//!
//! Greedy is not optimal: a stage that just misses its share takes the next layer, however heavy. See
//! [`super::optimal`].

use crate::partition::even;
use crate::partition::stages::Partition;

/// Cuts layers with these weights into `stages` stages, of which there are at least one and at most the
/// layers.
pub(super) fn cut(weights: &[u64], stages: usize) -> Partition {
    let mut left: u128 = weights.iter().map(|&weight| u128::from(weight)).sum();
    if left == 0 {
        return even::cut(weights.len(), stages);
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
