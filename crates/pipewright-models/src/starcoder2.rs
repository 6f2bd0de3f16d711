//! The StarCoder 2 family: Llama with layer normalisations, biases, windows, and feed-forward layers without
//! a gate. Keys have the names and the meaning of Hugging Face's `Starcoder2ForCausalLM`. In files, the
//! matrices of a feed-forward layer are `c_fc` and `c_proj`.

use pipewright_shapes::ShapeError;
use pipewright_shapes::decoder::require_window;
use pipewright_shapes::family::{self, Family};
use serde::{Deserialize, Serialize};

use crate::attention::AttentionBias;
use crate::decoder::{Activation, BlockForm, DecoderConfig, LayerForm};
use crate::decoder_family::DecoderFamily;
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
    const ROW: Family = family::STARCODER2;
    const ACTIVATION: (&'static str, &'static str) = ("hidden_act", "gelu_pytorch_tanh");

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

    fn check_own(&self) -> Result<(), ShapeError> {
        require_window(self.sliding_window)
    }
}
