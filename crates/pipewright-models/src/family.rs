//! What a model family offers, and the list of families.
//!
//! A further family is one module with a type that implements [`ModelFamily`], and one line in the list at
//! [`ModelConfig`].

use std::ops::Range;

use burn::tensor::{Device, Tensor};
use pipewright::stage::StageModule;
use pipewright_schedule::ModelDesc;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::init::SeededInit;
use crate::llama::LlamaConfig;
use crate::parameter::ParameterSource;
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

    /// The configuration in a parsed `config.json`. Keys that do not bear on the arithmetic are ignored.
    ///
    /// # Errors
    /// When a key is missing, out of range, or asks for what the family cannot compute.
    fn from_json(json: Value) -> Result<Self, ConfigError> {
        match Self::deserialize(&json) {
            Ok(config) => Ok(config),
            Err(source) => Err(parse_error::<Self>(&json, source)),
        }
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
        }
    };
}

families! {
    /// Llama: rotary positions, grouped-query attention, RMSNorm, SwiGLU.
    Llama(LlamaConfig),
    /// Qwen2: Llama with biases on queries, keys and values.
    Qwen2(Qwen2Config),
}

/// The error with the key that it is about, where one key is at fault: without that key, the error is another.
///
/// The parser does not name the key, because the keys of a family and those of all families are flattened into one table.
fn parse_error<F: DeserializeOwned>(json: &Value, source: serde_json::Error) -> ConfigError {
    /// A file with more keys than any model has is not searched.
    const MOST_KEYS: usize = 256;
    let message = source.to_string();
    let names_its_key = message.starts_with('`') || message.starts_with("missing field");
    let without = |key: &String| {
        let mut json = json.clone();
        json.as_object_mut()?.remove(key);
        F::deserialize(json).err().map(|error| error.to_string())
    };
    let keys = json.as_object().into_iter().flat_map(|table| table.keys().take(MOST_KEYS));
    let culprit = keys.into_iter().find(|key| !names_its_key && without(key).as_ref() != Some(&message));
    match culprit {
        Some(key) => ConfigError::Value { key: key.clone(), source },
        None => ConfigError::Parse(source),
    }
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
        "{}: set `model_type` (or `architectures`) to one of {}",
        if found.is_empty() { "no model family is named".to_owned() } else { format!("unknown model family `{found}`") },
        ModelConfig::MODEL_TYPES.join(", ")
    )]
    UnknownFamily {
        /// The name that was found; empty when there is none.
        found: String,
    },
    /// A key is missing.
    #[error(transparent)]
    Parse(#[from] serde_json::Error),
    /// A key has a value of another type.
    #[error("the value of `{key}` cannot be used")]
    Value {
        /// The key.
        key: String,
        /// What is wrong with its value.
        source: serde_json::Error,
    },
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

impl ConfigError {
    /// The key of `config.json` that the error is about, if it is about one that may be written there.
    pub fn key(&self) -> Option<String> {
        match self {
            Self::UnknownFamily { found } => (!found.is_empty()).then(|| "model_type".to_owned()),
            Self::Value { key, .. } => Some(key.clone()),
            Self::NotSupported { key, .. }
            | Self::OutOfRange { key, .. }
            | Self::NotDivisible { key, .. } => Some((*key).to_owned()),
            // A refusal of a value comes through the parser as text, such as "`hidden_act = gelu` is not supported".
            Self::Parse(error) => {
                let message = error.to_string();
                Some(message.strip_prefix('`')?.split([' ', '`']).next()?.to_owned())
            }
            Self::LayerRange { .. } => None,
        }
    }
}
