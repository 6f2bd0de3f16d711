//! Model families that Pipewright trains. They are Burn modules that describe themselves as a list of layers
//! and can be cut into stages between any two layers.
//!
//! A family is a configuration type that implements [`ModelFamily`]; [`ModelConfig`] lists the families, and
//! reads a `config.json` of any of them. Parameters come from a [`ParameterSource`]: seeded random numbers
//! ([`init::SeededInit`]) or a Hugging Face directory ([`hf`]). Schedules, transports and training loops are
//! in other crates.
//!
//! ```
//! use burn::tensor::{Device, Int, Tensor};
//! use pipewright_models::ModelFamily;
//! use pipewright_models::decoder::DecoderConfig;
//! use pipewright_models::llama::LlamaConfig;
//!
//! let config = LlamaConfig::from(DecoderConfig {
//!     hidden_size: 32,
//!     intermediate_size: 48,
//!     num_hidden_layers: 2,
//!     ..DecoderConfig::new(256, 4)
//! });
//! let layers = config.describe(16).layers.len();
//! assert_eq!(layers, 4, "embedding, two blocks, norm and head");
//!
//! let device = Device::flex();
//! let first = config.init_stage(0..2, 42, &device)?;
//! let last = config.init_stage(2..layers, 42, &device)?;
//! let tokens = Tensor::<2, Int>::zeros([1, 16], &device);
//! let logits = last.run(first.run(tokens));
//! assert_eq!(logits.dims(), [1, 16, 256]);
//! # Ok::<(), pipewright_models::ModelError>(())
//! ```

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

// Reading order: a module imports only earlier ones, which `tools/layers` checks.
mod quantisation;
pub mod error;

pub mod file_layout;
mod path_names;
mod split;

mod lora_target;
pub mod lora;
mod parameter_spec;
pub mod parameter;
mod held_matrix;
mod outline;
mod projection;
pub mod norm;
mod attention;
mod latent_attention;
mod cost;
mod experts;
mod head_form;
mod embedding_form;
mod vocabulary;

pub mod init;

mod documents;
mod valid_tokens;
mod predictions;
mod preference;
mod reward;
mod router;

mod mamba;
mod delta;

pub mod decoder;
pub mod hybrid;
pub mod nemotron_h;

pub mod boundary;
mod rows;
mod block;
mod table_adapter;
mod embedding_layer;
mod prediction;
mod training_form;
pub mod stage;
pub mod parameter_group;
pub mod generation_stage;
mod cached_stage;

pub mod family;

mod decoder_family;
mod nemotron_h_family;
mod hybrid_family;

pub mod deepseek;
pub mod deepseek_v2;
pub mod deepseek_v3;
mod layer_tables;
pub mod gemma2;
pub mod gemma3;
pub mod glm4_moe;
pub mod gpt_oss;
pub mod gpt2;
pub mod granite;
pub mod granite_hybrid;
pub mod llama;
pub mod ministral3;
pub mod mistral;
pub mod mixtral;
pub mod olmo2;
pub mod olmo3;
pub mod phi3;
pub mod qwen2;
pub mod qwen2_moe;
pub mod qwen3;
pub mod qwen3_moe;
pub mod qwen3_next;
pub mod qwen3_5;
pub mod qwen3_5_moe;
pub mod smollm3;
pub mod starcoder2;

pub mod hf;

pub mod adapter;
mod merged;
pub mod model_source;
pub mod model_config;
mod family_lookup;
mod cut_model;
pub mod training_memory;

pub mod generation;
pub mod generation_ranks;

pub use adapter::{Adapter, AdapterStart};
pub use boundary::StageTensors;
pub use cost::HiddenKept;
pub use cut_model::CutModel;
pub use embedding_form::{VocabularyCut, require_one_rank};
pub use error::{ModelError, SplitModel};
pub use family::ModelFamily;
pub use head_form::{FurtherPredictions, HeadForm};
pub use lora::{LoraConfig, LoraTargets};
pub use lora_target::LoraTarget;
pub use model_config::ModelConfig;
pub use model_source::{AdaptedCheckpoint, InitialParameters, ModelSource};
pub use parameter::{FirstCopies, HeldValues, ParameterKind, ParameterSource, ParameterSpec};
pub use parameter_group::ParameterGroup;
pub use pipewright_shapes::ShapeError;
pub use pipewright_shapes::decoder::usual_label;
pub use pipewright_shapes::family::Family;
pub use pipewright_shapes::key_table::{KeyTable, KeyUse, RefusedKey};
pub use predictions::cross_entropy;
pub use preference::{PreferenceKind, PreferenceLoss};
pub use projection::{adapted_experts, adapted_layers};
pub use quantisation::QuantisedSizes;
pub use router::ROUTER_CORRECTION;
pub use split::Place;
pub use stage::{ModelStage, parameter_specs};
pub use training_form::TrainingForm;
