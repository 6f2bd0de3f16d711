//! A block of queries.

use std::ops::Range;

use super::inputs::Inputs;

/// A block of queries, with the keys `low..end` that its scores are of.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) first: usize,
    pub(super) count: usize,
    /// The keys of the sequence before the key of its first query.
    pub(super) earlier: usize,
    pub(super) low: usize,
    pub(super) end: usize,
    /// The first key of each query of the block.
    pub(super) starts: Option<&'a [u32]>,
}

impl<'a> Rows<'a> {
    pub(super) fn new<T>(inputs: &Inputs<'a, T>, batch: usize, queries: Range<usize>) -> Self {
        let starts = inputs.starts.map(|starts| &starts[batch * inputs.dims.sequence..][queries.clone()]);
        let low = starts.map_or(0, |starts| starts[0] as usize);
        let earlier = inputs.dims.earlier;
        Self { first: queries.start, count: queries.len(), earlier, low, end: earlier + queries.end, starts }
    }

    pub(super) fn span(self) -> usize {
        self.end - self.low
    }

    /// Splits a row into three parts: the keys that the query sees, and the keys before and after them.
    #[inline(always)]
    pub(super) fn split(self, row: usize, scores: &mut [f32]) -> [&mut [f32]; 3] {
        let start = self.starts.map_or(0, |starts| starts[row] as usize - self.low);
        let (before, rest) = scores.split_at_mut(start);
        let (seen, after) = rest.split_at_mut(self.earlier + self.first + row + 1 - self.low - start);
        [before, seen, after]
    }
}
