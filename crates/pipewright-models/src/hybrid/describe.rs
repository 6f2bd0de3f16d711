//! The description of a model as a list of layers with sizes and costs. Parameters that several layers share
//! are counted with the embeddings. The other layers have copies; the small copies of the table of the
//! relations do not count.

use pipewright_schedule::LayerDesc;
use pipewright_schedule::profile::PREDICTION;
use pipewright_shapes::hybrid::{BlockKind, HybridConfig};
use pipewright_shapes::operations::LayerCount;

use super::sizes::{mamba_sizes, scoped_attention};
use crate::attention::AttentionSizes;
use crate::cost::{self, Cost, ELEMENT, FLOAT, LOSS_PASSES, ModelSizes, NORM_PASSES, TABLE_PASSES, TOKEN_ID};
use crate::head_form::prediction_path;
use crate::mamba;

/// Element-wise passes of the embedding of a further prediction, which is copied from the table, joined with
/// the hidden states, and appended to them, forward and backward.
const COPY_PASSES: u64 = 16;

pub(crate) fn describe_layers(config: &HybridConfig, sizes: &ModelSizes) -> Vec<LayerDesc> {
    let ModelSizes { hidden, tokens, .. } = *sizes;
    let embedding = LayerDesc {
        weight: ELEMENT * hidden * (TABLE_PASSES * tables(config) + NORM_PASSES),
        activation_bytes: tokens * (TOKEN_ID * tables(config) + 2 * FLOAT * hidden),
        ..sizes.embedding("model.embed_tokens")
    };
    let mut layers = vec![embedding];
    layers.extend((0..config.blocks().len()).map(|index| block(config, index, sizes)));
    layers.extend((1..=config.prediction_depth()).map(|depth| prediction(config, depth, sizes)));
    let predictions = 1 + config.prediction_depth() as u64;
    // Each prediction has a norm of its own, and all have the matrix of the head.
    layers.push(sizes.head(predictions, sizes.head_cost().for_each_of(predictions)));
    layers
}

/// Returns the number of tables that a token's embedding is the sum of.
fn tables(config: &HybridConfig) -> u64 {
    let platform = usize::from(config.platform_vocab_size > 0);
    (1 + config.ngram_orders.len() + config.structure_vocab_sizes.len() + platform) as u64
}

/// Returns the layer of a block. A block that only some tokens pass costs that share of a whole block, and its
/// router.
fn block(config: &HybridConfig, index: usize, sizes: &ModelSizes) -> LayerDesc {
    let (kind, window) = (config.blocks()[index], scoped_attention(config, index).window);
    let (whole, count) = (mixer_cost(config, kind, window, sizes.tokens), sizes.count(1 + index));
    let path = format!("model.layers.{index}");
    if !config.mod_layers.contains(&index) {
        return sizes.block(index, path, kind.label(), whole);
    }
    let share = |cost: u64| (cost as f64 * config.mod_capacity_factor) as u64;
    let cost = Cost {
        mixing: share(whole.mixing),
        elements: share(whole.elements) + 8 * sizes.hidden,
        kept: share(whole.kept) + 2 * sizes.hidden,
        norms: share(whole.norms),
        feed_forward: share(whole.feed_forward),
        kept_on_devices: (whole.kept_on_devices as f64 * config.mod_capacity_factor) as i64,
    };
    let count = LayerCount { products: share(count.products) + sizes.hidden, ..count };
    cost.layer(count, path, kind.label(), sizes.tokens, sizes.hidden)
}

/// Returns the cost of a mixer with its norm.
fn mixer_cost(config: &HybridConfig, kind: BlockKind, window: Option<usize>, tokens: u64) -> Cost {
    let hidden = config.hidden_size as u64;
    let mixer = match kind {
        // A token sees half of the row on average, or its window.
        BlockKind::Attention => {
            let seen = window.map_or(tokens, |window| (2 * window as u64).min(tokens));
            cost::attention(AttentionSizes::from(config), seen)
        }
        BlockKind::Mamba => mamba::cost(&mamba_sizes(config)),
        BlockKind::Dense => cost::gated(config.intermediate_size as u64),
        BlockKind::Experts => experts_cost(config),
    };
    // Experts keep rows of the normalised states.
    let is_kept = kind == BlockKind::Experts;
    mixer + if is_kept { cost::norm(hidden) } else { cost::norm_of_products(hidden) }
}

/// Returns the cost of a block of experts. A token pays for the experts that are chosen for it, for the
/// shared one and for the router.
fn experts_cost(config: &HybridConfig) -> Cost {
    let hidden = config.hidden_size as u64;
    let (experts, chosen) = (config.num_experts as u64, config.num_experts_per_tok as u64);
    let expert = cost::gated(config.moe_intermediate_size as u64);
    let shared = match config.shared_expert_intermediate_size {
        0 => Cost::default(),
        inner => cost::gated(inner as u64),
    };
    Cost {
        elements: chosen * (expert.elements + 6 * hidden) + shared.elements + experts * LOSS_PASSES,
        kept: chosen * (expert.kept + 3) + shared.kept + 4 * experts,
        feed_forward: shared.feed_forward,
        kept_on_devices: cost::mixture_on_devices(chosen, hidden),
        ..Cost::default()
    }
}

/// Returns the layer of the further prediction of a depth: its embedding, two norms, the projection and
/// the block. It returns a state of each depth so far for each token.
fn prediction(config: &HybridConfig, depth: usize, sizes: &ModelSizes) -> LayerDesc {
    let hidden = sizes.hidden;
    let joined = Cost {
        elements: COPY_PASSES * hidden,
        // The inputs of the projection, and the id.
        kept: 2 * hidden + TOKEN_ID / FLOAT,
        ..Cost::default()
    };
    let block = config
        .prediction_block()
        .map_or_else(Cost::default, |kind| mixer_cost(config, kind, None, sizes.tokens));
    let cost = joined + cost::norm(hidden) + cost::norm(hidden) + block;
    let outputs = (1 + depth as u64) * hidden;
    let count = sizes.count(config.blocks().len() + depth);
    let layer = cost.layer(count, prediction_path(depth), PREDICTION, sizes.tokens, outputs);
    LayerDesc { copied: sizes.table(), ..layer }
}
