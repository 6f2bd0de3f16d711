//! Training data: text or token files become rows of token ids, and rows become batches.
//!
//! Patterns name `files`. A `container` unpacks a file, its `format` says which reader it needs, and a
//! `collector` turns all files into compact `ids`. [`TokenRows`] returns rows in an `order` that a [`Cursor`]
//! can resume. There are no
//! tensors here: a [`TokenBatch`] is plain numbers, and the caller copies them to a device.
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
//! let batch = rows.next_batch(2);
//! assert_eq!(batch.inputs, b"to be or n".map(i32::from));
//! assert_eq!(batch.targets, b"o be or no".map(i32::from));
//! # std::fs::remove_dir_all(&folder)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod cursor;
mod date;
mod packing;
mod named_templates;
mod chat_error;
mod chat_template_choice;
mod train_on;
mod content;
mod record;
mod record_error;
mod error;
mod vocabulary;
mod memory_budget;
mod zstd_frames;
mod container;
mod text;
mod ids;
mod stride;
mod format;
mod lines;
mod parquet_rows;
mod record_content;
mod token_files;
mod pattern;
mod files;
mod order;
mod side;
mod documents;
mod config;
mod python_json;
mod chat_template;
mod chat_spans;
mod examples;
mod tokenizer;
mod codec;
mod document_text;
mod example_text;
mod collector;
mod rows;
mod open;
#[cfg(test)]
mod tests;

pub use chat_error::{ChatProblem, TemplateError};
pub use chat_template::{ChatRenderer, RenderedChat};
pub use chat_template_choice::ChatTemplate;
pub use codec::TokenCodec;
pub use config::{DataConfig, Tokenizer};
pub use content::Binary;
pub use cursor::Cursor;
pub use date::Date;
pub use documents::{DOCUMENTS, Documents, POSITIONS, VALID_TOKENS};
pub use error::{DataError, TokenPlace};
pub use examples::{IGNORED_TARGET, RowPart};
pub use format::{DataSource, Format};
pub use packing::Packing;
pub use record::{RecordKeys, RecordKind};
pub use record_error::{RecordError, RecordPlace, RecordProblem};
pub use rows::{DataIdentity, TokenBatch, TokenRows};
pub use side::{SideError, SideRows, SideTensor};
pub use train_on::{LongRecordCount, LongRecords, TrainOn};
