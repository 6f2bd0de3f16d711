//! The list of model families, and the configuration of a model of any of them.
//!
//! A further family is one module with a type that implements [`ModelFamily`], its `pub mod` line in
//! `lib.rs`, and a `use` line and a line in the list here.

use std::path::Path;

use burn::tensor::Device;
use pipewright::checkpoint::Checkpoint;
use pipewright::nn::TensorParallel;
use pipewright::train::data::{SideError, SideRows};
use pipewright_schedule::ModelDesc;
use serde_json::Value;

use crate::any_family::{AnyFamily, ModelSource};
use crate::config_key::KeyTable;
use crate::decoder::DecoderConfig;
use crate::error::ConfigError;
use crate::family::ModelFamily;
use crate::hf::{ExportOptions, HfError, WeightType};
use crate::hybrid::HybridConfig;
use crate::llama::LlamaConfig;
use crate::nemotron_h::NemotronHConfig;
use crate::next_token::NextToken;
use crate::parameter::ParameterSpec;
use crate::parameter_group::ParameterGroup;
use crate::qwen2::Qwen2Config;
use crate::qwen3::Qwen3Config;
use crate::qwen3_moe::Qwen3MoeConfig;

/// The facts about a family that do not depend on a model's sizes.
pub(crate) struct Family {
    /// `model_type` in `config.json`.
    pub(crate) name: &'static str,
    /// The entry of `architectures` in `config.json`.
    pub(crate) class: &'static str,
    /// The meaning of each key of `config.json`.
    pub(crate) table: &'static KeyTable,
    /// The values of keys that a file leaves out.
    pub(crate) absent: &'static [(&'static str, u32)],
    /// Reads a parsed `config.json`.
    pub(crate) from_json: fn(Value) -> Result<ModelConfig, ConfigError>,
    /// Makes the `config.json` of a model of these sizes.
    pub(crate) of_sizes: fn(DecoderConfig) -> Value,
}

impl Family {
    const fn new<F: ModelFamily + Into<ModelConfig>>() -> Self {
        Self {
            name: F::MODEL_TYPE,
            class: F::ARCHITECTURE,
            table: F::TABLE,
            absent: F::ABSENT,
            from_json: |json| F::from_json(json).map(Into::into),
            of_sizes: |sizes| F::of_sizes(sizes).to_json(),
        }
    }
}

macro_rules! families {
    ($($(#[$doc:meta])* $variant:ident($config:ty),)*) => {
        /// The configuration of a model of any family.
        #[expect(clippy::large_enum_variant, reason = "a run has one configuration")]
        #[derive(Debug, Clone, PartialEq)]
        #[non_exhaustive]
        pub enum ModelConfig {
            $($(#[$doc])* $variant($config),)*
        }

        $(impl From<$config> for ModelConfig {
            fn from(config: $config) -> Self {
                Self::$variant(config)
            }
        })*

        /// All families.
        pub(crate) const FAMILIES: &[Family] = &[$(Family::new::<$config>()),*];

        impl ModelConfig {
            /// The names by which [`ModelConfig::from_json`] finds a family.
            pub const MODEL_TYPES: &'static [&'static str] = &[$(<$config>::MODEL_TYPE),*];

            /// Returns the configuration without its type.
            pub(crate) fn family(&self) -> &dyn AnyFamily {
                match self {
                    $(Self::$variant(config) => config,)*
                }
            }
        }
    };
}

families! {
    /// Llama: rotary positions, grouped-query attention, RMSNorm, SwiGLU.
    Llama(LlamaConfig),
    /// Qwen2: Llama with biases on queries, keys and values.
    Qwen2(Qwen2Config),
    /// Qwen3: Llama with a normalisation of each head's queries and keys.
    Qwen3(Qwen3Config),
    /// Qwen3-MoE: Qwen3 with a mixture of experts in some layers.
    Qwen3Moe(Qwen3MoeConfig),
    /// Nemotron-H: Mamba-2, attention, feed-forward layers and experts by a pattern.
    NemotronH(NemotronHConfig),
    /// Attention, Mamba-2, experts and feed-forward layers by a pattern, with documents, windows and further
    /// embeddings.
    Hybrid(HybridConfig),
}

impl ModelConfig {
    /// Returns the content of `config.json`; see [`ModelFamily::to_json`].
    pub fn to_json(&self) -> Value {
        self.family().to_json()
    }

    /// Returns the size of the vocabulary: token ids are below it.
    pub fn vocab_size(&self) -> usize {
        self.family().vocab_size()
    }

    /// Returns the layers in order; see [`ModelFamily::describe`].
    pub fn describe(&self, sequence: usize) -> ModelDesc {
        self.family().describe(sequence)
    }

    /// Returns the number of layers.
    pub fn layers(&self) -> usize {
        self.family().layers()
    }

    /// Checks that the model takes these side inputs; see [`ModelFamily::check_side`].
    ///
    /// # Errors
    /// As [`ModelFamily::check_side`].
    pub fn check_side(&self, side: &SideRows, sequence: usize) -> Result<(), SideError> {
        self.family().check_side(side, sequence)
    }

    /// Returns the first layer of each stage except the first, if the model has a pattern that says it.
    pub fn cuts(&self) -> Option<Vec<usize>> {
        self.family().cuts()
    }

    /// Returns the parameters of the whole model.
    ///
    /// # Errors
    /// As [`ModelFamily::outline`].
    pub fn parameters(&self) -> Result<Vec<ParameterSpec>, ConfigError> {
        self.family().outline(None, 0..self.layers(), &TensorParallel::default())
    }

    /// Returns the global paths of the parameters of these groups.
    ///
    /// # Errors
    /// As [`ModelFamily::outline`].
    pub fn group_paths(&self, groups: &[ParameterGroup]) -> Result<Vec<String>, ConfigError> {
        self.family().group_paths(groups)
    }

    /// Returns why stages of the model cannot run slices of microbatches; `None` if they can
    /// ([`StageModule::refuses_slices`](pipewright::stage::StageModule::refuses_slices)).
    ///
    /// # Errors
    /// As [`ModelFamily::outline`].
    pub fn refuses_slices(&self) -> Result<Option<String>, ConfigError> {
        self.family().refuses_slices()
    }

    /// Builds the whole model for generation ([`crate::generation::generate`]), on `device`.
    ///
    /// # Errors
    /// As [`hf::load_stage`](crate::hf::load_stage) and [`hf::restore_stage`](crate::hf::restore_stage).
    pub fn whole(&self, source: ModelSource<'_>, device: &Device) -> Result<Box<dyn NextToken>, HfError> {
        self.family().whole(source, device)
    }

    /// Writes the model of a checkpoint as a Hugging Face directory; see [`hf::export`](crate::hf::export).
    ///
    /// # Errors
    /// As [`hf::export`](crate::hf::export).
    pub fn export(
        &self,
        checkpoint: &Checkpoint,
        options: &ExportOptions<'_>,
        dir: &Path,
    ) -> Result<WeightType, HfError> {
        self.family().export(checkpoint, options, dir)
    }
}
