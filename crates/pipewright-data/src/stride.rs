//! How rows are cut from the ids of a data source.

use crate::error::DataError;

/// How rows are cut from the stream of ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stride {
    /// No two rows share an id.
    Disjoint,
    /// The last id of a row is the first id of the next row.
    Overlapping,
}

impl Stride {
    /// Returns the number of ids from the start of one row to the start of the next.
    pub(crate) fn length(self, seq_len: usize) -> usize {
        match self {
            Self::Disjoint => seq_len + 1,
            Self::Overlapping => seq_len,
        }
    }

    /// Returns the number of whole rows in `ids` ids.
    pub(crate) fn rows(self, ids: usize, seq_len: usize) -> Result<u32, DataError> {
        let rows = match self {
            Self::Disjoint => ids / (seq_len + 1),
            Self::Overlapping => ids.saturating_sub(1) / seq_len.max(1),
        };
        checked_rows(rows)
    }
}

/// Returns a number of rows, if an epoch can number them.
pub(crate) fn checked_rows(rows: usize) -> Result<u32, DataError> {
    u32::try_from(rows).map_err(|_| {
        let most = u32::MAX;
        DataError::new(format!(
            "the data has {rows} rows, and at most {most} can be put in order; use a longer seq_len"
        ))
    })
}
