//! The DeepSeek V3 family: latent attention, experts in groups, and a correction of the router's scores that
//! is not trained (DeepSeek-AI, 2024, <https://arxiv.org/abs/2412.19437>). Keys have the names and the meaning
//! of Hugging Face's `DeepseekV3ForCausalLM`.
//!
//! As there, the correction has no gradient, and training has no balance loss.

use serde::{Deserialize, Serialize};

use crate::config_key::{Harmless, KeyTable, Refused};
use crate::decoder::{BlockForm, COMPUTED_KEYS, DecoderConfig};
use crate::decoder_family::DecoderFamily;
use crate::deepseek::{
    DEEPSEEK_IGNORED, DEEPSEEK_KEYS, DEEPSEEK_REFUSED, DeepseekExperts, Groups, LatentConfig, Parts, of_sizes,
};
use crate::error::ConfigError;
use crate::family::AbsentKey;
use crate::router::{GroupChoice, Scores};

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
    const NAME: &'static str = "deepseek_v3";
    const CLASS: &'static str = "DeepseekV3ForCausalLM";
    const KEY_TABLE: &'static KeyTable = &KeyTable {
        computes: &[COMPUTED_KEYS, DEEPSEEK_KEYS, &["norm_topk_prob", "rope_interleave"]],
        // The modules that predict further tokens have no part in the loss of transformers either.
        ignored: &[DEEPSEEK_IGNORED, &["num_nextn_predict_layers", "num_mtp_layers"]],
        refused: &[
            DEEPSEEK_REFUSED,
            &[
                Refused { key: "scoring_func", harmless: Harmless::Word("sigmoid") },
                Refused { key: "topk_method", harmless: Harmless::Word("noaux_tc") },
            ],
        ],
    };
    const ABSENT_KEYS: &'static [(&'static str, AbsentKey)] = &[
        ("q_lora_rank", AbsentKey::Count(1536)),
        ("kv_lora_rank", AbsentKey::Count(512)),
        ("qk_rope_head_dim", AbsentKey::Count(64)),
        ("qk_nope_head_dim", AbsentKey::Count(128)),
        ("v_head_dim", AbsentKey::Count(128)),
        ("n_routed_experts", AbsentKey::Count(256)),
        ("num_experts_per_tok", AbsentKey::Count(8)),
        ("moe_intermediate_size", AbsentKey::Count(2048)),
        ("first_k_dense_replace", AbsentKey::Count(3)),
        ("n_shared_experts", AbsentKey::Count(1)),
        ("routed_scaling_factor", AbsentKey::Number(2.5)),
        ("n_group", AbsentKey::Count(8)),
        ("topk_group", AbsentKey::Count(4)),
        ("norm_topk_prob", AbsentKey::Flag(true)),
    ];

    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn form(&self) -> BlockForm<'_> {
        let choice = GroupChoice {
            scores: Scores::Sigmoid,
            groups: self.n_group,
            open_groups: self.topk_group,
            group_best: 2,
            count: self.experts.mixture.num_experts_per_tok,
            normalised: self.experts.mixture.norm_topk_prob,
            factor: self.experts.routed_scaling_factor,
        };
        self.parts().form(choice, true)
    }

    fn check_own(&self) -> Result<(), ConfigError> {
        self.parts().validate(Groups { count: self.n_group, open: self.topk_group })
    }
}
