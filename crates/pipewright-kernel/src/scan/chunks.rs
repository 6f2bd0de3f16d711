//! The sizes and inputs of a scan, and its chunks.

use crate::product::Matrix;

/// Tokens in a chunk. Smaller chunks waste less work above the diagonal; larger ones make longer products.
pub const CHUNK: usize = 64;

/// Sizes of a scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    /// Sequences.
    pub batch: usize,
    /// Tokens of a sequence.
    pub sequence: usize,
    /// Heads, each with a decay of its own.
    pub heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Groups of heads, which share `b` and `c`.
    pub groups: usize,
    /// Elements of the state of a channel.
    pub state: usize,
}

impl Dims {
    /// Channels of all heads: the width of `x` and of the result.
    pub fn width(self) -> usize {
        self.heads * self.head_dim
    }

    /// Channels of `x`, `b` and `c` together: the width of a row of [`Inputs::u`].
    pub fn channels(self) -> usize {
        self.width() + 2 * self.groups * self.state
    }

    /// Tokens of all sequences.
    pub fn rows(self) -> usize {
        self.batch * self.sequence
    }

    pub(super) fn group_heads(self) -> usize {
        self.heads / self.groups
    }

    pub(super) fn group_width(self) -> usize {
        self.group_heads() * self.head_dim
    }

    /// Places in a row of [`Inputs::u`].
    pub(super) fn x(self, group: usize) -> usize {
        group * self.group_width()
    }

    pub(super) fn b(self, group: usize) -> usize {
        self.width() + group * self.state
    }

    pub(super) fn c(self, group: usize) -> usize {
        self.b(group) + self.groups * self.state
    }

    /// Returns the rows and heads of a chunk of a group.
    pub(super) fn heads_of(self, chunk: Chunk) -> Heads {
        Heads { heads: self.group_heads(), head_dim: self.head_dim, len: chunk.len }
    }

    /// Returns every (sequence, group).
    pub(super) fn parts(self) -> impl Iterator<Item = (usize, usize)> {
        (0..self.batch).flat_map(move |batch| (0..self.groups).map(move |group| (batch, group)))
    }

    /// Returns the chunks of a sequence.
    pub(super) fn chunks(self, batch: usize) -> impl DoubleEndedIterator<Item = Chunk> {
        let start = batch * self.sequence;
        (0..self.sequence.div_ceil(CHUNK)).map(move |index| {
            let first = index * CHUNK;
            let len = CHUNK.min(self.sequence - first);
            Chunk { index, first: start + first, len, is_last: first + len == self.sequence }
        })
    }
}

/// A run of rows of one sequence.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chunk {
    /// Its place among the chunks of the sequence.
    pub(super) index: usize,
    /// Its first row among all rows.
    pub(super) first: usize,
    pub(super) len: usize,
    pub(super) is_last: bool,
}

/// How many rows of how many heads a function works on.
#[derive(Clone, Copy)]
pub(super) struct Heads {
    pub heads: usize,
    pub head_dim: usize,
    pub len: usize,
}

/// The inputs of a scan.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Sizes.
    pub dims: Dims,
    /// Rows of `x` `[heads, head_dim]`, `b` `[groups, state]` and `c` `[groups, state]`.
    pub u: &'a [f32],
    /// `δ`, `[heads, rows]`.
    pub steps: &'a [f32],
    /// `A` of each head.
    pub rates: &'a [f32],
    /// `D` of each head.
    pub skip: &'a [f32],
    /// The document of each row; rows of one document follow each other.
    pub documents: Option<&'a [u32]>,
}

impl<'a> Inputs<'a> {
    /// Returns `b` and `c` of a chunk, `[len, state]` each.
    pub(super) fn directions(&self, group: usize, chunk: Chunk) -> [Matrix<'a>; 2] {
        let dims = self.dims;
        let row = chunk.first * dims.channels();
        [dims.b(group), dims.c(group)]
            .map(|column| Matrix::strided(&self.u[row + column..], chunk.len, dims.state, dims.channels()))
    }
}
