//! The settings of a data source.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::documents::Documents;
use crate::settings::chat_template::ChatTemplate;
use crate::settings::date::Date;
use crate::settings::mix::MixSource;
use crate::settings::preference::PreferenceData;
use crate::settings::record::RecordKeys;
use crate::settings::train_on::{LongRecords, TrainOn};

/// The settings of a data source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataConfig {
    /// Files by name or glob pattern. The name and the content of a file together say what it is:
    ///
    /// - text in UTF-8;
    /// - `*.jsonl` with a record per line ([`RecordKeys`]): texts, chats, completions, instructions or questions;
    ///   or with arrays of `seq_len + 1` token ids, which are rows;
    /// - `*.json` with one list of such records;
    /// - `*.parquet` with such records;
    /// - `*.bin` with the token ids of nanoGPT (16 bits, no header), llm.c, or Megatron (with an `*.idx`);
    /// - a `*.pwtok` as the only file, which [`DataConfig::tokenize`] makes of such files.
    ///
    /// All files but the last kind may be compressed; their names then end in `.gz` or `.zst`. Anything else
    /// is an error.
    ///
    /// `**` crosses folders, `*`, `?`, `[ab]` and `{a,b}` do not, and `!` in front of a pattern excludes its
    /// matches. A pattern skips what version control would skip: hidden files and folders, and what a
    /// `.gitignore` at or below the pattern's fixed part lists, unless the fixed part names them. Links are
    /// not followed below the fixed part. A relative pattern starts at the working folder of the process.
    /// Files are read in the order of their paths, each once.
    pub path: Vec<String>,
    /// The sources of a mixture, in place of `path`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mix: Vec<MixSource>,
    /// How text becomes token ids.
    pub tokenizer: Tokenizer,
    /// Tokens per row that the model receives; the row itself has one more.
    pub seq_len: usize,
    /// Whether each epoch has its own order of rows, drawn from `seed` and the epoch's number alone.
    pub shuffle: bool,
    /// The seed of the order.
    pub seed: u64,
    /// Where documents begin, and whether a token sees other documents in its row; `None` if rows are not
    /// divided into documents.
    pub documents: Option<Documents>,
    /// The names of the keys of records.
    #[serde(default)]
    pub keys: RecordKeys,
    /// The template of chats; `None` for the one next to the tokenizer.
    #[serde(default)]
    pub chat_template: Option<ChatTemplate>,
    /// Further variables of the chat template, such as `enable_thinking`.
    #[serde(default)]
    pub chat_template_kwargs: BTreeMap<String, serde_json::Value>,
    /// The tokens of chats and completions that count in the loss. By default, the answers of chats and the
    /// completions.
    #[serde(default)]
    pub train_on: Option<TrainOn>,
    /// The treatment of chats and completions that do not fit into a row.
    #[serde(default)]
    pub long_records: LongRecords,
    /// The most records of each source that are left out because they cannot be used; 0 refuses the first.
    #[serde(default)]
    pub bad_records: u64,
    /// Whether several chats or completions share a row, without seeing each other.
    #[serde(default)]
    pub packs_examples: bool,
    /// The date that chat templates ask for.
    #[serde(default)]
    pub date: Option<Date>,
    /// The form of the records of preference training; `None` for other training.
    #[serde(default)]
    pub preference: Option<PreferenceData>,
    /// The names of the labels of texts and chats, which are their only targets; none for other training.
    #[serde(default)]
    pub labels: Vec<String>,
}

impl Default for DataConfig {
    /// Bytes in rows of 256 tokens, shuffled with the seed 0. The list of files is empty, and bad records are errors.
    fn default() -> Self {
        Self {
            path: Vec::new(),
            mix: Vec::new(),
            tokenizer: Tokenizer::Bytes,
            seq_len: 256,
            shuffle: true,
            seed: 0,
            documents: None,
            keys: RecordKeys::default(),
            chat_template: None,
            chat_template_kwargs: BTreeMap::new(),
            train_on: None,
            long_records: LongRecords::default(),
            bad_records: 0,
            packs_examples: false,
            date: None,
            preference: None,
            labels: Vec::new(),
        }
    }
}

impl DataConfig {
    /// Returns the most tokens of a record's sequence that a row takes.
    pub(crate) fn sequence_len(&self) -> usize {
        if self.preference.is_some() { self.seq_len / 2 } else { self.seq_len }
    }

    /// Returns whether sequences have a score or a label at their last token. An id behind the sequence, which is its label or
    /// 0, is the target of that token.
    pub fn scores_sequences(&self) -> bool {
        !self.labels.is_empty() || self.preference == Some(PreferenceData::Scored)
    }

    /// Returns the most ids of a sequence in a file that are used. Without scores, the last one is a target only.
    pub(crate) fn longest(&self) -> usize {
        self.sequence_len() + usize::from(!self.scores_sequences())
    }

    /// Returns the name of the training if it takes records only.
    pub(crate) fn needs_records(&self) -> Option<&'static str> {
        match self.preference {
            Some(_) => Some("preference training"),
            None => (!self.labels.is_empty()).then_some("training on labels"),
        }
    }
}

/// How text becomes token ids.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Tokenizer {
    /// Each byte is a token, with ids from 0 to 255.
    Bytes,
    /// A `tokenizer.json`; needs the feature `tokenizers`.
    File(PathBuf),
    /// A `tokenizer.json` with further special tokens, which get the next ids.
    Extended(PathBuf, Vec<String>),
}

impl Tokenizer {
    /// Returns the file; `None` if bytes are tokens.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Self::Bytes => None,
            Self::File(file) | Self::Extended(file, _) => Some(file),
        }
    }
}
