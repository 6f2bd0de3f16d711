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

/// Returns the blocks of each stage such that the stage that takes longest is as short as possible. The
/// arguments are the seconds of the embedding, of each block and of the head. The first stage has the
/// embedding and the last one the head, in addition to their blocks; they may have no block.
pub(crate) fn balanced(embedding: f64, blocks: &[f64], head: f64, stages: usize) -> Vec<Range<usize>> {
    // The library cuts whole numbers. A picosecond is small against any block.
    let weight = |seconds: &f64| (seconds * 1e12) as u64;
    let seconds = std::iter::once(&embedding).chain(blocks).chain([&head]);
    cut(&seconds.map(weight).collect::<Vec<_>>(), stages, &Method::Optimal)
}

/// Returns the blocks of each stage for the weights of the embedding, of each block and of the head. A layout
/// has at most as many stages as there are weights.
fn cut(weights: &[u64], stages: usize, method: &Method) -> Vec<Range<usize>> {
    let block = |layer: usize| layer.saturating_sub(1).min(weights.len() - 2);
    let stages = stages.clamp(1, weights.len());
    let cut = partition(weights, stages as u32, method).expect("there is a weight for each stage");
    cut.ranges().map(|range| block(range.start)..block(range.end)).collect()
}

#[cfg(test)]
mod tests {
    use super::{balanced, even};

    fn sizes(blocks: usize, stages: usize) -> Vec<usize> {
        even(blocks, stages).into_iter().map(|range| range.len()).collect()
    }

    #[test]
    fn a_slow_head_has_fewer_blocks_before_it() {
        let cut = |head| {
            let ranges = balanced(0.0, &[1.0; 8], head, 4);
            ranges.into_iter().map(|range| range.len()).collect::<Vec<_>>()
        };
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
