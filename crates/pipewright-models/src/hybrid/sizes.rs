//! The sizes of mixers and of further predictions in the types of their modules.

use pipewright::nn::{MambaSizes, ScopedAttention};
use pipewright_shapes::hybrid::HybridConfig;

use crate::attention::AttentionSizes;
use crate::head_form::FurtherPredictions;

/// Returns the attention of a block.
pub(crate) fn scoped_attention(config: &HybridConfig, index: usize) -> ScopedAttention {
    let window = config.window_sizes.get(index).copied().flatten().filter(|window| *window > 0);
    let rope_theta = (!config.nope_layers.contains(&index)).then_some(config.rope_theta);
    ScopedAttention { head_dim: config.head_dim(), rope_theta, window }
}

/// Returns the sizes of the Mamba-2 mixers.
pub(crate) fn mamba_sizes(config: &HybridConfig) -> MambaSizes {
    MambaSizes {
        heads: config.mamba_num_heads,
        head_dim: config.mamba_head_dim,
        groups: config.n_groups,
        state: config.ssm_state_size,
        taps: config.conv_kernel,
        limits: (0.0, f64::INFINITY),
        epsilon: config.rms_norm_eps,
    }
}

/// Returns the predictions of further tokens.
pub(crate) fn further(config: &HybridConfig) -> FurtherPredictions {
    FurtherPredictions {
        depth: config.prediction_depth(),
        loss_weight: config.mtp_loss_weight,
        bos_token_id: config.bos_token_id,
    }
}

impl From<&HybridConfig> for AttentionSizes {
    fn from(config: &HybridConfig) -> Self {
        Self {
            hidden: config.hidden_size,
            heads: config.num_attention_heads,
            key_heads: config.kv_heads(),
            head_dim: config.head_dim(),
        }
    }
}
