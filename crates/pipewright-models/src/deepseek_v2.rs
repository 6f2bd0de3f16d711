//! The DeepSeek V2 family: latent attention, and experts in groups (DeepSeek-AI, 2024,
//! <https://arxiv.org/abs/2405.04434>). Keys have the names and the meaning of Hugging Face's
//! `DeepseekV2ForCausalLM`.
//!
//! As there, training has no balance loss, and the weights of a token's experts are not divided by their sum.

use pipewright_shapes::ShapeError;
use pipewright_shapes::decoder::{DeepseekExperts, ExpertGroups, LatentConfig};
use pipewright_shapes::family::{self, Family};
use serde::{Deserialize, Serialize};

use crate::decoder::{BlockForm, DecoderConfig, MixtureConfig};
use crate::decoder_family::DecoderFamily;
use crate::deepseek::{Parts, of_sizes};
use crate::router::{GroupChoice, Scores};

/// A DeepSeek V2 model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeepseekV2Config {
    /// Sizes and constants. `intermediate_size` is for layers without experts, and `head_dim` has no effect.
    #[serde(flatten)]
    pub decoder: DecoderConfig,
    /// The latents of the attention.
    #[serde(flatten)]
    pub latent: LatentConfig,
    /// The experts.
    #[serde(flatten)]
    pub experts: DeepseekExperts,
    /// How experts are chosen.
    #[serde(default)]
    pub topk_method: TopkMethod,
    /// Groups of neighbouring experts, for [`TopkMethod::GroupLimitedGreedy`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub n_group: Option<usize>,
    /// The groups from which a token's experts are chosen: the groups with the most probable experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub topk_group: Option<usize>,
    /// Whether the layers that make latents, and the layer that mixes the heads, have a bias.
    #[serde(default)]
    pub attention_bias: bool,
}

/// How the experts of a token are chosen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TopkMethod {
    /// The most probable of all experts.
    #[default]
    Greedy,
    /// The most probable experts of some groups.
    GroupLimitedGreedy,
}

impl From<DecoderConfig> for DeepseekV2Config {
    fn from(decoder: DecoderConfig) -> Self {
        let (latent, experts) = of_sizes(&decoder);
        let mixture = MixtureConfig { norm_topk_prob: false, ..experts.mixture };
        Self {
            decoder: DecoderConfig { head_dim: None, ..decoder },
            latent,
            experts: DeepseekExperts { mixture, ..experts },
            topk_method: TopkMethod::Greedy,
            n_group: None,
            topk_group: None,
            attention_bias: false,
        }
    }
}

impl DeepseekV2Config {
    fn parts(&self) -> Parts<'_> {
        Parts {
            decoder: &self.decoder,
            latent: &self.latent,
            experts: &self.experts,
            attention_bias: self.attention_bias,
            is_interleaved: true,
        }
    }

    /// Returns the groups of experts, which have no effect if experts are chosen among all.
    fn groups(&self) -> Result<ExpertGroups, ShapeError> {
        let given = |size: Option<usize>, key| size.ok_or_else(|| ShapeError::missing(key, "a number"));
        match self.topk_method {
            TopkMethod::Greedy => Ok(ExpertGroups { count: 1, open: 1 }),
            TopkMethod::GroupLimitedGreedy => Ok(ExpertGroups {
                count: given(self.n_group, "n_group")?,
                open: given(self.topk_group, "topk_group")?,
            }),
        }
    }
}

impl DecoderFamily for DeepseekV2Config {
    const ROW: Family = family::DEEPSEEK_V2;

    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn form(&self) -> BlockForm<'_> {
        let ExpertGroups { count: groups, open: open_groups } =
            self.groups().unwrap_or(ExpertGroups { count: 1, open: 1 });
        let choice = GroupChoice {
            scores: Scores::Softmax,
            groups,
            open_groups,
            group_best: 1,
            count: self.experts.mixture.num_experts_per_tok,
            normalised: false,
            factor: self.experts.routed_scaling_factor,
        };
        self.parts().form(choice, false)
    }

    fn check_own(&self) -> Result<(), ShapeError> {
        self.parts().validate(self.groups()?)
    }
}
