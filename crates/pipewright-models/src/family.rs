//! What a model family offers, and the list of families.
//!
//! A further family is one module with a type that implements [`ModelFamily`], and one line in the list at
//! [`ModelConfig`].

use std::ops::Range;
use std::path::{Path, PathBuf};

use burn::tensor::{Device, Tensor};
use pipewright::checkpoint::Checkpoint;
use pipewright::stage::{Stage, StageModule};
use pipewright_schedule::ModelDesc;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::decoder::DecoderConfig;
use crate::hf::{self, HfError};
use crate::init::SeededInit;
use crate::llama::LlamaConfig;
use crate::loss::cross_entropy;
use crate::parameter::{Outline, ParameterSource, ParameterSpec};
use crate::qwen2::Qwen2Config;

/// A model family: its configuration, and how stages are made from it. The configuration serialises as the keys of
/// `config.json` that bear on the arithmetic.
pub trait ModelFamily: Clone + Send + Sync + Sized + Serialize + DeserializeOwned {
    /// The family's name, which is `model_type` in `config.json`.
    const MODEL_TYPE: &'static str;
    /// The entry of `architectures` in `config.json`.
    const ARCHITECTURE: &'static str;
    /// Hidden states `[batch, sequence, hidden]` leave every stage but the last, and logits
    /// `[batch, sequence, vocabulary]` the last.
    type Stage: StageModule<Output = Tensor<3>>;

    /// A model of these sizes, with the family's usual values for everything else.
    fn of_sizes(sizes: DecoderConfig) -> Self;

    /// The configuration in a parsed `config.json`. Keys that do not bear on the arithmetic are ignored.
    ///
    /// # Errors
    /// When a key is missing, out of range, or asks for what the family cannot compute.
    fn from_json(json: Value) -> Result<Self, ConfigError> {
        Ok(serde_json::from_value(json)?)
    }

    /// The content of `config.json`.
    fn to_json(&self) -> Value {
        let mut json = json!(self);
        json["model_type"] = Self::MODEL_TYPE.into();
        json["architectures"] = json!([Self::ARCHITECTURE]);
        json["dtype"] = "float32".into();
        json
    }

    /// Token ids run from 0 to one below this.
    fn vocab_size(&self) -> usize;

    /// The layers in order, with weights that are the floating point operations of a token's forward and backward at
    /// this sequence length. A stage is a range of this list.
    fn describe(&self, sequence: usize) -> ModelDesc;

    /// The standard deviation of initial parameters.
    fn initializer_range(&self) -> f64;

    /// The stage that holds `layers`, with parameters from `source`, on `device`.
    ///
    /// # Errors
    /// When `layers` is empty or reaches past the last layer, or when the source fails.
    fn build_stage<S>(
        &self,
        layers: Range<usize>,
        source: &mut S,
        device: &Device,
    ) -> Result<Self::Stage, S::Error>
    where
        S: ParameterSource,
        S::Error: From<ConfigError>;

    /// The stage that holds `layers`, with initial parameters: those of a seed are the same however the model is cut.
    ///
    /// # Errors
    /// When `layers` is empty or reaches past the last layer.
    fn init_stage(
        &self,
        layers: Range<usize>,
        seed: u64,
        device: &Device,
    ) -> Result<Self::Stage, ConfigError> {
        let mut source = SeededInit { seed, deviation: self.initializer_range() };
        self.build_stage(layers, &mut source, device)
    }

    /// The parameters of the stage that holds `layers`, without their values: nothing is allocated for them.
    ///
    /// # Errors
    /// When `layers` is empty or reaches past the last layer.
    fn outline(&self, layers: Range<usize>) -> Result<Vec<ParameterSpec>, ConfigError> {
        let mut outline = Outline::default();
        self.build_stage(layers, &mut outline, &Device::flex())?;
        Ok(outline.specs)
    }
}

/// The parameters with which training starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InitialParameters {
    /// Random ones that follow from a seed.
    Seed(u64),
    /// Those in a Hugging Face directory.
    Directory(PathBuf),
}

/// The stage of `config` that holds `layers`; the last stage computes the loss.
fn training_stage<F: ModelFamily + 'static>(
    config: &F,
    layers: Range<usize>,
    initial: &InitialParameters,
    device: &Device,
) -> Result<Stage, HfError> {
    // The sequence length bears on costs alone.
    let is_last = layers.end == config.describe(1).layers.len();
    let module = match initial {
        InitialParameters::Seed(seed) => config.init_stage(layers, *seed, device)?,
        InitialParameters::Directory(directory) => hf::load_stage(directory, config, layers, device)?,
    };
    Ok(if is_last { Stage::with_loss(module, cross_entropy) } else { Stage::new(module) })
}

