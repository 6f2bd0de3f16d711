//! Hugging Face model directories: `config.json` with `model.safetensors`, or with several files and
//! `model.safetensors.index.json`.
//!
//! [`check_weights`] looks at headers and lengths, [`load_stage`] reads what one stage needs and no more. [`Writer`] lays out a directory that transformers reads and
//! that loads here again bit-identically; it becomes visible whole or not at all. Tokenizers and generation settings
//! are not touched.

mod error;
mod export;
mod file;
mod layout;
mod read;
mod write;

pub use error::HfError;
pub use export::export;
pub use read::{check_weights, load_stage, read_config};
pub use write::{DEFAULT_SHARD_BYTES, Writer, save};

const CONFIG: &str = "config.json";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
