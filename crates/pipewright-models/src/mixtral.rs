//! The Mixtral family: Mistral with a mixture of experts in place of each feed-forward layer. Keys have the
//! names and the meaning of Hugging Face's `MixtralForCausalLM`.
//!
//! The balance loss of the router is defined as in [`qwen3_moe`](crate::qwen3_moe). In files, a mixture is
//! `block_sparse_moe`, and the matrices gate, down and up of an expert are `w1`, `w2` and `w3`.

use pipewright_shapes::ShapeError;
use pipewright_shapes::decoder::require_window;
use pipewright_shapes::family::{self, Family};
use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Value, json};

use crate::decoder::{BlockForm, DecoderConfig, ExpertKeys, LayerForm, MixtureConfig};
use crate::decoder_family::DecoderFamily;
use crate::path_names::PathNames;

/// The names of parts of paths in files.
const NAMES: PathNames = PathNames::new(&[
    ("mlp", "block_sparse_moe"),
    ("gate_proj", "w1"),
    ("down_proj", "w2"),
    ("up_proj", "w3"),
]);

/// A Mixtral model.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(from = "RawMixtral")]
pub struct MixtralConfig {
    /// Sizes and constants. `intermediate_size` is the inner width of an expert.
    pub decoder: DecoderConfig,
    /// How many tokens back a token sees, itself included; `None` for all.
    pub sliding_window: Option<usize>,
    /// The experts. Every layer has them, their inner width is `intermediate_size`, and the weights of a
    /// token's experts are divided by their sum.
    pub mixture: MixtureConfig,
}

/// The keys as files hold them. The keys of [`MixtureConfig`] that the family does not have are absent.
#[derive(Deserialize)]
struct RawMixtral {
    #[serde(flatten)]
    decoder: DecoderConfig,
    sliding_window: Option<usize>,
    #[serde(flatten)]
    mixture: MixtureConfig,
}

impl From<RawMixtral> for MixtralConfig {
    fn from(RawMixtral { decoder, sliding_window, mixture }: RawMixtral) -> Self {
        Self { sliding_window, mixture: mixture.with_equal_layers(decoder.intermediate_size), decoder }
    }
}

impl Serialize for MixtralConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let own = json!({"sliding_window": self.sliding_window});
        let mut map = serializer.serialize_map(None)?;
        for keys in [json!(self.decoder), own, self.mixture.of_equal_layers()] {
            let Value::Object(keys) = keys else { continue };
            keys.iter().try_for_each(|(key, value)| map.serialize_entry(key, value))?;
        }
        map.end()
    }
}

impl From<DecoderConfig> for MixtralConfig {
    fn from(decoder: DecoderConfig) -> Self {
        let inner = decoder.intermediate_size;
        let mixture = MixtureConfig::of_width(inner).with_equal_layers(inner);
        Self { decoder, sliding_window: None, mixture }
    }
}

impl DecoderFamily for MixtralConfig {
    const ROW: Family = family::MIXTRAL;

    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn form(&self) -> BlockForm<'_> {
        let layer = LayerForm { window: self.sliding_window, ..LayerForm::default() };
        BlockForm {
            layers: vec![layer; self.decoder.num_hidden_layers],
            mixture: Some(&self.mixture),
            expert_keys: ExpertKeys { count: "num_local_experts", inner: "intermediate_size" },
            names: NAMES,
            ..BlockForm::default()
        }
    }

    fn check_own(&self) -> Result<(), ShapeError> {
        require_window(self.sliding_window)
    }
}
