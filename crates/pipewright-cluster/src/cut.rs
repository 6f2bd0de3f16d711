//! How blocks are divided among the stages of a pipeline.

use std::ops::Range;

use pipewright_schedule::{Method, partition};

/// Returns the blocks of each stage, with equal numbers.
///
/// If the stages divide the blocks, each has as many. Otherwise the embedding and the head count as a block
/// each, as in torchtitan, so that the first and the last stage have fewer blocks, and earlier stages have the
/// rest.
pub(crate) fn even(blocks: usize, stages: usize) -> Vec<Range<usize>> {
    let stages = stages.max(1);
    if blocks.is_multiple_of(stages) {
        let each = blocks / stages;
        return (0..stages).map(|stage| stage * each..(stage + 1) * each).collect();
    }
    cut(&vec![1; blocks + 2], stages, &Method::Even)
}

/// Returns the blocks of each stage such that the stage that takes longest is as short as possible.
///
/// `seconds` has the seconds of the embedding, of each block and of the head on each kind of machine, and
/// `kind_of_stage` the index of each stage's kind. The first stage has the embedding and the last one the head, in
/// addition to their blocks; they may have no block.
pub(crate) fn balanced(seconds: &[Vec<f64>], kind_of_stage: &[usize]) -> Vec<Range<usize>> {
    // The library cuts whole numbers. A picosecond is small against any block.
    let weights = |seconds: &Vec<f64>| seconds.iter().map(|seconds| (seconds * 1e12) as u64).collect();
    let weights: Vec<Vec<u64>> = seconds.iter().map(weights).collect();
    if kind_of_stage.iter().all(|&kind| weights[kind] == weights[0]) {
        return cut(&weights[0], kind_of_stage.len(), &Method::Optimal);
    }
    let starts = starts_on_kinds(&weights, kind_of_stage);
    let parts = weights[0].len();
    let ends = starts.iter().skip(1).copied().chain([parts]);
    starts.iter().zip(ends).map(|(&start, end)| block(start, parts)..block(end, parts)).collect()
}

