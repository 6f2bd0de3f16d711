//! The errors of tokenizers.

use std::path::PathBuf;

use thiserror::Error;

use crate::record_error::RecordPlace;

/// Why a tokenizer cannot be used.
#[derive(Error)]
pub enum TokenizerError {
    /// A `tokenizer.json` cannot be used.
    #[error("{}: not a tokenizer.json of Hugging Face (the other choice is \"bytes\")", path.display())]
    Malformed {
        /// The tokenizer's file.
        path: PathBuf,
        /// The reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The library was built without tokenizers.
    #[error(
        "{}: tokenizer files are not compiled in; use the tokenizer \"bytes\", or build with the feature `tokenizers` \
         (`cargo build --release --features tokenizers`)",
        path.display()
    )]
    NotCompiledIn {
        /// The tokenizer's file.
        path: PathBuf,
    },
    /// A tokenizer is in a form that is not read.
    #[error(
        "{}: the tokenizer is in a form that is not read; write a `tokenizer.json` \
         (`AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)` of transformers), or `tokenizer = \"bytes\"` in [data]",
        path.display()
    )]
    OtherForm {
        /// The file.
        path: PathBuf,
    },
    /// A text could not be turned into tokens.
    #[error("{}{}: the tokenizer cannot turn the text into tokens", path.display(), in_record(*record))]
    Encode {
        /// The text's file.
        path: PathBuf,
        /// The place of the text in the file, if the file has records.
        record: Option<RecordPlace>,
        /// The tokenizer's reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Tokens could not be turned into a text.
    #[error("{}: the tokenizer cannot turn the tokens into text", path.display())]
    Decode {
        /// The tokenizer's file.
        path: PathBuf,
        /// The tokenizer's reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

pipewright_schedule::message_as_debug!(TokenizerError);

fn in_record(record: Option<RecordPlace>) -> String {
    record.map_or_else(String::new, |record| record.to_string())
}
