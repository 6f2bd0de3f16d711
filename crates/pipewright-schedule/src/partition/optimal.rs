//! The `optimal` method: the cut whose heaviest stage is as light as possible, found exactly.
//!
//! The heaviest stage sets the speed of the pipeline. Bisection finds the smallest bound on the weight of a
//! stage under which the layers fit into the stages. To test a bound, each stage is filled as far as the
//! bound allows, which needs the fewest stages.
//!
//! Several cuts may reach that bound. The stages are filled one after another. Each takes the number of
//! layers that brings its weight nearest to its share, which is the remaining weight divided by the number of
//! remaining stages, provided that the later stages can still keep the bound. Ties go to the number that is
//! nearest to its share of the layers, then to the larger number. Time `n log w` for `n` layers of total
//! weight `w`.

use crate::partition::stages::Partition;

/// Cuts layers with these weights into `stages` stages. `stages` is between 1 and the number of layers.
pub(super) fn cut(weights: &[u64], stages: usize) -> Partition {
    let sums = running_sums(weights);
    let bound = smallest_bound(weights, &sums, stages);
    let needed = stages_needed(&sums, bound);
    let mut starts = vec![0];
    while starts.len() < stages {
        let start = starts[starts.len() - 1];
        starts.push(next_start(&sums, bound, &needed, start, stages - starts.len()));
    }
    Partition::from_starts(starts, weights.len())
}

/// Returns the running sums: `sums[i]` is the weight of the layers before `i`.
fn running_sums(weights: &[u64]) -> Vec<u128> {
    let mut sums = vec![0];
    sums.extend(weights.iter().scan(0u128, |sum, &weight| {
        *sum += u128::from(weight);
        Some(*sum)
    }));
    sums
}

/// Returns the weight of the heaviest stage in the best cut.
fn smallest_bound(weights: &[u64], sums: &[u128], stages: usize) -> u128 {
    let mut low = weights.iter().copied().max().map_or(0, u128::from);
    let mut high = sums[weights.len()];
    while low < high {
        let middle = low + (high - low) / 2;
        // Fewer stages than wanted are enough, because cutting a stage in two does not make any stage
        // heavier.
        if stages_needed(sums, middle)[0] <= stages {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    low
}

/// Returns, for each layer, the smallest number of stages of weight at most `bound` that hold it and all
/// later layers. No single layer exceeds `bound`.
fn stages_needed(sums: &[u128], bound: u128) -> Vec<usize> {
    let layers = sums.len() - 1;
    let mut needed = vec![0; layers + 1];
    let mut end = layers;
    for start in (0..layers).rev() {
        while sums[end] - sums[start] > bound {
            end -= 1;
        }
        needed[start] = 1 + needed[end];
    }
    needed
}

/// Returns the first layer of the stage that follows the one at `start`. `later` stages follow the one at
/// `start`.
fn next_start(sums: &[u128], bound: u128, needed: &[usize], start: usize, later: usize) -> usize {
    let layers = sums.len() - 1;
    let stages = later as u128 + 1;
    let fits = |&end: &usize| sums[end] - sums[start] <= bound;
    let candidates = (start + 1..=layers - later).take_while(fits).filter(|&end| needed[end] <= later);
    // Distances to the shares, multiplied by the number of stages so that they stay integers.
    let distance = |end: &usize| {
        let by_weight = ((sums[*end] - sums[start]) * stages).abs_diff(sums[layers] - sums[start]);
        let by_layers = ((*end - start) * (later + 1)).abs_diff(layers - start);
        (by_weight, by_layers, std::cmp::Reverse(*end))
    };
    candidates.min_by_key(distance).expect("the bound leaves every stage at least one choice")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn check(weights: &[u64], stages: usize, expected: &[u128]) {
        assert_eq!(cut(weights, stages).weights(weights), expected);
    }

    /// The weight of the heaviest stage in the best cut, found by trying every cut.
    fn by_trying(weights: &[u64], stages: usize) -> u128 {
        let total = weights.iter().map(|&weight| u128::from(weight)).sum();
        if stages == 1 {
            return total;
        }
        let cuts = 1..=weights.len() - (stages - 1);
        let heaviest = |end: usize| by_trying(&weights[..end], 1).max(by_trying(&weights[end..], stages - 1));
        cuts.map(heaviest).min().expect("there are at least as many layers as stages")
    }

    #[test]
    fn the_heaviest_stage_is_as_light_as_can_be() {
        check(&[5, 5, 6, 6], 3, &[10, 6, 6]);
        check(&[1, 1, 1, 1, 6], 2, &[4, 6]);
        check(&[6, 1, 1, 1, 1], 2, &[6, 4]);
        check(&[u64::MAX, u64::MAX, 1], 2, &[u128::from(u64::MAX), u128::from(u64::MAX) + 1]);
    }

    #[test]
    fn equal_layers_are_cut_evenly() {
        check(&[1; 8], 4, &[2, 2, 2, 2]);
        check(&[1; 7], 3, &[2, 3, 2]);
        check(&[0; 6], 3, &[0, 0, 0]);
        assert_eq!(cut(&[0; 6], 3).ranges().map(|range| range.len()).collect::<Vec<_>>(), [2, 2, 2]);
    }

    proptest! {
        #[test]
        fn no_cut_is_better(weights in prop::collection::vec(0..20u64, 1..9), stages in 1..9usize) {
            prop_assume!(stages <= weights.len());
            let found = cut(&weights, stages);
            prop_assert_eq!(found.stages() as usize, stages);
            prop_assert_eq!(found.weights(&weights).into_iter().max(), Some(by_trying(&weights, stages)));
        }
    }
}
