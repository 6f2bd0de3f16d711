//! Hugging Face model directories: `config.json` with `model.safetensors`, or with several files and
//! `model.safetensors.index.json`.
//!
//! [`check_weights`] checks headers and lengths, and compares the tensors with the configuration;
//! [`load_stage`] reads only the tensors of one stage. [`Writer`] writes a directory that transformers can
//! read, and that this crate loads again with the same bits. The directory appears only when it is complete.
//! Tokenizers and generation settings are not read, but an exported directory has the files of the directory
//! that the model was taken from ([`keep_origin`]).
//!
//! A GGUF file has the place of a directory, with its small files in it (`pipewright-gguf`).

mod added_tokens;
mod bitsandbytes;
mod vocabulary_rows;
mod contents;
mod directory;
mod export;
mod file;
mod four_bit_groups;
mod mxfp4;
mod fp8;
mod fingerprint;
mod json_file;
mod layout;
mod origin;
mod other_form;
mod peft_experts;
mod peft;
mod peft_write;
mod quantise;
mod quantised_place;
mod streamed;
mod read;
mod rewritten;
mod weight_type;
mod weights;
mod write;
mod gguf_write;

pub use added_tokens::{AddedTokens, add_tokens, added_rows, extend_tokenizer, vocabulary_modules};
pub use contents::{check_weights, lacks_labels, weight_ranges};
pub use directory::{is_config_alone, resolve};
pub(crate) use export::export_from;
pub use export::{ExportOptions, export};
pub use fingerprint::{fingerprint, fingerprint_ranges};
pub use gguf_write::{GgufForm, GgufWritten, quantise_gguf};
pub(crate) use gguf_write::{form_of, write_gguf, write_gguf_adapter};
pub use origin::{
    TOKENIZER, TextEnds, WeightTypes, end_tokens, is_origin_file, keep_keys, keep_origin, text_ends,
};
pub use other_form::OtherForm;
pub use peft::adapter_fingerprint;
pub(crate) use peft::{Adaptable, AdapterWeights, read_adapter};
pub use peft_write::PeftLimit;
pub(crate) use peft_write::{Described, PeftTargets, write_adapter};
pub use quantise::{Quantised, quantise};
pub use quantised_place::quantised_sizes;
pub(crate) use read::{Stored, open_weights, read_config};
pub use read::{load_stage, restore_stage};
pub use streamed::{ReadRate, read_rate, streamed_sizes};
pub use weight_type::WeightType;
pub use write::{DEFAULT_SHARD_BYTES, Writer, save};
