//! The features that read kinds of files, and what to do in a build without them.

use std::fmt;

/// A feature of this crate, which reads a kind of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feature {
    /// A `tokenizer.json`.
    Tokenizers,
    /// Parquet files.
    Parquet,
}

impl Feature {
    /// Returns whether this build has the feature.
    pub fn is_compiled_in(self) -> bool {
        match self {
            Self::Tokenizers => cfg!(feature = "tokenizers"),
            Self::Parquet => cfg!(feature = "parquet"),
        }
    }

    /// Returns the advice for a build without it.
    pub fn advice(self) -> &'static str {
        match self {
            Self::Tokenizers => {
                "use the tokenizer \"bytes\", or build with the feature `tokenizers` (`cargo build --release --features tokenizers`)"
            }
            Self::Parquet => {
                "build with the feature `parquet` (`cargo build --release --features parquet`), or convert the file to .jsonl"
            }
        }
    }
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tokenizers => "tokenizer files",
            Self::Parquet => "Parquet",
        })
    }
}
