//! Documents in rows of tokens: where they begin, and the side inputs that keep them apart.

use serde::{Deserialize, Serialize};

/// The side input with the document of each token.
pub const DOCUMENTS: &str = "doc_ids";
/// The side input with the position of each token.
pub const POSITIONS: &str = "position_ids";

/// The side input with the number of tokens of each row that do not only fill it.
pub const VALID_TOKENS: &str = "row_valid_token_counts";

/// Documents in rows of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Documents {
    /// The token id that begins a document. It is put before the text of each file. A `.jsonl` file of token
    /// ids contains it already.
    pub bos_id: u32,
    /// Whether a token sees nothing of the other documents in its row. Batches then have the side input
    /// [`DOCUMENTS`].
    pub packed: bool,
    /// Whether positions begin again at 0 in each document, if tokens see nothing of the others. Batches then
    /// have the side input [`POSITIONS`].
    pub restart_positions: bool,
}

/// The side inputs that are made from the token ids of rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MadeSides {
    /// [`VALID_TOKENS`].
    pub(crate) valid: bool,
    /// [`DOCUMENTS`].
    pub(crate) documents: bool,
    /// [`POSITIONS`].
    pub(crate) positions: bool,
    /// The roles and the numbers of sequences.
    #[serde(default)]
    pub(crate) roles: bool,
}

impl MadeSides {
    /// Returns the side inputs of a batch in which some rows have these and others have `other`.
    pub(crate) fn or(self, other: Self) -> Self {
        Self {
            valid: self.valid || other.valid,
            documents: self.documents || other.documents,
            positions: self.positions || other.positions,
            roles: self.roles || other.roles,
        }
    }
}

impl Documents {
    /// Returns the side inputs of rows with these documents.
    pub(crate) fn sides(&self) -> MadeSides {
        MadeSides {
            documents: self.packed,
            positions: self.packed && self.restart_positions,
            ..MadeSides::default()
        }
    }

    /// Returns whether a document begins with this id, which belongs to it.
    pub(crate) fn begins(&self, id: i32) -> bool {
        u32::try_from(id) == Ok(self.bos_id)
    }
}
