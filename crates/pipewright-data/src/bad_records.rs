//! Records that cannot be used: how many are left out, and when they are an error.

use std::fmt;

use serde::Serialize;

use crate::error::{DataError, DataErrorKind};

/// The records that are left out because they cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BadRecords {
    /// Their number.
    pub count: u64,
    /// The place of the first of them, and why it cannot be used.
    pub first: String,
}

impl fmt::Display for BadRecords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.count {
            1 => f.write_str("1 record cannot be used and is left out: ")?,
            count => write!(f, "{count} records cannot be used and are left out; the first of them: ")?,
        }
        f.write_str(&self.first)
    }
}

/// Counts the records that are left out.
#[derive(Debug)]
pub(crate) struct LeftOut {
    most: u64,
    count: u64,
    first: Option<DataError>,
}

impl LeftOut {
    /// Leaves out at most `most` records.
    pub(crate) fn at_most(most: u64) -> Self {
        Self { most, count: 0, first: None }
    }

    /// Leaves out the record with this error.
    ///
    /// # Errors
    /// When the error is of another kind, or there are too many such records.
    pub(crate) fn leave_out(&mut self, error: DataError) -> Result<(), DataError> {
        if error.kind != DataErrorKind::BadRecord {
            return Err(error);
        }
        self.count += 1;
        let (count, most) = (self.count, self.most);
        if count <= most {
            self.first.get_or_insert(error);
            return Ok(());
        }
        Err(match self.first.take() {
            None => error,
            Some(first) => first.and(&format!(
                "this is the first of {count} records that cannot be used, and `bad_records` in [data] leaves out at most {most}"
            )),
        })
    }

    /// Returns the records that are left out, if there are any. `is_used` says whether other data is left.
    ///
    /// # Errors
    /// When nothing is left.
    pub(crate) fn finish(self, is_used: bool) -> Result<Option<BadRecords>, DataError> {
        match self.first {
            Some(first) if !is_used && self.count > 1 => {
                Err(first.and(&format!("none of the {} records can be used", self.count)))
            }
            Some(first) if !is_used => Err(first),
            first => Ok(first.map(|first| BadRecords { count: self.count, first: first.to_string() })),
        }
    }
}
