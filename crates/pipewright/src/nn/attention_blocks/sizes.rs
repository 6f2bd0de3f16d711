//! The sizes of the blocks of an attention, which bound its temporary memory.

use pipewright_kernel::attention::Dims;

/// The most scores of a block, of all its heads, unless a query of one key head has more. A pass holds up to
/// five numbers for each score of a block.
const SCORES: usize = 1 << 22;
/// The fewest queries of a block, if a row has as many and one key head fits: with fewer of them, products
/// take longer.
const QUERIES: usize = 64;

/// The most rows, key heads and queries of a block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct BlockSizes {
    pub(crate) rows: usize,
    pub(crate) kv_heads: usize,
    pub(crate) queries: usize,
}

impl BlockSizes {
    /// Returns the sizes for an attention whose biases depend on this number of relations. A relation has a
    /// flag for each query and key of a row, which takes as much memory as a score.
    pub(crate) fn new(dims: Dims, relations: usize) -> Self {
        let Dims { batch, sequence, earlier, heads, kv_heads, .. } = dims;
        let keys = earlier + sequence;
        let shared = heads / kv_heads;
        let row_of_scores =
            |rows: usize, kv_heads: usize| (rows * (kv_heads * shared + relations) * keys).max(1);
        let fits =
            |rows: usize, kv_heads: usize| row_of_scores(rows, kv_heads) * QUERIES.min(sequence) <= SCORES;
        let rows = (1..=batch).rev().find(|&rows| fits(rows, kv_heads)).unwrap_or(1);
        let kv_heads = (1..=kv_heads).rev().find(|&kv_heads| fits(rows, kv_heads)).unwrap_or(1);
        Self { rows, kv_heads, queries: (SCORES / row_of_scores(rows, kv_heads)).clamp(1, sequence.max(1)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_heads_are_cut_before_blocks_have_few_queries() {
        let check = |[batch, sequence, heads, kv_heads]: [usize; 4], relations, expected: [usize; 3]| {
            let dims = Dims { batch, sequence, earlier: 0, heads, kv_heads, head_dim: 2, value_dim: 2 };
            let BlockSizes { rows, kv_heads, queries } = BlockSizes::new(dims, relations);
            assert_eq!([rows, kv_heads, queries], expected, "{dims:?}");
            let numbers = rows * (kv_heads * (heads / dims.kv_heads) + relations) * queries * sequence;
            assert!(numbers <= SCORES || queries == 1, "{numbers}");
        };
        check([1, 8, 1, 1], 0, [1, 1, 8]);
        check([1, 1024, 16, 8], 0, [1, 8, 256]);
        check([4, 1024, 16, 8], 0, [4, 8, 64]);
        check([5, 1024, 16, 8], 0, [4, 8, 64]);
        check([4, 8192, 32, 8], 0, [1, 2, 64]);
        check([4, 8192, 32, 1], 0, [1, 1, 16]);
        check([4, 1024, 16, 8], 16, [2, 8, 64]);
        check([1, 1 << 23, 1, 1], 0, [1, 1, 1]);
    }
}
