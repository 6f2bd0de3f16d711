//! The settings of a data source.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::train::data::documents::Documents;

/// The settings of a data source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataConfig {
    /// Files by name or glob pattern: UTF-8 text files, or one file `*.jsonl` whose lines are arrays of
    /// `seq_len + 1` token ids.
    ///
    /// `**` crosses folders, `*`, `?`, `[ab]` and `{a,b}` do not, and `!` in front of a pattern excludes its
    /// matches. A pattern skips what version control would skip: hidden files and folders, and what a
    /// `.gitignore` at or below the pattern's fixed part lists, unless the fixed part names them. Links are
    /// not followed below the fixed part. A relative pattern starts at the working folder of the process.
    /// Files are read in the order of their paths, each once.
    pub path: Vec<String>,
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
}

/// How text becomes token ids.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Tokenizer {
    /// Each byte is a token, with ids from 0 to 255.
    Bytes,
    /// A `tokenizer.json`; needs the feature `tokenizers`.
    File(PathBuf),
}
