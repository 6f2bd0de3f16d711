//! Where a row is, and how rows are got from the process that has them.

use std::fmt;

use crate::batch::TokenBatch;
use crate::error::DataError;

/// A row: the index of its source in [`TokenRows::mixture`](crate::TokenRows::mixture), and its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowPlace {
    pub(crate) source: usize,
    pub(crate) row: usize,
}

impl RowPlace {
    /// Returns the place of row `row` of a source.
    pub fn new(source: usize, row: usize) -> Self {
        Self { source, row }
    }

    /// Returns the index of the row's source; 0 without a mixture.
    pub fn source(&self) -> usize {
        self.source
    }

    /// Returns the number of the row in its source.
    pub fn row(&self) -> usize {
        self.row
    }
}

/// Gets rows from the process that has them.
pub trait RowReader: fmt::Debug + Send + Sync {
    /// Returns the rows at `places`. The rows at `next` are probably the next ones, so they can be requested early.
    ///
    /// # Errors
    /// When the other process does not send the rows.
    fn batch(&self, places: &[RowPlace], next: &[RowPlace]) -> Result<TokenBatch, DataError>;
}
