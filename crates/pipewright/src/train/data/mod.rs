//! Training data: text or token files become rows of token ids, and rows become batches.
//!
//! Patterns name `files`. A reader for each kind of file (`text`, `jsonl`, `tokenizer`) turns them into
//! compact `ids`, and [`TokenRows`] returns rows in an `order` that a [`Cursor`] can resume. There are no
//! tensors here: a [`TokenBatch`] is plain numbers, and the caller copies them to a device.
//!
//! ```
//! use pipewright::train::data::{DataConfig, Tokenizer};
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
//!     documents: None,
//! };
//! let mut rows = config.open(256, 2)?;
//! let batch = rows.next_batch(2);
//! assert_eq!(batch.inputs, b"to be or n".map(i32::from));
//! assert_eq!(batch.targets, b"o be or no".map(i32::from));
//! # std::fs::remove_dir_all(&folder)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod codec;
mod config;
mod content;
mod documents;
mod error;
mod files;
mod ids;
mod jsonl;
mod memory_budget;
mod open;
mod order;
mod pattern;
mod rows;
mod side;
#[cfg(test)]
mod tests;
mod text;
mod tokenizer;

pub use crate::checkpoint::Cursor;
pub use codec::TokenCodec;
pub use config::{DataConfig, Tokenizer};
pub use content::Binary;
pub use documents::{DOCUMENTS, Documents, POSITIONS};
pub use error::{DataError, TokenPlace};
pub use rows::{DataIdentity, TokenBatch, TokenRows};
pub use side::{SideError, SideRows, SideTensor};
