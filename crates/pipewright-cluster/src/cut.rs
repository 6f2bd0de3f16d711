//! How blocks are divided among the stages of a pipeline.

use std::ops::Range;

/// Returns the blocks of each stage.
///
/// If the stages divide the blocks, each has as many. Otherwise the embedding and the head count as a block
/// each, as in torchtitan, so that the first and the last stage have fewer blocks, and earlier stages have the
/// rest.
pub fn cut(blocks: usize, stages: usize) -> Vec<Range<usize>> {
    let stages = stages.max(1);
    if blocks.is_multiple_of(stages) {
        let each = blocks / stages;
        return (0..stages).map(|stage| stage * each..(stage + 1) * each).collect();
    }
    let units = blocks + 2;
    let (each, rest) = (units / stages, units % stages);
    let mut start = 0;
    let mut ranges = Vec::with_capacity(stages);
    for stage in 0..stages {
        let size = each + usize::from(stage < rest);
        let blocks_before = |units: usize| units.saturating_sub(1).min(blocks);
        ranges.push(blocks_before(start)..blocks_before(start + size));
        start += size;
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::cut;

    fn sizes(blocks: usize, stages: usize) -> Vec<usize> {
        cut(blocks, stages).into_iter().map(|range| range.len()).collect()
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
