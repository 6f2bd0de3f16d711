//! The selective scan of Mamba-2 (Dao and Gu, 2024), in chunks, as matrix products.
//!
//! A head has a state `S` `[head_dim, state]`, zero at the beginning of a sequence and of a document:
//!
//! ```text
//! S_t = exp(δ_t A) S_(t-1) + δ_t x_t b_tᵀ        y_t = S_t c_t + D x_t
//! ```
//!
//! Neighbouring heads form a group, which shares `b` and `c`. With the running sum `s_t` of `δ A` in a chunk,
//!
//! ```text
//! y_t    = sum_(r <= t) exp(s_t - s_r) (c_t b_r) δ_r x_r + exp(s_t) S_in c_t + D x_t
//! S_out  = exp(s_end) S_in + sum_r exp(s_end - s_r) δ_r x_r b_rᵀ
//! ```
//!
//! so only the states at the edges of chunks are computed one after the other. States are stored as
//! `[state, heads of the group * head_dim]`: one product serves all heads of a group.

mod decays;
mod steps;
mod forward;
mod backward;

#[cfg(test)]
mod tests;

use self::decays::Heads;
use super::product::Matrix;

pub use backward::backward;
pub use forward::forward;
pub use steps::{Steps, steps, steps_backward};

/// Tokens in a chunk. Smaller chunks waste less work above the diagonal; larger ones make longer products.
const CHUNK: usize = 64;

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

    fn group_heads(self) -> usize {
        self.heads / self.groups
    }

    fn group_width(self) -> usize {
        self.group_heads() * self.head_dim
    }

    /// Places in a row of [`Inputs::u`].
    fn x(self, group: usize) -> usize {
        group * self.group_width()
    }

    fn b(self, group: usize) -> usize {
        self.width() + group * self.state
    }

    fn c(self, group: usize) -> usize {
        self.b(group) + self.groups * self.state
    }

    /// Returns the rows and heads of a chunk of a group.
    fn heads_of(self, chunk: Chunk) -> Heads {
        Heads { heads: self.group_heads(), head_dim: self.head_dim, len: chunk.len }
    }

    /// Returns every (sequence, group).
    fn parts(self) -> impl Iterator<Item = (usize, usize)> {
        (0..self.batch).flat_map(move |batch| (0..self.groups).map(move |group| (batch, group)))
    }

    /// Returns the chunks of a sequence.
    fn chunks(self, batch: usize) -> impl DoubleEndedIterator<Item = Chunk> {
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
struct Chunk {
    /// Its place among the chunks of the sequence.
    index: usize,
    /// Its first row among all rows.
    first: usize,
    len: usize,
    is_last: bool,
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
    fn directions(&self, group: usize, chunk: Chunk) -> [Matrix<'a>; 2] {
        let dims = self.dims;
        let row = chunk.first * dims.channels();
        [dims.b(group), dims.c(group)]
            .map(|column| Matrix::strided(&self.u[row + column..], chunk.len, dims.state, dims.channels()))
    }
}
