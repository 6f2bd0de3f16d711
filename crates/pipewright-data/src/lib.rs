//! Training data: text or token files become rows of token ids, and rows become batches.
//!
//! Patterns name `files`. A `container` unpacks a file, its `format` says which reader it needs, and a
//! `collector` turns all files into compact `ids`. [`TokenRows`] returns rows in an `order` that a [`Cursor`]
//! can resume, and a mixture `interleave`s sources. There are no tensors here: a [`TokenBatch`] is
//! plain numbers, and the caller copies them to a device.
//!
//! ```
//! use pipewright_data::{DataConfig, Tokenizer};
//!
//! # let folder = std::env::temp_dir().join(format!("pipewright-data-{}", std::process::id()));
//! # std::fs::create_dir_all(&folder)?;
//! # std::fs::write(folder.join("a.txt"), "to be or not to be")?;
//! let config = DataConfig {
//!     path: vec![format!("{}/*.txt", folder.display())],
//!     tokenizer: Tokenizer::Bytes,
//!     seq_len: 5,
//!     shuffle: false,
//!     seed: 0,
//!     ..DataConfig::default()
//! };
//! let mut rows = config.open(256, 2)?;
//! let batch = rows.next_batch(2)?;
//! assert_eq!(batch.inputs, b"to be or n".map(i32::from));
//! assert_eq!(batch.targets, b"o be or no".map(i32::from));
//! # std::fs::remove_dir_all(&folder)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod error;
mod bad_records;
mod feature;
mod settings;
mod side;
mod documents;
mod config;
mod chat;
mod content;
mod vocabulary;
mod memory_budget;
mod files;
mod container;
mod storage;
mod formats;
mod order;
mod batch;
mod example_rows;
mod encoding;
mod collected;
mod queue;
mod gathered;
mod collector;
mod interleave;
mod source_rows;
mod row_place;
mod rows;
mod remote_rows;
mod tokenized;
mod open;
mod tokenize;
#[cfg(test)]
mod tests;

pub use bad_records::BadRecords;
pub use batch::{IGNORED_TARGET, TokenBatch};
pub use chat::special_tokens::{MissingEnd, SpecialTokens};
pub use chat::template::{ChatRenderer, RenderedChat};
pub use chat::turns::{ChatMessage, ChatRole};
pub use config::{DataConfig, Tokenizer};
pub use container::data_file::Packing;
pub use content::Binary;
pub use documents::{DOCUMENTS, Documents, POSITIONS, VALID_TOKENS};
pub use encoding::codec::TokenCodec;
pub use encoding::tokenizer_file::TokenizerFile;
pub use error::{DataError, DataErrorKind, DataPlace};
pub use example_rows::RowFill;
pub use feature::Feature;
pub use formats::format::{DataSource, Format};
pub use remote_rows::RowsOutline;
pub use row_place::{RowPlace, RowReader};
pub use rows::{Cursor, DataIdentity, MixedRows, SourceIdentity, TokenRows};
pub use settings::chat_template::ChatTemplate;
pub use settings::date::Date;
pub use settings::mix::{MixSource, MixWeight};
pub use settings::preference::{PreferenceData, ROLES, Role, SEQUENCES};
pub use settings::record::{RecordKeys, RecordKind};
pub use settings::train_on::{LongRecordCount, LongRecords, TrainOn};
pub use side::{SideRows, SideTensor};
pub use storage::examples::RowPart;
pub use tokenize::{TokenizeProgress, Tokenized};
