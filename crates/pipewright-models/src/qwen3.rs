//! The Qwen3 family: Llama with a normalisation of each head's queries and keys, and windows in some layers.
//! Keys have the names and the meaning of Hugging Face's `Qwen3ForCausalLM`.

use serde::{Deserialize, Serialize};

use crate::attention::AttentionBias;
use crate::config_key::{Harmless, KeyTable, Refused};
use crate::decoder::{
    BlockForm, COMPUTED_KEYS, DecoderConfig, HeadNorms, LAYER_WINDOW_KEYS, LayerWindows,
    REFUSED_BESIDE_WINDOWS,
};
use crate::decoder_family::DecoderFamily;
use crate::error::ConfigError;
use crate::family::AbsentKey;

/// A Qwen3 model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Qwen3Config {
    /// Sizes and constants.
    #[serde(flatten)]
    pub decoder: DecoderConfig,
    /// Whether the four linear layers of the attention have a bias. Published Qwen3 models have no such bias.
    #[serde(default)]
    pub attention_bias: bool,
    /// The layers with windows.
    #[serde(flatten)]
    pub windows: LayerWindows,
}

impl From<DecoderConfig> for Qwen3Config {
    fn from(decoder: DecoderConfig) -> Self {
        Self { decoder, attention_bias: false, windows: LayerWindows::default() }
    }
}

impl DecoderFamily for Qwen3Config {
    const NAME: &'static str = "qwen3";
    const CLASS: &'static str = "Qwen3ForCausalLM";
    const KEY_TABLE: &'static KeyTable = &KeyTable {
        computes: &[COMPUTED_KEYS, LAYER_WINDOW_KEYS, &["attention_bias"]],
        ignored: &[],
        refused: &[
            REFUSED_BESIDE_WINDOWS,
            &[
                Refused { key: "mlp_bias", harmless: Harmless::False },
                Refused { key: "use_qk_norm", harmless: Harmless::True },
                Refused { key: "qk_norm", harmless: Harmless::True },
            ],
        ],
    };
    const ABSENT_KEYS: &'static [(&'static str, AbsentKey)] = &[
        ("num_key_value_heads", AbsentKey::Count(32)),
        ("head_dim", AbsentKey::Count(128)),
        ("sliding_window", AbsentKey::Count(4096)),
    ];

    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn form(&self) -> BlockForm<'_> {
        BlockForm {
            bias: AttentionBias::all(self.attention_bias),
            head_norms: HeadNorms::Each,
            layers: self.windows.layers(self.decoder.num_hidden_layers),
            ..BlockForm::default()
        }
    }

    fn windows(&self) -> Option<&LayerWindows> {
        Some(&self.windows)
    }

    fn check_own(&self) -> Result<(), ConfigError> {
        self.windows.check(self.decoder.num_hidden_layers)
    }
}
