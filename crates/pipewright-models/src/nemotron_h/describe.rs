//! The description of a model as a list of layers with sizes and costs.

use pipewright_schedule::LayerDesc;
use pipewright_shapes::nemotron_h::{BlockKind, Experts, NemotronHConfig};

use super::sizes::mamba_sizes;
use crate::attention::AttentionSizes;
use crate::cost::{self, BIAS_PASSES, Cost, GATE_PASSES, ModelSizes};
use crate::mamba;

/// Element-wise passes of a rectifier, forward and backward.
const RECTIFIER_PASSES: u64 = GATE_PASSES / 2;

pub(crate) fn describe_layers(config: &NemotronHConfig, sizes: &ModelSizes) -> Vec<LayerDesc> {
    let ModelSizes { hidden, tokens, .. } = *sizes;
    let block = |(index, &kind): (usize, &BlockKind)| {
        // Experts keep rows of the normalised states.
        let is_kept = kind == BlockKind::Experts;
        let norm = if is_kept { cost::norm(hidden) } else { cost::norm_of_products(hidden) };
        let cost = mixer_cost(config, kind, tokens) + norm;
        sizes.block(index, format!("backbone.layers.{index}"), kind.label(), cost)
    };
    let mut layers = vec![sizes.embedding("backbone.embeddings")];
    layers.extend(config.blocks.iter().enumerate().map(block));
    layers.push(sizes.head(1, sizes.head_cost()));
    layers
}

fn mixer_cost(config: &NemotronHConfig, kind: BlockKind, tokens: u64) -> Cost {
    let hidden = config.hidden_size as u64;
    match kind {
        BlockKind::Mamba => mamba_cost(config),
        BlockKind::Attention => cost::attention(AttentionSizes::from(config), tokens),
        BlockKind::Mlp => mlp_cost(config),
        BlockKind::Experts => {
            config.experts.as_ref().map_or(Cost::default(), |experts| experts_cost(experts, hidden))
        }
    }
}

fn mamba_cost(config: &NemotronHConfig) -> Cost {
    let sizes = mamba_sizes(config);
    let biases = if config.use_bias { (sizes.projected() + config.hidden_size) as u64 } else { 0 };
    mamba::cost(&sizes) + Cost { elements: BIAS_PASSES * biases, ..Cost::default() }
}

fn mlp_cost(config: &NemotronHConfig) -> Cost {
    let (hidden, inner) = (config.hidden_size as u64, config.intermediate_size as u64);
    let biases = if config.mlp_bias { hidden + inner } else { 0 };
    Cost {
        elements: RECTIFIER_PASSES * inner + BIAS_PASSES * biases,
        kept: cost::ungated(inner).kept,
        feed_forward: inner,
        ..Cost::default()
    }
}

/// Returns the cost of a block of experts. A token pays for the experts that are chosen for it, for the
/// shared one, for the router and for the projections around the experts; it is copied for each choice.
fn experts_cost(config: &Experts, hidden: u64) -> Cost {
    let (experts, chosen) = (config.n_routed_experts as u64, config.num_experts_per_tok as u64);
    let (inner, shared) =
        (config.moe_intermediate_size as u64, config.moe_shared_expert_intermediate_size as u64);
    let width = config.moe_latent_size.map_or(hidden, |latent| latent as u64);
    let latent = config.moe_latent_size.map_or(0, |latent| latent as u64);
    let elements = RECTIFIER_PASSES * (chosen * inner + shared) + 6 * chosen * width + 8 * experts;
    Cost {
        elements,
        kept: cost::ungated(chosen * inner + shared).kept + 2 * latent + 2 * experts + 3 * chosen,
        // Only the shared expert's activation is computed again.
        feed_forward: shared,
        kept_on_devices: cost::mixture_on_devices(chosen, width),
        ..Cost::default()
    }
}
