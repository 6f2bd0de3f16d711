//! The inputs of an attention and their sizes.

use std::ops::Range;

use super::super::rotary::Rotary;

/// Rows of queries in a block. Smaller blocks waste less work above the diagonal; larger ones make longer
/// products.
const CHUNK: usize = 64;

/// Sizes of an attention. `q` is `[batch * sequence, heads * head_dim]`, and the result
/// `[batch * sequence, heads * value_dim]`. `k` is `[batch * (earlier + sequence), kv_heads * head_dim]`, and
/// `v` has `value_dim` instead of `head_dim`. Each key head serves `heads / kv_heads` neighbouring query
/// heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    /// Sequences.
    pub batch: usize,
    /// Queries of a sequence.
    pub sequence: usize,
    /// Keys of a sequence before the key of its first query.
    pub earlier: usize,
    /// Query heads.
    pub heads: usize,
    /// Key heads, which divide the query heads.
    pub kv_heads: usize,
    /// Elements of a head of queries and keys.
    pub head_dim: usize,
    /// Elements of a head of values.
    pub value_dim: usize,
}

impl Dims {
    pub(super) fn query_width(self) -> usize {
        self.heads * self.head_dim
    }

    pub(super) fn key_width(self) -> usize {
        self.kv_heads * self.head_dim
    }

    pub(super) fn out_width(self) -> usize {
        self.heads * self.value_dim
    }

    pub(super) fn value_width(self) -> usize {
        self.kv_heads * self.value_dim
    }

    pub(super) fn keys(self) -> usize {
        self.earlier + self.sequence
    }

    fn group(self) -> usize {
        self.heads / self.kv_heads
    }

    /// Returns every pair of a sequence of the batch and a key head.
    pub(super) fn key_heads(self) -> impl Iterator<Item = (usize, usize)> {
        (0..self.batch).flat_map(move |batch| (0..self.kv_heads).map(move |head| (batch, head)))
    }

    /// Returns the query heads that a key head serves.
    pub(super) fn query_heads(self, key_head: usize) -> Range<usize> {
        key_head * self.group()..(key_head + 1) * self.group()
    }

    /// Returns the offset of a query head.
    pub(super) fn query_start(self, batch: usize, head: usize) -> usize {
        batch * self.sequence * self.query_width() + head * self.head_dim
    }

    /// Returns the offset of a key head.
    pub(super) fn key_start(self, batch: usize, head: usize) -> usize {
        batch * self.keys() * self.key_width() + head * self.head_dim
    }

    /// Returns the offset of the result of a query head.
    pub(super) fn out_start(self, batch: usize, head: usize) -> usize {
        batch * self.sequence * self.out_width() + head * self.value_dim
    }

    /// Returns the offset of the values of a key head.
    pub(super) fn value_start(self, batch: usize, head: usize) -> usize {
        batch * self.keys() * self.value_width() + head * self.value_dim
    }

    /// Returns the queries of each block.
    pub(super) fn chunks(self) -> impl Iterator<Item = Range<usize>> {
        (0..self.sequence).step_by(CHUNK).map(move |start| start..(start + CHUNK).min(self.sequence))
    }

    /// Returns how many scores a block has at most.
    pub(super) fn most_scores(self) -> usize {
        CHUNK.min(self.sequence) * self.keys()
    }
}

/// The inputs of an attention. The operands of products have the type `T`: rotated queries and keys, weights
/// and the gradients of scores are rounded to it.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a, T = f32> {
    /// Sizes.
    pub dims: Dims,
    /// Queries, before their rotation.
    pub q: &'a [T],
    /// Keys, before their rotation.
    pub k: &'a [T],
    /// Values.
    pub v: &'a [T],
    /// For the queries; includes the scale of the scores.
    pub turn_q: Rotary<'a>,
    /// For the keys.
    pub turn_k: Rotary<'a>,
    /// The first key that each row sees, counted from the beginning of its sequence; `None` if each sees all.
    pub starts: Option<&'a [u32]>,
    /// The bound of the scores: `cap tanh(score / cap)` takes the place of a score. `None` for no bound.
    pub cap: Option<f32>,
    /// A summand of the scores, after their bound.
    pub bias: Option<Bias<'a>>,
    /// The sink of each head, `[heads]`: a further score of every row, whose value is zero. `None` without
    /// sinks.
    pub sinks: Option<&'a [f32]>,
}

/// The sum over relations of `mask[batch][relation][query][key] table[relation][head]`.
#[derive(Clone, Copy, Debug)]
pub struct Bias<'a> {
    /// How many relations there are.
    pub relations: usize,
    /// `[batch, relations, sequence, sequence]`, of 0 and 1.
    pub mask: &'a [u8],
    /// `[relations, heads]`.
    pub table: &'a [f32],
}

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