macro_rules! families {
    ($($(#[$doc:meta])* $variant:ident($config:ty),)*) => {
        /// The configuration of a model of any family.
        #[derive(Debug, Clone, PartialEq)]
        #[non_exhaustive]
        pub enum ModelConfig {
            $($(#[$doc])* $variant($config),)*
        }

        impl ModelConfig {
            /// The names by which [`ModelConfig::from_json`] finds a family.
            pub const MODEL_TYPES: &'static [&'static str] = &[$(<$config>::MODEL_TYPE),*];

            /// The configuration in a parsed `config.json`, of the family that its `model_type`, or else its first
            /// architecture, names.
            ///
            /// # Errors
            /// When the family is not among [`ModelConfig::MODEL_TYPES`], or as [`ModelFamily::from_json`].
            pub fn from_json(json: Value) -> Result<Self, ConfigError> {
                let name = family_name(&json).unwrap_or_default();
                $(if name == <$config>::MODEL_TYPE || name == <$config>::ARCHITECTURE {
                    return <$config>::from_json(json).map(Self::$variant);
                })*
                Err(ConfigError::UnknownFamily { found: name.to_owned() })
            }

            /// A model of the family that `model_type` names, one of [`ModelConfig::MODEL_TYPES`]; see
            /// [`ModelFamily::of_sizes`].
            ///
            /// # Errors
            /// When there is no such family.
            pub fn of_sizes(model_type: &str, sizes: DecoderConfig) -> Result<Self, ConfigError> {
                $(if model_type == <$config>::MODEL_TYPE {
                    return Ok(Self::$variant(<$config>::of_sizes(sizes)));
                })*
                Err(ConfigError::UnknownFamily { found: model_type.to_owned() })
            }

            /// The content of `config.json`; see [`ModelFamily::to_json`].
            pub fn to_json(&self) -> Value {
                match self {
                    $(Self::$variant(config) => config.to_json(),)*
                }
            }

            /// Token ids run from 0 to one below this.
            pub fn vocab_size(&self) -> usize {
                match self {
                    $(Self::$variant(config) => config.vocab_size(),)*
                }
            }

            /// The layers in order; see [`ModelFamily::describe`].
            pub fn describe(&self, sequence: usize) -> ModelDesc {
                match self {
                    $(Self::$variant(config) => config.describe(sequence),)*
                }
            }

            /// The parameters of a stage, without their values; see [`ModelFamily::outline`].
            ///
            /// # Errors
            /// As [`ModelFamily::outline`].
            pub fn outline(&self, layers: Range<usize>) -> Result<Vec<ParameterSpec>, ConfigError> {
                match self {
                    $(Self::$variant(config) => config.outline(layers),)*
                }
            }

            /// The stage that holds `layers`, for training on `device`; the last one computes the loss.
            ///
            /// # Errors
            /// As [`ModelFamily::init_stage`] and [`hf::load_stage`].
            pub fn training_stage(
                &self,
                layers: Range<usize>,
                initial: &InitialParameters,
                device: &Device,
            ) -> Result<Stage, HfError> {
                match self {
                    $(Self::$variant(config) => training_stage(config, layers, initial, device),)*
                }
            }

            /// Writes the model of a checkpoint as a Hugging Face directory; see [`hf::export`].
            ///
            /// # Errors
            /// As [`hf::export`].
            pub fn export(&self, checkpoint: &Checkpoint, dir: &Path) -> Result<(), HfError> {
                match self {
                    $(Self::$variant(config) => hf::export(checkpoint, config, dir),)*
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
}

fn family_name(json: &Value) -> Option<&str> {
    let model_type = json.get("model_type").and_then(Value::as_str);
    model_type.or_else(|| json.get("architectures")?.get(0)?.as_str())
}

/// Why a model cannot be configured as asked.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// No family has this name.
    #[error(
        "unknown model family `{found}`: set `model_type` (or `architectures`) to one of {}",
        ModelConfig::MODEL_TYPES.join(", ")
    )]
    UnknownFamily {
        /// The name that was found; empty when there is none.
        found: String,
    },
    /// A key is missing or has a value of another type.
    #[error("invalid model configuration: {0}")]
    Parse(#[from] serde_json::Error),
    /// A value that the family cannot compute.
    #[error("`{key} = {value}` is not supported: only {supported} is")]
    NotSupported {
        /// The key.
        key: &'static str,
        /// The value that was asked for.
        value: String,
        /// The value or values that work.
        supported: &'static str,
    },
    /// A value outside its range.
    #[error("`{key} = {value}` is out of range: it must be {range}")]
    OutOfRange {
        /// The key.
        key: &'static str,
        /// The value that was asked for.
        value: String,
        /// What the value must be.
        range: &'static str,
    },
    /// Two values that do not go together.
    #[error("`{key} = {value}` is not divisible by `{by} = {divisor}`")]
    NotDivisible {
        /// The key of the dividend.
        key: &'static str,
        /// The dividend.
        value: usize,
        /// The key of the divisor.
        by: &'static str,
        /// The divisor.
        divisor: usize,
    },
    /// A stage that the model does not have.
    #[error("layers {start}..{end} are no stage of a model of {layers} layers")]
    LayerRange {
        /// First layer.
        start: usize,
        /// Layer after the last.
        end: usize,
        /// Layers of the model.
        layers: usize,
    },
}
