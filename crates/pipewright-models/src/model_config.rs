//! The list of model families, and the configuration of a model of any of them.
//!
//! A further family is one module with a type that implements [`ModelFamily`], and one line in the list here.

use pipewright_schedule::ModelDesc;
use serde_json::Value;

use crate::error::ConfigError;
use crate::family::ModelFamily;
use crate::llama::LlamaConfig;
use crate::qwen2::Qwen2Config;

macro_rules! families {
    ($($(#[$doc:meta])* $variant:ident($config:ty),)*) => {
        /// The configuration of a model of any family.
        #[derive(Debug, Clone, PartialEq)]
        #[non_exhaustive]
        pub enum ModelConfig {
            $($(#[$doc])* $variant($config),)*
        }

        impl ModelConfig {
            /// The names of the families that [`ModelConfig::from_json`] reads.
            pub const MODEL_TYPES: &'static [&'static str] = &[$(<$config>::MODEL_TYPE),*];

            /// Reads the configuration from a parsed `config.json`. `model_type` names the family, or the first
            /// architecture if there is no `model_type`.
            ///
            /// # Errors
            /// When the family is not one of [`ModelConfig::MODEL_TYPES`], or when [`ModelFamily::from_json`] fails.
            pub fn from_json(json: Value) -> Result<Self, ConfigError> {
                let name = family_name(&json).unwrap_or_default();
                $(if name == <$config>::MODEL_TYPE || name == <$config>::ARCHITECTURE {
                    return <$config>::from_json(json).map(Self::$variant);
                })*
                Err(ConfigError::UnknownFamily { found: name.to_owned(), known: Self::MODEL_TYPES })
            }

            /// Returns the content of `config.json`; see [`ModelFamily::to_json`].
            pub fn to_json(&self) -> Value {
                match self {
                    $(Self::$variant(config) => config.to_json(),)*
                }
            }

            /// Returns the size of the vocabulary: token ids are below it.
            pub fn vocab_size(&self) -> usize {
                match self {
                    $(Self::$variant(config) => config.vocab_size(),)*
                }
            }

            /// Returns the layers in order; see [`ModelFamily::describe`].
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

fn family_name(json: &Value) -> Option<&str> {
    let model_type = json.get("model_type").and_then(Value::as_str);
    model_type.or_else(|| json.get("architectures")?.get(0)?.as_str())
}
