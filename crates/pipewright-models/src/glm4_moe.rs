//! The GLM 4.5 family with experts (Zhipu AI, 2025, <https://arxiv.org/abs/2508.06471>): the experts of DeepSeek V3
//! behind grouped queries; a part of each head has positions. Keys have the names and the meaning of Hugging
//! Face's `Glm4MoeForCausalLM`.
//!
//! As there, the correction of the router's scores has no gradient, and training has no balance loss.

use pipewright_shapes::ShapeError;
use pipewright_shapes::decoder::{DeepseekExperts, ExpertGroups};
use pipewright_shapes::family::{self, Family};
use serde::{Deserialize, Serialize};

use crate::attention::AttentionBias;
use crate::decoder::{BlockForm, DecoderConfig, QueryKeyNorm};
use crate::decoder_family::DecoderFamily;
use crate::deepseek::{grouped_experts, scores_by_groups};

/// A GLM 4.5 model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Glm4MoeConfig {
    /// Sizes and constants. `intermediate_size` is for layers without experts.
    #[serde(flatten)]
    pub decoder: DecoderConfig,
    /// The experts.
    #[serde(flatten)]
    pub experts: DeepseekExperts,
    /// Groups of neighbouring experts.
    #[serde(default = "one")]
    pub n_group: usize,
    /// The groups from which a token's experts are chosen, as in DeepSeek V3.
    #[serde(default = "one")]
    pub topk_group: usize,
    /// Whether queries, keys and values have a bias.
    #[serde(default)]
    pub attention_bias: bool,
    /// Whether each head's queries and keys are normalised.
    #[serde(default)]
    pub use_qk_norm: bool,
}

fn one() -> usize {
    1
}

impl From<DecoderConfig> for Glm4MoeConfig {
    fn from(decoder: DecoderConfig) -> Self {
        let experts = DeepseekExperts::of_sizes(&decoder);
        let decoder = DecoderConfig { partial_rotary_factor: 0.5, ..decoder };
        Self { decoder, experts, n_group: 1, topk_group: 1, attention_bias: false, use_qk_norm: false }
    }
}

impl Glm4MoeConfig {
    fn groups(&self) -> ExpertGroups {
        ExpertGroups { count: self.n_group, open: self.topk_group }
    }
}

impl DecoderFamily for Glm4MoeConfig {
    const ROW: Family = family::GLM4_MOE;
    const ROTATES_PARTS: bool = true;

    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn form(&self) -> BlockForm<'_> {
        BlockForm {
            bias: AttentionBias { inputs: self.attention_bias, output: false },
            head_norms: if self.use_qk_norm { QueryKeyNorm::Head } else { QueryKeyNorm::None },
            ..grouped_experts(&self.experts, scores_by_groups(&self.experts, self.groups()), true)
        }
    }

    fn check_own(&self) -> Result<(), ShapeError> {
        self.experts.validate()?;
        self.groups().validate(&self.experts.mixture)
    }
}
