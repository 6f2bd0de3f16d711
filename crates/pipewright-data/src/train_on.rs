//! The tokens of chats and completions that count in the loss.

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
    /// Returns the tokens that count, in words.
    pub(crate) fn in_words(self) -> &'static str {
        match self {
            Self::All => "all tokens count",
            Self::Assistant => "the assistant's answers count",
            Self::Completion => "the completion counts",
        }
    }
}

/// The treatment of a chat or a completion with more tokens than a row takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LongRecords {
    /// It is an error.
    #[default]
    Refuse,
    /// Its end is left out.
    Cut,
    /// It is left out.
    Skip,
}
