//! The tokens of chats and completions that count in the loss.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The tokens of a chat or a completion that count in the loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TrainOn {
    /// All of them.
    All,
    /// The answers of the assistant, also the earlier ones.
    Assistant,
    /// The completion; of a chat, its last message.
    Completion,
}

impl TrainOn {
    /// All choices.
    pub const ALL: [Self; 3] = [Self::All, Self::Assistant, Self::Completion];

    /// Returns the value of `train_on` in a configuration.
    pub fn key(self) -> &'static str {
        match self {
            Self::All => "all",
            Self::Assistant => "assistant",
            Self::Completion => "completion",
        }
    }
}

/// The treatment of a chat or a completion with more tokens than a row takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LongRecords {
    /// It is an error.
    Refuse,
    /// Its end is left out. A record without a target in the rest cannot be used.
    #[default]
    Cut,
    /// It is left out.
    Skip,
}

/// The number of chats and completions that do not fit into a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LongRecordCount {
    /// The treatment of these records.
    pub treatment: LongRecords,
    /// The number of records that do not fit.
    pub long: u64,
    /// The number of all records.
    pub records: u64,
    /// Tokens per row that the model receives.
    pub seq_len: usize,
    /// Whether a sequence takes at most half a row, as in preference training.
    pub is_half: bool,
}

impl LongRecordCount {
    /// Returns the part of a row that a record may take, in words.
    pub(crate) fn row(&self) -> String {
        format!("{} row of seq_len {}", if self.is_half { "half a" } else { "a" }, self.seq_len)
    }
}

impl fmt::Display for LongRecordCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { treatment, long, records, .. } = self;
        let treatment = match treatment {
            LongRecords::Refuse => "refused",
            LongRecords::Cut => "cut",
            LongRecords::Skip => "skipped",
        };
        write!(f, "{long} of {records} records do not fit into {}: {treatment}", self.row())
    }
}
