//! Records for preference training: pairs of a chosen and a rejected completion, or completions with a label.

use serde::{Deserialize, Serialize};

/// The form of the records of preference training. A record is two sequences, each at most half a row long, which
/// are neighbouring documents of one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PreferenceData {
    /// The sequence of the chosen completion, and the sequence of the rejected one.
    Pairs {
        /// Whether all tokens of the chosen sequence have targets, and not its completion alone.
        whole_chosen: bool,
    },
    /// Both sequences of a pair, which are scored at their last tokens. All tokens of a sequence are inputs.
    Scored,
    /// A completion with a label, and its prompt with another completion: the one of the record before, or of the
    /// last record of the block for the first one.
    Unpaired {
        /// The number of successive records that exchange their completions.
        block: u32,
    },
}

/// The side input with the role of each token of a batch in preference training: the [`Role`] of its sequence if
/// its target belongs to the completion, the negative of that number if not, and 0 for tokens that only fill a row.
pub const ROLES: &str = "sequence_roles";
/// The side input with the number of each token's sequence among the sequences of the data, counted from 1, and 0
/// for tokens that only fill a row. In [`PreferenceData::Scored`], it has the bits of the margin of the sequence's record.
pub const SEQUENCES: &str = "sequence_numbers";

/// The place of a sequence in preference training.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Chosen, or with a label that says that it is desirable.
    Chosen = 1,
    /// Rejected, or with a label that says that it is not desirable.
    Rejected = 2,
    /// A prompt with the completion of another record.
    Mismatched = 3,
}

/// The role and the number of a sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sequence {
    pub(crate) role: Role,
    /// Counted from 1; or the bits of the margin of its record.
    pub(crate) number: u32,
    /// Whether all of its tokens have targets.
    pub(crate) is_whole: bool,
}
