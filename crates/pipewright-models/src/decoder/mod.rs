//! Decoder-only models in the form of Llama: blocks of grouped-query attention with rotary positions and a
//! SwiGLU feed-forward layer or a mixture of such layers, each after an RMSNorm.
//!
//! Families of this form, such as [`llama`](crate::llama) and [`qwen3_moe`](crate::qwen3_moe), have a
//! [`DecoderConfig`]. A family fills in one table (`form.rs`), which
//! says which linear layers have a bias, which layers have windows, positions and experts, and more, and
//! lists the further keys of its `config.json`.
//!
//! In the list of layers, layer 0 is the token embedding, layers 1 to `num_hidden_layers` are the blocks, and
//! the last layer is the final norm with the head.
//!
//! # Tied embeddings
//!
//! With `tie_word_embeddings`, the head uses the embedding's table. The stage with the head holds a copy of
//! the table under the embedding's path, even if it also has the embedding. The pipeline sums the gradients
//! of all copies of a path, which keeps them equal, and the copies on one rank use one storage. Model
//! directories hold the table once.

mod attentions;
mod describe;
mod feed_forward;
mod form;
mod positions;

pub(crate) use attentions::{BlockAttentions, MicrobatchAttentions};
pub(crate) use describe::{describe, hidden_kept};
pub(crate) use feed_forward::{FeedForward, scaled};
pub(crate) use form::{
    Activation, BlockForm, ExpertKeys, Factors, LayerForm, NormPlaces, QueryGrowth, RouterForm, SharedForm,
    with_windows,
};
pub use pipewright_shapes::decoder::{
    DecoderConfig, LayerType, LayerWindows, Llama3Scaling, LongRopeScaling, MixtureConfig, RopeScaling,
    YarnScaling,
};
pub(crate) use pipewright_shapes::vectors::QueryKeyNorm;
