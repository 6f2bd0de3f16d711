//! The sizes of mixers in the types of their modules.

use pipewright::nn::MambaSizes;
use pipewright_shapes::nemotron_h::NemotronHConfig;

use crate::attention::AttentionSizes;

/// Returns the sizes of the Mamba-2 mixers.
pub(crate) fn mamba_sizes(config: &NemotronHConfig) -> MambaSizes {
    MambaSizes {
        heads: config.mamba_num_heads,
        head_dim: config.mamba_head_dim,
        groups: config.n_groups,
        state: config.ssm_state_size,
        taps: config.conv_kernel,
        limits: (config.time_step_range.0, f64::INFINITY),
        epsilon: config.layer_norm_epsilon,
    }
}

impl From<&NemotronHConfig> for AttentionSizes {
    fn from(config: &NemotronHConfig) -> Self {
        Self {
            hidden: config.hidden_size,
            heads: config.num_attention_heads,
            key_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
        }
    }
}
