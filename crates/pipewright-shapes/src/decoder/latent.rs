//! The keys of the latent attention and of the experts in groups of DeepSeek's families.

use serde::{Deserialize, Serialize};

use super::config::DecoderConfig;
use super::mixture::MixtureConfig;
use crate::error::ShapeError;
use crate::key_range::{MAX_BLOCKS, divisible, require, sizes, width};

/// The sizes of a latent attention; they have the names of Hugging Face's `config.json`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LatentConfig {
    /// Width of the latent of queries; `None` if queries are made of the hidden states.
    pub q_lora_rank: Option<usize>,
    /// Width of the latent of keys and values.
    pub kv_lora_rank: usize,
    /// Elements of a head of queries and keys that are rotated by the positions.
    pub qk_rope_head_dim: usize,
    /// Elements of a head of queries and keys that are not rotated.
    pub qk_nope_head_dim: usize,
    /// Elements of a head of values.
    pub v_head_dim: usize,
}

impl LatentConfig {
    /// Makes the sizes for a small model whose heads of values have the usual width. Both latents are
    /// narrower than the hidden states.
    pub fn of_sizes(decoder: &DecoderConfig) -> Self {
        let head = decoder.head_dim();
        Self {
            q_lora_rank: Some((decoder.hidden_size / 2).max(1)),
            kv_lora_rank: (decoder.hidden_size / 4).max(1),
            qk_rope_head_dim: (head / 2).next_multiple_of(2).max(2),
            qk_nope_head_dim: head,
            v_head_dim: head,
        }
    }

    /// Checks that the sizes make an attention with this number of heads.
    ///
    /// # Errors
    /// When a key is out of range; the error names the first.
    pub fn validate(&self, heads: usize) -> Result<(), ShapeError> {
        let Self { q_lora_rank, kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim, v_head_dim } = *self;
        sizes(&[
            ("q_lora_rank", q_lora_rank.unwrap_or(1)),
            ("kv_lora_rank", kv_lora_rank),
            ("qk_rope_head_dim", qk_rope_head_dim),
            ("qk_nope_head_dim", qk_nope_head_dim),
            ("v_head_dim", v_head_dim),
        ])?;
        let parts = [("qk_rope_head_dim", qk_rope_head_dim), ("qk_nope_head_dim", qk_nope_head_dim)];
        for (key, size) in parts {
            let range = "even, because the rotary embedding rotates pairs";
            require(size.is_multiple_of(2), key, size, range)?;
        }
        let heads = ("num_attention_heads", heads);
        parts.into_iter().chain([("v_head_dim", v_head_dim)]).try_for_each(|part| width(part, heads))
    }
}

/// The experts of a DeepSeek model. The keys of `config.json` that both families have are `n_routed_experts`,
/// `num_experts_per_tok`, `moe_intermediate_size`, `norm_topk_prob`, `first_k_dense_replace`,
/// `n_shared_experts` and `routed_scaling_factor`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "RawExperts", into = "RawExperts")]
pub struct DeepseekExperts {
    /// The experts that a router chooses. All layers from `first_k_dense_replace` on have them.
    pub mixture: MixtureConfig,
    /// Experts that every token goes through. They are one that is as many times as wide.
    pub n_shared_experts: usize,
    /// The factor of the weights of the chosen experts.
    pub routed_scaling_factor: f64,
}

impl DeepseekExperts {
    /// Makes the configuration of a model with eight experts in every layer but the first one.
    pub fn of_sizes(decoder: &DecoderConfig) -> Self {
        let mixture = MixtureConfig::of_width(decoder.intermediate_size);
        let mixture = MixtureConfig { mlp_only_layers: vec![0], ..mixture };
        Self { mixture, n_shared_experts: 1, routed_scaling_factor: 1.0 }
    }

    /// Checks that the numbers make a mixture.
    ///
    /// # Errors
    /// When a key is out of range; the error names the first.
    pub fn validate(&self) -> Result<(), ShapeError> {
        self.mixture.validate_as("n_routed_experts")?;
        sizes(&[("n_shared_experts", self.n_shared_experts)])?;
        let inner = ("moe_intermediate_size", self.mixture.moe_intermediate_size);
        width(("n_shared_experts", self.n_shared_experts), inner)?;
        let factor = self.routed_scaling_factor;
        require(factor.is_finite(), "routed_scaling_factor", factor, "a finite number")
    }
}

/// The keys as files hold them.
#[derive(Serialize, Deserialize)]
struct RawExperts {
    n_routed_experts: usize,
    num_experts_per_tok: usize,
    moe_intermediate_size: usize,
    #[serde(default)]
    norm_topk_prob: bool,
    first_k_dense_replace: usize,
    n_shared_experts: usize,
    routed_scaling_factor: f64,
}

impl TryFrom<RawExperts> for DeepseekExperts {
    type Error = ShapeError;

    fn try_from(raw: RawExperts) -> Result<Self, ShapeError> {
        let dense = raw.first_k_dense_replace;
        require(dense as u64 <= MAX_BLOCKS, "first_k_dense_replace", dense, "at most 10000")?;
        let mixture = MixtureConfig {
            num_experts: raw.n_routed_experts,
            num_experts_per_tok: raw.num_experts_per_tok,
            moe_intermediate_size: raw.moe_intermediate_size,
            norm_topk_prob: raw.norm_topk_prob,
            mlp_only_layers: (0..dense).collect(),
            ..MixtureConfig::of_width(raw.moe_intermediate_size)
        };
        let (n_shared_experts, routed_scaling_factor) = (raw.n_shared_experts, raw.routed_scaling_factor);
        let config = Self { mixture, n_shared_experts, routed_scaling_factor };
        config.validate()?;
        Ok(config)
    }
}

impl From<DeepseekExperts> for RawExperts {
    fn from(config: DeepseekExperts) -> Self {
        Self {
            n_routed_experts: config.mixture.num_experts,
            num_experts_per_tok: config.mixture.num_experts_per_tok,
            moe_intermediate_size: config.mixture.moe_intermediate_size,
            norm_topk_prob: config.mixture.norm_topk_prob,
            first_k_dense_replace: config.mixture.mlp_only_layers.len(),
            n_shared_experts: config.n_shared_experts,
            routed_scaling_factor: config.routed_scaling_factor,
        }
    }
}

/// Groups of neighbouring experts.
#[derive(Clone, Copy)]
pub struct ExpertGroups {
    /// `n_group`.
    pub count: usize,
    /// `topk_group`: the groups from which a token's experts are chosen.
    pub open: usize,
}

impl ExpertGroups {
    /// Checks that these groups make a choice of a mixture's experts.
    pub fn validate(self, mixture: &MixtureConfig) -> Result<(), ShapeError> {
        let Self { count, open } = self;
        sizes(&[("n_group", count), ("topk_group", open)])?;
        divisible(("n_routed_experts", mixture.num_experts), ("n_group", count))?;
        let group = mixture.num_experts / count;
        let range = "at most half of `n_routed_experts`";
        require(count == 1 || group >= 2, "n_group", count, range)?;
        require(open <= count, "topk_group", open, "at most `n_group`")?;
        let chosen = mixture.num_experts_per_tok;
        let range = "at most the experts of the `topk_group` groups that are chosen from";
        require(chosen <= open * group, "num_experts_per_tok", chosen, range)
    }
}
