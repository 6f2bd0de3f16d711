//! The DeepSeek V3 family: latent attention, experts in groups, and a correction of the router's scores that
//! is not trained (DeepSeek-AI, 2024, <https://arxiv.org/abs/2412.19437>). Keys have the names and the meaning
//! of Hugging Face's `DeepseekV3ForCausalLM`.
//!
//! As there, the correction has no gradient, and training has no balance loss.

use pipewright_shapes::ShapeError;
use pipewright_shapes::decoder::{DeepseekExperts, ExpertGroups, LatentConfig};
use pipewright_shapes::family::{self, Family};
use serde::{Deserialize, Serialize};

use crate::decoder::{BlockForm, DecoderConfig};
use crate::decoder_family::DecoderFamily;
use crate::deepseek::{Parts, of_sizes, scores_by_groups};

/// A DeepSeek V3 model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeepseekV3Config {
    /// Sizes and constants. `intermediate_size` is for layers without experts, and `head_dim` has no effect.
    #[serde(flatten)]
    pub decoder: DecoderConfig,
    /// The latents of the attention.
    #[serde(flatten)]
    pub latent: LatentConfig,
    /// The experts.
    #[serde(flatten)]
    pub experts: DeepseekExperts,
    /// Groups of neighbouring experts.
    pub n_group: usize,
    /// The groups from which a token's experts are chosen: the groups with the largest sums of their two best
    /// corrected scores.
    pub topk_group: usize,
    /// Whether rotated pairs are neighbours.
    #[serde(default = "rope_interleave")]
    pub rope_interleave: bool,
    /// Whether the layers that make latents, and the layer that mixes the heads, have a bias.
    #[serde(default)]
    pub attention_bias: bool,
}

fn rope_interleave() -> bool {
    true
}

impl From<DecoderConfig> for DeepseekV3Config {
    fn from(decoder: DecoderConfig) -> Self {
        let (latent, experts) = of_sizes(&decoder);
        Self {
            decoder: DecoderConfig { head_dim: None, ..decoder },
            latent,
            experts: DeepseekExperts { routed_scaling_factor: 2.5, ..experts },
            n_group: 1,
            topk_group: 1,
            rope_interleave: true,
            attention_bias: false,
        }
    }
}

impl DeepseekV3Config {
    fn groups(&self) -> ExpertGroups {
        ExpertGroups { count: self.n_group, open: self.topk_group }
    }

    fn parts(&self) -> Parts<'_> {
        Parts {
            decoder: &self.decoder,
            latent: &self.latent,
            experts: &self.experts,
            attention_bias: self.attention_bias,
            is_interleaved: self.rope_interleave,
        }
    }
}

impl DecoderFamily for DeepseekV3Config {
    const ROW: Family = family::DEEPSEEK_V3;

    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn form(&self) -> BlockForm<'_> {
        let choice = scores_by_groups(&self.experts, self.groups());
        self.parts().form(choice, true)
    }

    fn check_own(&self) -> Result<(), ShapeError> {
        self.parts().validate(self.groups())
    }
}
