//! The gpt-oss family (OpenAI, 2025, <https://arxiv.org/abs/2508.10925>): Mixtral with attention sinks,
//! windows in every second layer, biases, and experts whose gates are bounded. Keys have the names and the
//! meaning of Hugging Face's `GptOssForCausalLM`.
//!
//! The balance loss of the router is defined as in [`qwen3_moe`](crate::qwen3_moe). In files, a router is
//! `mlp.router`, and the matrices of all experts of a layer are two tensors.

use pipewright::nn::ExpertActivation;
use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Value, json};

use crate::attention::AttentionBias;
use crate::config_key::{Harmless, KeyTable, Refused};
use crate::decoder::{
    BlockForm, COMPUTED_KEYS, DecoderConfig, ExpertKeys, LayerForm, LayerType, MixtureConfig, has_window,
    require_listed, require_window,
};
use crate::decoder_family::DecoderFamily;
use crate::error::ConfigError;
use crate::expert_form::ExpertForm;
use crate::family::AbsentKey;
use crate::key_check::above_zero;
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
    const NAME: &'static str = "gpt_oss";
    const CLASS: &'static str = "GptOssForCausalLM";
    const KEY_TABLE: &'static KeyTable = &KeyTable {
        computes: &[
            COMPUTED_KEYS,
            &[
                "sliding_window",
                "layer_types",
                "attention_bias",
                "swiglu_alpha",
                "swiglu_limit",
                "num_local_experts",
                "num_experts",
                "num_experts_per_tok",
                "router_aux_loss_coef",
                "output_router_logits",
            ],
        ],
        ignored: &[&["initial_context_length"]],
        refused: &[&[
            Refused { key: "attention_dropout", harmless: Harmless::Number(0.0) },
            Refused { key: "experts_per_token", harmless: Harmless::SameAs("num_experts_per_tok") },
        ]],
    };
    const ABSENT_KEYS: &'static [(&'static str, AbsentKey)] = &[
        ("num_key_value_heads", AbsentKey::Count(8)),
        ("head_dim", AbsentKey::Count(64)),
        ("rms_norm_eps", AbsentKey::Number(1e-5)),
        ("rope_theta", AbsentKey::Number(150_000.0)),
        (
            "rope_scaling",
            AbsentKey::Table(
                r#"{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
                    "original_max_position_embeddings": 4096}"#,
            ),
        ),
        ("sliding_window", AbsentKey::Count(128)),
        ("num_experts_per_tok", AbsentKey::Count(4)),
    ];

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
                activation: ExpertActivation::Clamped { alpha: own.swiglu_alpha, limit: own.swiglu_limit },
            },
            names: NAMES,
            ..BlockForm::default()
        }
    }

    fn check_own(&self) -> Result<(), ConfigError> {
        let own = &self.own;
        require_window(own.sliding_window)?;
        above_zero(&[("swiglu_alpha", own.swiglu_alpha), ("swiglu_limit", own.swiglu_limit)])?;
        require_listed(own.layer_types.as_deref(), self.decoder.num_hidden_layers)
    }
}
