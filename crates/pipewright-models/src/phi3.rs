//! The Phi 3 family, which includes Phi 3.5 and Phi 4: Llama with joined projections, windows, and positions
//! of a part of each head. Keys have the names and the meaning of Hugging Face's `Phi3ForCausalLM`.
//!
//! One matrix makes queries, keys and values, and one makes the gate and the up projection. Several ranks
//! that compute such a layer together have some groups of outputs each
//! ([`OutputParts`](crate::file_layout::OutputParts)).

use pipewright_shapes::ShapeError;
use pipewright_shapes::decoder::require_window;
use pipewright_shapes::family::{self, Family};
use serde::{Deserialize, Serialize};

use crate::decoder::{BlockForm, DecoderConfig, LayerForm, RopeScaling};
use crate::decoder_family::DecoderFamily;

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
    const ROW: Family = family::PHI3;
    const ROTATES_PARTS: bool = true;

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

    fn check_own(&self) -> Result<(), ShapeError> {
        require_window(self.sliding_window)?;
        // transformers refuses the other types for this family.
        match &self.decoder.rope_scaling {
            None | Some(RopeScaling::LongRope(_)) => Ok(()),
            Some(other) => {
                Err(ShapeError::not_supported("rope_scaling.rope_type", other.name(), "default or longrope"))
            }
        }
    }
}
