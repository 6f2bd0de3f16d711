//! The gpt-oss family (OpenAI, 2025, <https://arxiv.org/abs/2508.10925>): Mixtral with attention sinks,
//! windows in every second layer, biases, and experts whose gates are bounded. Keys have the names and the
//! meaning of Hugging Face's `GptOssForCausalLM`.
//!
//! The balance loss of the router is defined as in [`qwen3_moe`](crate::qwen3_moe). In files, a router is
//! `mlp.router`, and the matrices of all experts of a layer are two tensors.

use pipewright::nn::ExpertActivation;
use pipewright_shapes::ShapeError;
use pipewright_shapes::decoder::{has_window, require_listed, require_window};
use pipewright_shapes::family::{self, Family};
use pipewright_shapes::key_range::above_zero;
use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Value, json};

use crate::attention::AttentionBias;
use crate::decoder::{BlockForm, DecoderConfig, ExpertKeys, LayerForm, LayerType, MixtureConfig};
use crate::decoder_family::DecoderFamily;
use crate::experts::ExpertForm;
use crate::path_names::PathNames;

/// The names of parts of paths in files.
const NAMES: PathNames = PathNames::new(&[("gate", "router")]);

/// A gpt-oss model.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(from = "RawGptOss")]
pub struct GptOssConfig {
    /// Sizes and constants. `intermediate_size` is the inner width of an expert.
    pub decoder: DecoderConfig,
    /// The keys of attention and experts that Llama does not have.
    pub own: GptOssKeys,
    /// The experts. Every layer has them, their inner width is `intermediate_size`, and the weights of a
    /// token's experts are divided by their sum.
    pub mixture: MixtureConfig,
}

/// The keys of attention and experts that Llama does not have.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GptOssKeys {
    /// How many tokens back a token sees in layers with a window, itself included; `None` for all.
    pub sliding_window: Option<usize>,
    /// The kind of each layer: `sliding_attention` has the window. Without a list, every second layer sees
    /// all tokens, and the first layer has the window.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer_types: Option<Vec<LayerType>>,
    /// Whether the four linear layers of the attention have a bias.
    #[serde(default = "yes")]
    pub attention_bias: bool,
    /// The factor of a gate in its sigmoid.
    #[serde(default = "alpha")]
    pub swiglu_alpha: f64,
    /// The bound of gates and up projections.
    #[serde(default = "limit")]
    pub swiglu_limit: f64,
}

fn yes() -> bool {
    true
}

fn alpha() -> f64 {
    1.702
}

fn limit() -> f64 {
    7.0
}

/// The keys as files hold them.
#[derive(Deserialize)]
struct RawGptOss {
    #[serde(flatten)]
    decoder: DecoderConfig,
    #[serde(flatten)]
    own: GptOssKeys,
    #[serde(flatten)]
    mixture: MixtureConfig,
}

impl From<RawGptOss> for GptOssConfig {
    fn from(RawGptOss { decoder, own, mixture }: RawGptOss) -> Self {
        Self { own, mixture: mixture.with_equal_layers(decoder.intermediate_size), decoder }
    }
}

impl Serialize for GptOssConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for keys in [json!(self.decoder), json!(self.own), self.mixture.of_equal_layers()] {
            let Value::Object(keys) = keys else { continue };
            keys.iter().try_for_each(|(key, value)| map.serialize_entry(key, value))?;
        }
        map.end()
    }
}

impl From<DecoderConfig> for GptOssConfig {
    fn from(decoder: DecoderConfig) -> Self {
        let inner = decoder.intermediate_size;
        let mixture = MixtureConfig::of_width(inner).with_equal_layers(inner);
        let own = GptOssKeys {
            sliding_window: Some(128),
            layer_types: None,
            attention_bias: true,
            swiglu_alpha: alpha(),
            swiglu_limit: limit(),
        };
        Self { decoder, own, mixture }
    }
}

impl DecoderFamily for GptOssConfig {
    const ROW: Family = family::GPT_OSS;

    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn form(&self) -> BlockForm<'_> {
        let own = &self.own;
        let types = own.layer_types.as_deref();
        let layer = |index: usize| LayerForm {
            window: own.sliding_window.filter(|_| has_window(types, index, index.is_multiple_of(2))),
            ..LayerForm::default()
        };
        BlockForm {
            bias: AttentionBias::all(own.attention_bias),
            has_sinks: true,
            layers: (0..self.decoder.num_hidden_layers).map(layer).collect(),
            mixture: Some(&self.mixture),
            expert_keys: ExpertKeys { count: "num_local_experts", inner: "intermediate_size" },
            experts: ExpertForm {
                has_bias: true,
                are_joined: true,
                stacks: None,
                activation: ExpertActivation::Clamped { alpha: own.swiglu_alpha, limit: own.swiglu_limit },
            },
            names: NAMES,
            ..BlockForm::default()
        }
    }

    fn check_own(&self) -> Result<(), ShapeError> {
        let own = &self.own;
        require_window(own.sliding_window)?;
        above_zero(&[("swiglu_alpha", own.swiglu_alpha), ("swiglu_limit", own.swiglu_limit)])?;
        require_listed(own.layer_types.as_deref(), self.decoder.num_hidden_layers)
    }
}
