//! Hugging Face model directories: `config.json` with `model.safetensors`, or with several files and
//! `model.safetensors.index.json`.
//!
//! [`check_weights`] checks headers and lengths; [`load_stage`] reads only the tensors of one stage. [`Writer`] writes
//! a directory that transformers can read, and that this crate loads again with the same bits. The directory appears
//! only when it is complete. Tokenizers and generation settings are not read, but an exported directory has those of
//! the directory that the model was taken from ([`keep_origin`]).

mod error;
mod export;
mod file;
mod layout;
mod origin;
mod read;
mod weights;
mod write;

pub use error::HfError;
pub use export::export;
pub use origin::{TOKENIZER, end_tokens, keep_origin};
pub use read::{check_weights, load_split_stage, load_stage, restore_stage};
pub(crate) use read::{open_weights, read_config};
pub use write::{DEFAULT_SHARD_BYTES, Writer, save};

const CONFIG: &str = "config.json";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
