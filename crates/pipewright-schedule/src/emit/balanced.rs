//! The cuts that DeepSpeed's `PipelineModule` makes by itself (`deepspeed/runtime/utils.py`).

/// The largest number of sums that [`balanced`] compares.
const MOST_SUMS: usize = 50_000_000;

/// Returns the first layer of each stage except the first, for `partition_method="uniform"`: stages differ by
/// at most one layer, and the first ones have more. There are at least as many layers as stages.
pub(super) fn uniform(layers: usize, stages: usize) -> Vec<usize> {
    let (each, more) = (layers / stages, layers % stages);
    (1..stages).map(|stage| stage * each + stage.min(more)).collect()
}

/// Returns the same for `partition_method="parameters"`: the difference between the heaviest and the lightest
/// stage is small, as DeepSpeed's recurrence finds it. If several cuts are equal, its last stage has the fewest layers.
/// `None` if there are too many layers and stages to try.
pub(super) fn balanced(weights: &[f64], stages: usize) -> Option<Vec<usize>> {
    let layers = weights.len();
    if layers <= stages {
        return Some(uniform(layers, stages));
    }
    if layers.saturating_mul(layers).saturating_mul(stages) > MOST_SUMS {
        return None;
    }
    let mut sums = vec![0.0];
    for weight in weights {
        sums.push(sums[sums.len() - 1] + weight);
    }
    // For the first `i` layers in `j` stages: the heaviest and the lightest stage, and the last start.
    let none = (f64::INFINITY, f64::NEG_INFINITY, 0);
    let mut best = vec![vec![none; stages + 1]; layers + 1];
    best[0][0] = (0.0, f64::INFINITY, 0);
    for i in 1..=layers {
        for j in 1..=stages.min(i) {
            for start in 0..i {
                let (most, least, _) = best[start][j - 1];
                let sum = sums[i] - sums[start];
                let (most, least) = (most.max(sum), least.min(sum));
                let (known_most, known_least, _) = best[i][j];
                if most - least <= known_most - known_least && most.is_finite() {
                    best[i][j] = (most, least, start);
                }
            }
        }
    }
    let mut boundaries = Vec::new();
    let mut end = layers;
    for stage in (1..=stages).rev() {
        end = best[end][stage].2;
        boundaries.push(end);
    }
    boundaries.pop();
    boundaries.reverse();
    Some(boundaries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_are_even() {
        assert_eq!(uniform(10, 4), [3, 6, 8]);
        assert_eq!(uniform(8, 4), [2, 4, 6]);
        assert_eq!(uniform(3, 1), [0usize; 0]);
    }

    #[test]
    fn stages_are_balanced() {
        // The results of `partition_balanced` in DeepSpeed 0.19.8.
        assert_eq!(balanced(&[1.0; 10], 4), Some(vec![3, 6, 8]));
        assert_eq!(balanced(&[5.0, 1.0, 1.0, 1.0, 1.0, 8.0], 3), Some(vec![1, 5]));
        assert_eq!(balanced(&[4.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 9.0], 4), Some(vec![1, 4, 7]));
        assert_eq!(balanced(&[1.0; 10_000], 64), None);
    }
}
