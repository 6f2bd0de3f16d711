//! The Llama family: decoder blocks of grouped-query attention with rotary positions and a SwiGLU feed-forward layer,
//! each behind an RMSNorm, with names and meaning as in Hugging Face's `LlamaForCausalLM`.
//!
//! As a list of layers: 0 is the token embedding, 1 to `num_hidden_layers` are the blocks, and the last is the final norm
//! with the head.

mod block;
mod config;
mod describe;
mod json;
mod stage;

pub use config::LlamaConfig;
pub use stage::{LlamaInput, LlamaStage};
