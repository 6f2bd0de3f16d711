//! The position in the training data.

use serde::{Deserialize, Serialize};

/// The position in the training data: the next row. Resuming needs only the cursor, the data and the seed.
/// The position in a mixture is the number of rows that all sources have given, in `index`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// The number of complete passes over the data.
    pub epoch: u64,
    /// The position in the epoch's order, counted from 0; the number of rows at an epoch's very end.
    pub index: u64,
}
