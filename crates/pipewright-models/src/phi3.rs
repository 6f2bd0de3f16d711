//! The Phi 3 family, which includes Phi 3.5 and Phi 4: Llama with joined projections, windows, and positions
//! of a part of each head. Keys have the names and the meaning of Hugging Face's `Phi3ForCausalLM`.
//!
//! One matrix makes queries, keys and values, and one makes the gate and the up projection. Several ranks
//! that compute such a layer together have some groups of outputs each
//! ([`OutputParts`](crate::file_layout::OutputParts)).

use serde::{Deserialize, Serialize};

use crate::config_key::{Harmless, KeyTable, Refused};
use crate::decoder::{
    BlockForm, COMPUTED_KEYS, DecoderConfig, LayerForm, REFUSED_KEYS, RopeScaling, require_window,
};
use crate::decoder_family::DecoderFamily;
use crate::error::ConfigError;
use crate::family::AbsentKey;

/// A Phi 3 model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Phi3Config {
    /// Sizes and constants.
    #[serde(flatten)]
    pub decoder: DecoderConfig,
    /// How many tokens back a token sees, itself included; `None` for all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sliding_window: Option<usize>,
}

impl From<DecoderConfig> for Phi3Config {
    fn from(decoder: DecoderConfig) -> Self {
        Self { decoder, sliding_window: None }
    }
}

impl DecoderFamily for Phi3Config {
    const NAME: &'static str = "phi3";
    const CLASS: &'static str = "Phi3ForCausalLM";
    const KEY_TABLE: &'static KeyTable = &KeyTable {
        computes: &[COMPUTED_KEYS, &["partial_rotary_factor", "sliding_window"]],
        ignored: &[&["interpolate_factor", "full_attn_mod"]],
        refused: &[
            REFUSED_KEYS,
            &[
                Refused { key: "resid_pdrop", harmless: Harmless::Number(0.0) },
                Refused { key: "embd_pdrop", harmless: Harmless::Number(0.0) },
                Refused { key: "attention_bias", harmless: Harmless::False },
                Refused { key: "mlp_bias", harmless: Harmless::False },
                Refused { key: "lm_head_bias", harmless: Harmless::False },
            ],
        ],
    };
    const ROTATES_PARTS: bool = true;
    /// Older names, which transformers reads so too.
    const LONGROPE_NAMES: &'static [&'static str] = &["su", "yarn"];
    const ABSENT_KEYS: &'static [(&'static str, AbsentKey)] = &[
        ("rms_norm_eps", AbsentKey::Number(1e-5)),
        ("max_position_embeddings", AbsentKey::Count(4096)),
        ("original_max_position_embeddings", AbsentKey::Count(4096)),
    ];

    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn form(&self) -> BlockForm<'_> {
        let layer = LayerForm { window: self.sliding_window, ..LayerForm::default() };
        BlockForm {
            joins_projections: true,
            layers: vec![layer; self.decoder.num_hidden_layers],
            ..BlockForm::default()
        }
    }

    fn check_own(&self) -> Result<(), ConfigError> {
        require_window(self.sliding_window)?;
        // transformers refuses the other types for this family.
        match &self.decoder.rope_scaling {
            None | Some(RopeScaling::LongRope(_)) => Ok(()),
            Some(other) => Err(ConfigError::NotSupported {
                key: "rope_scaling.rope_type",
                value: other.name().to_owned(),
                supported: "default or longrope",
            }),
        }
    }
}
