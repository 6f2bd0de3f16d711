//! Optimal: the smallest possible weight of the heaviest stage, exactly.
//!
//! The pipeline's pace is that of its heaviest stage. The smallest bound under which the layers fit into the
//! stages is found by bisection: filling each stage as far as the bound allows needs the fewest stages.
//!
//! Many cuts may reach that bound. Among them, each stage in turn takes the number of layers that brings its
//! weight nearest to its share, the weight that is left divided by the stages that are left, without costing
//! the later stages the bound; of equally near ones the number nearest to its share of the layers, then the
//! larger. Time `n log w` for `n` layers of total weight `w`.

use crate::partition::stages::Partition;

/// Cuts layers with these weights into `stages` stages, of which there are at least one and at most the
/// layers.
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

/// `sums[i]` is the weight of the layers before `i`.
fn running_sums(weights: &[u64]) -> Vec<u128> {
    let mut sums = vec![0];
    sums.extend(weights.iter().scan(0u128, |sum, &weight| {
        *sum += u128::from(weight);
        Some(*sum)
    }));
    sums
}

/// The smallest weight that no stage need exceed.
fn smallest_bound(weights: &[u64], sums: &[u128], stages: usize) -> u128 {
    let mut low = weights.iter().copied().max().map_or(0, u128::from);
    let mut high = sums[weights.len()];
    while low < high {
        let middle = low + (high - low) / 2;
        // Fewer stages than wanted are fine: cutting a stage in two never makes one heavier.
        if stages_needed(sums, middle)[0] <= stages {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    low
}

/// For each layer, the fewest stages of at most `bound` that hold it and the layers behind it. No layer alone
/// exceeds `bound`.
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

/// Where the stage behind the one at `start` begins, with `later` stages to come.
fn next_start(sums: &[u128], bound: u128, needed: &[usize], start: usize, later: usize) -> usize {
    let layers = sums.len() - 1;
    let stages = later as u128 + 1;
    let fits = |&end: &usize| sums[end] - sums[start] <= bound;
    let candidates = (start + 1..=layers - later).take_while(fits).filter(|&end| needed[end] <= later);
    // Distances to the shares, multiplied by the number of stages to stay whole.
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

    /// The smallest largest stage, by trying every cut.
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