/// Returns the first part of each stage. Bisection finds the smallest bound on the weight of a stage under which the
/// parts fit, with at least one part for each stage. Several cuts may reach the bound; each stage then takes the
/// number of parts that brings its weight nearest to its share, the weight with which all later stages and this one
/// would end at the same time.
fn starts_on_kinds(weights: &[Vec<u64>], kind_of_stage: &[usize]) -> Vec<usize> {
    let parts = weights[0].len();
    let running = |weights: &Vec<u64>| {
        let sums = weights.iter().scan(0, |sum, &weight| {
            *sum += u128::from(weight);
            Some(*sum)
        });
        std::iter::once(0).chain(sums).collect()
    };
    let sums: Vec<Vec<u128>> = weights.iter().map(running).collect();
    let (mut low, mut high) = (0, sums.iter().map(|sums| sums[parts]).max().unwrap_or(0));
    while low < high {
        let middle = low + (high - low) / 2;
        if fitting_starts(&sums, kind_of_stage, middle)[0][0] {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    let fits = fitting_starts(&sums, kind_of_stage, high);
    let mut starts = vec![0];
    for (stage, &kind) in kind_of_stage.iter().enumerate().take(kind_of_stage.len() - 1) {
        let start = starts[stage];
        let left = |kind: usize| (sums[kind][parts] - sums[kind][start]) as f64;
        let share = 1.0 / kind_of_stage[stage..].iter().map(|&kind| 1.0 / left(kind)).sum::<f64>();
        let weight = |end: usize| sums[kind][end] - sums[kind][start];
        let ends = (start + 1..=parts).filter(|&end| weight(end) <= high && fits[stage + 1][end]);
        let distance = |&end: &usize| (weight(end) as f64 - share).abs();
        let nearest = ends.min_by(|one, other| distance(one).total_cmp(&distance(other)));
        starts.push(nearest.unwrap_or(start));
    }
    starts
}

/// Returns, for each stage and each part, whether the stage and all later ones can have the part and all later parts
/// with weights of at most `bound`.
fn fitting_starts(sums: &[Vec<u128>], kind_of_stage: &[usize], bound: u128) -> Vec<Vec<bool>> {
    let parts = sums[0].len() - 1;
    let mut later = vec![false; parts + 1];
    later[parts] = true;
    let mut fits = vec![later];
    for &kind in kind_of_stage.iter().rev() {
        let (sums, later) = (&sums[kind], &fits[fits.len() - 1]);
        let can_start = |start: usize| {
            let ends = (start + 1..=parts).take_while(|&end| sums[end] - sums[start] <= bound);
            ends.into_iter().any(|end| later[end])
        };
        fits.push((0..=parts).map(can_start).collect());
    }
    fits.reverse();
    fits
}

/// Returns the block of a part: the first part is the embedding, and the last one the head.
fn block(part: usize, parts: usize) -> usize {
    part.saturating_sub(1).min(parts - 2)
}

/// Returns the blocks of each stage for the weights of the embedding, of each block and of the head. A layout
/// has at most as many stages as there are weights.
fn cut(weights: &[u64], stages: usize, method: &Method) -> Vec<Range<usize>> {
    let stages = stages.clamp(1, weights.len());
    let cut = partition(weights, stages as u32, method).expect("there is a weight for each stage");
    let parts = weights.len();
    cut.ranges().map(|range| block(range.start, parts)..block(range.end, parts)).collect()
}

#[cfg(test)]
mod tests {
    use super::{balanced, even};

    fn sizes(blocks: usize, stages: usize) -> Vec<usize> {
        even(blocks, stages).into_iter().map(|range| range.len()).collect()
    }

    /// The seconds of an embedding, of eight blocks and of a head.
    fn parts(block: f64, head: f64) -> Vec<f64> {
        [0.0].into_iter().chain([block; 8]).chain([head]).collect()
    }

    fn balanced_sizes(seconds: &[Vec<f64>], kind_of_stage: &[usize]) -> Vec<usize> {
        balanced(seconds, kind_of_stage).into_iter().map(|range| range.len()).collect()
    }

    #[test]
    fn a_stage_on_a_slow_kind_has_fewer_blocks() {
        let cut = |slow, kinds: &[usize]| balanced_sizes(&[parts(1.0, 0.0), parts(slow, 0.0)], kinds);
        assert_eq!(cut(3.0, &[0, 1]), [6, 2]);
        assert_eq!(cut(3.0, &[1, 0]), [2, 6]);
        assert_eq!(cut(3.0, &[0, 0, 1, 1]), [3, 3, 1, 1]);
        assert_eq!(cut(100.0, &[0, 1]), [8, 0]);
        assert_eq!(cut(1.0, &[0, 1, 0, 1]), [2, 2, 2, 2]);
        // A picosecond of difference leaves the cut.
        assert_eq!(cut(1.0 + 2e-12, &[0, 1, 0, 1]), [2, 2, 2, 2]);
    }

    /// Compares the slowest stage with the slowest stage of each other cut.
    #[test]
    fn no_other_cut_on_two_kinds_is_faster() {
        let kinds = [0, 1, 1];
        for seed in 1..40_u64 {
            let seconds =
                |kind: u64| (0..8).map(|part| ((seed * 7 + part * kind * 5) % 11 + kind) as f64).collect();
            let seconds: [Vec<f64>; 2] = [seconds(1), seconds(3)];
            let slowest = |bounds: [usize; 4]| {
                let stage = |stage: usize| {
                    seconds[kinds[stage]][bounds[stage]..bounds[stage + 1]].iter().sum::<f64>()
                };
                (0..3).map(stage).fold(0.0, f64::max)
            };
            let all = (1..7).flat_map(|one| (one + 1..8).map(move |other| [0, one, other, 8]));
            let best = all.map(slowest).fold(f64::INFINITY, f64::min);
            let weights = seconds.clone().map(|own| own.into_iter().map(|part| part as u64).collect());
            let starts = super::starts_on_kinds(&weights, &kinds);
            assert_eq!(slowest([starts[0], starts[1], starts[2], 8]), best, "{seconds:?}");
        }
    }

    #[test]
    fn a_slow_head_has_fewer_blocks_before_it() {
        let cut = |head| balanced_sizes(&[parts(1.0, head)], &[0; 4]);
        assert_eq!(cut(0.0), [2, 2, 2, 2]);
        assert_eq!(cut(2.0), [2, 3, 2, 1]);
        assert_eq!(cut(9.0)[3], 0);
    }

    #[test]
    fn even_where_the_stages_divide_the_blocks() {
        assert_eq!(sizes(8, 4), [2, 2, 2, 2]);
    }

    #[test]
    fn embedding_and_head_count_as_blocks_otherwise() {
        assert_eq!(sizes(126, 8), [15, 16, 16, 16, 16, 16, 16, 15]);
        assert_eq!(sizes(7, 3), [2, 3, 2]);
    }
}
