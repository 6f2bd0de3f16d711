//! GGUF files of llama.cpp (<https://github.com/ggml-org/ggml>), as model folders.
//!
//! ```text
//! model.gguf --Gguf::open--> metadata and tensors of all parts of a model
//!   config::config_json        -> config.json               names::tensors_of -> tensors with the names of the family
//!   tokenizer::tokenizer_json  -> tokenizer.json, and its settings with the chat template
//! config.json, tokenizer.json --metadata, tokenizer_metadata--> entries --write::header--> the beginning of a file
//! ```
//!
//! Readers of model folders need no case for GGUF: [`files::read`] returns the content of `model.gguf/config.json`.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod error;
mod tensor;
mod parse;
pub mod container;
pub mod write;
mod names;
pub mod config;
mod pre_tokenizers;
mod tokenizer;
mod tokenizer_metadata;
pub mod files;

pub use container::Gguf;
pub use error::GgufError;
pub use names::{FamilyTensor, name_in_gguf, offset_in_gguf, rows_in_gguf, tensors_of};
pub use tensor::{Tensor, TensorKind};
pub use tokenizer_metadata::tokenizer_metadata;
