//! The StarCoder 2 family: Llama with layer normalisations, biases, windows, and feed-forward layers without
//! a gate. Keys have the names and the meaning of Hugging Face's `Starcoder2ForCausalLM`. In files, the
//! matrices of a feed-forward layer are `c_fc` and `c_proj`.

use serde::{Deserialize, Serialize};

use crate::attention::AttentionBias;
use crate::config_key::{Harmless, KeyTable, Refused};
use crate::decoder::{Activation, BlockForm, COMPUTED_KEYS, DecoderConfig, LayerForm, require_window};
use crate::decoder_family::DecoderFamily;
use crate::error::ConfigError;
use crate::family::AbsentKey;
use crate::path_names::PathNames;

/// The names of parts of paths in files.
const NAMES: PathNames = PathNames::new(&[("up_proj", "c_fc"), ("down_proj", "c_proj")]);

/// A StarCoder 2 model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Starcoder2Config {
    /// Sizes and constants. Files have `rms_norm_eps` as `norm_epsilon`.
    #[serde(flatten)]
    pub decoder: DecoderConfig,
    /// How many tokens back a token sees, itself included; `None` for all.
    pub sliding_window: Option<usize>,
    /// Whether all linear layers of the blocks have a bias.
    #[serde(default = "use_bias")]
    pub use_bias: bool,
}

fn use_bias() -> bool {
    true
}

impl From<DecoderConfig> for Starcoder2Config {
    fn from(decoder: DecoderConfig) -> Self {
        Self { decoder, sliding_window: None, use_bias: true }
    }
}

impl DecoderFamily for Starcoder2Config {
    const NAME: &'static str = "starcoder2";
    const CLASS: &'static str = "Starcoder2ForCausalLM";
    const ACTIVATION: (&'static str, &'static str) = ("hidden_act", "gelu_pytorch_tanh");
    const KEY_NAMES: &'static [(&'static str, &'static str)] = &[("norm_epsilon", "rms_norm_eps")];
    const KEY_TABLE: &'static KeyTable = &KeyTable {
        computes: &[COMPUTED_KEYS, &["norm_epsilon", "sliding_window", "use_bias"]],
        // Published files have these keys, and transformers does not read them: `hidden_act` is the activation, the
        // softmax always has single precision, and `sliding_window` alone says whether there is a window.
        ignored: &[&[
            "activation_function",
            "attention_softmax_in_fp32",
            "scale_attention_softmax_in_fp32",
            "use_sliding_window",
        ]],
        refused: &[&[
            Refused { key: "attention_dropout", harmless: Harmless::Number(0.0) },
            Refused { key: "layer_types", harmless: Harmless::AllOf("full_attention") },
            Refused { key: "scale_attn_weights", harmless: Harmless::True },
            Refused { key: "hidden_act", harmless: Harmless::Word("gelu_pytorch_tanh") },
            Refused { key: "residual_dropout", harmless: Harmless::Number(0.0) },
            Refused { key: "embedding_dropout", harmless: Harmless::Number(0.0) },
            Refused { key: "layer_norm_epsilon", harmless: Harmless::SameAs("norm_epsilon") },
            Refused { key: "norm_type", harmless: Harmless::Word("layer_norm") },
            Refused { key: "mlp_type", harmless: Harmless::Word("default") },
        ]],
    };
    const ABSENT_KEYS: &'static [(&'static str, AbsentKey)] = &[
        ("num_key_value_heads", AbsentKey::Count(2)),
        ("norm_epsilon", AbsentKey::Number(1e-5)),
        ("initializer_range", AbsentKey::Number(0.018_042)),
        ("tie_word_embeddings", AbsentKey::Flag(true)),
    ];

    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn form(&self) -> BlockForm<'_> {
        let layer = LayerForm { window: self.sliding_window, ..LayerForm::default() };
        BlockForm {
            bias: AttentionBias::all(self.use_bias),
            mlp_bias: self.use_bias,
            layer_norms: true,
            activation: Activation::GeluTanh,
            has_no_gate: true,
            layers: vec![layer; self.decoder.num_hidden_layers],
            names: NAMES,
            ..BlockForm::default()
        }
    }

    fn check_own(&self) -> Result<(), ConfigError> {
        require_window(self.sliding_window)
    }
}
