//! Decoder-only models in the form that Llama gave them: blocks of grouped-query attention with rotary positions and a
//! SwiGLU feed-forward layer, each behind an RMSNorm.
//!
//! Families of this form ([`llama`](crate::llama), [`qwen2`](crate::qwen2)) have a [`DecoderConfig`] and their stages
//! are [`DecoderStage`]s; a family says which products add a bias, and what else its `config.json` holds.
//!
//! As a list of layers: 0 is the token embedding, 1 to `num_hidden_layers` are the blocks, and the last is the final
//! norm with the head.
//!
//! # Tied embeddings
//!
//! With `tie_word_embeddings` the head multiplies by the embedding's table. The stage with the head holds a copy of the
//! table, also if it is the stage with the embedding, under the embedding's path: the pipeline sums the gradients of all
//! copies of a path and so keeps them equal. Model directories hold the table once.

mod block;
mod config;
mod defaults;
mod describe;
mod json;
mod stage;

pub(crate) use block::AttentionBias;
pub use config::DecoderConfig;
pub use stage::{DecoderInput, DecoderStage};
