//! Rows of token ids for one step, as plain numbers.

use crate::side::SideTensor;

/// Rows for one step: the inputs of the model and their targets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenBatch {
    /// Token ids of shape `[rows, seq_len]`, row by row.
    pub inputs: Vec<i32>,
    /// The successor of each input, of the same shape; of chats and completions
    /// [`IGNORED_TARGET`](crate::IGNORED_TARGET) where it does not count in the loss.
    pub targets: Vec<i32>,
    /// The number of rows.
    pub rows: usize,
    /// Tokens per row.
    pub seq_len: usize,
    /// The side inputs of the rows.
    pub side: Vec<SideTensor>,
}
