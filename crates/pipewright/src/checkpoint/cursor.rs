//! The position in the training data, which a checkpoint stores.

use serde::{Deserialize, Serialize};

/// The place of the row that comes next. Together with the data and the seed it is all that resuming needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// How often all rows have been dealt out.
    pub epoch: u64,
    /// The place in the epoch's order, counted from 0; the number of rows at an epoch's very end.
    pub index: u64,
}
