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
                Err(ConfigError::UnknownFamily { found: name.to_owned(), known: Self::MODEL_TYPES })
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

fn family_name(json: &Value) -> Option<&str> {
    let model_type = json.get("model_type").and_then(Value::as_str);
    model_type.or_else(|| json.get("architectures")?.get(0)?.as_str())
}
