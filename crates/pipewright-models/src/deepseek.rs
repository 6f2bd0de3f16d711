//! The parts that the families [`deepseek_v2`](crate::deepseek_v2) and [`deepseek_v3`](crate::deepseek_v3)
//! share: latent attention, and experts in groups next to experts that every token goes through.
//! [`glm4_moe`](crate::glm4_moe) has such experts too.

use pipewright_shapes::ShapeError;
use pipewright_shapes::decoder::{DeepseekExperts, ExpertGroups, LatentConfig};

use crate::attention::AttentionBias;
use crate::decoder::{BlockForm, DecoderConfig, ExpertKeys, Factors, RopeScaling, RouterForm, SharedForm};
use crate::latent_attention::LatentForm;
use crate::router::{GroupChoice, Scores};

/// The parts of a model that both families have.
#[derive(Clone, Copy)]
pub(crate) struct Parts<'a> {
    pub(crate) decoder: &'a DecoderConfig,
    pub(crate) latent: &'a LatentConfig,
    pub(crate) experts: &'a DeepseekExperts,
    pub(crate) attention_bias: bool,
    /// Whether rotated pairs are neighbours.
    pub(crate) is_interleaved: bool,
}

/// Returns the usual sizes of a model: its latents and its experts.
pub(crate) fn of_sizes(decoder: &DecoderConfig) -> (LatentConfig, DeepseekExperts) {
    (LatentConfig::of_sizes(decoder), DeepseekExperts::of_sizes(decoder))
}

/// Returns the form of a model with these experts, whose router chooses by `choice`.
pub(crate) fn grouped_experts(
    experts: &DeepseekExperts,
    choice: GroupChoice,
    is_corrected: bool,
) -> BlockForm<'_> {
    let inner = experts.n_shared_experts * experts.mixture.moe_intermediate_size;
    BlockForm {
        mixture: Some(&experts.mixture),
        router: Some(RouterForm { choice, is_corrected }),
        expert_keys: ExpertKeys { count: "n_routed_experts", ..ExpertKeys::default() },
        shared_expert: Some(SharedForm { inner, has_gate: false }),
        ..BlockForm::default()
    }
}

/// Returns the choice of DeepSeek V3: scores are sigmoids, and groups compete by the sum of their two best experts.
pub(crate) fn scores_by_groups(experts: &DeepseekExperts, groups: ExpertGroups) -> GroupChoice {
    GroupChoice {
        scores: Scores::Sigmoid,
        groups: groups.count,
        open_groups: groups.open,
        group_best: 2,
        count: experts.mixture.num_experts_per_tok,
        normalised: experts.mixture.norm_topk_prob,
        factor: experts.routed_scaling_factor,
    }
}

impl<'a> Parts<'a> {
    /// Returns the form of the model, whose router chooses by `choice`.
    pub(crate) fn form(self, choice: GroupChoice, is_corrected: bool) -> BlockForm<'a> {
        let Self { decoder, latent, experts, attention_bias, is_interleaved } = self;
        let latent = LatentForm {
            query_rank: latent.q_lora_rank,
            key_rank: latent.kv_lora_rank,
            rotated: latent.qk_rope_head_dim,
            unrotated: latent.qk_nope_head_dim,
            value: latent.v_head_dim,
            is_interleaved,
        };
        let scaling = match &decoder.rope_scaling {
            Some(RopeScaling::Yarn(yarn)) => yarn.score_factor(),
            _ => 1.0,
        };
        let scores = Some(scaling / (latent.head_dim() as f64).sqrt());
        BlockForm {
            bias: AttentionBias::all(attention_bias),
            factors: Factors { scores, ..Factors::default() },
            latent: Some(latent),
            ..grouped_experts(experts, choice, is_corrected)
        }
    }

    /// Checks the values of both families.
    pub(crate) fn validate(self, groups: ExpertGroups) -> Result<(), ShapeError> {
        self.latent.validate(self.decoder.num_attention_heads)?;
        self.experts.validate()?;
        groups.validate(&self.experts.mixture)?;
        match &self.decoder.rope_scaling {
            Some(other @ (RopeScaling::Dynamic { .. } | RopeScaling::LongRope(_))) => {
                Err(ShapeError::not_supported(
                    "rope_scaling.rope_type",
                    other.name(),
                    "default, linear, yarn or llama3",
                ))
            }
            _ => Ok(()),
        }
    }
}
