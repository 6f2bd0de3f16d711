//! The feed-forward parts of a configuration.

use super::keys::{Keys, MAX_BLOCKS, MAX_SIZE, contradiction, missing};
use crate::error::ShapeError;
use crate::family::Family;
use crate::model::{Dense, Experts, FeedForward};

/// The activations of feed-forward parts without a gate, in families whose form the activation decides.
const NOT_GATED: [&str; 5] = ["relu2", "gelu_new", "relu", "gelu_fast", "xielu"];

/// The keys of the width of a part without experts.
const INNER: [&str; 4] = ["intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim"];

/// The feed-forward parts of a model, and the blocks that have which.
pub(super) struct FeedForwards {
    /// The part without experts; `None` if the file does not say how wide it is.
    dense: Option<Dense>,
    /// The part with experts.
    pub(super) experts: Option<FeedForward>,
    /// The first blocks, which have no experts.
    first_dense: u64,
    /// Every how many blocks one has experts.
    every: u64,
    /// The block among these that has them.
    phase: u64,
    /// Further blocks without experts.
    dense_only: Vec<u64>,
    /// The blocks with experts, if they are listed.
    listed: Option<Vec<u64>>,
}

impl FeedForwards {
    /// Reads the feed-forward parts of a model with `layers` blocks.
    pub(super) fn read(
        keys: &mut Keys<'_>,
        family: &Family,
        hidden: u64,
        layers: u64,
    ) -> Result<Self, ShapeError> {
        let given = keys.size(&INNER, 1, MAX_SIZE)?;
        let usual = given.or_else(|| family.four_times.then(|| keys.fill(INNER[0], 4 * hidden)));
        let gated = is_gated(keys, family)?;
        let experts = experts(keys, usual, gated)?;
        // As in transformers, this and `mlp_only_layers` may name more blocks than the model has.
        let first_dense = keys.size(&["first_k_dense_replace"], 0, MAX_BLOCKS)?.unwrap_or(0);
        // DeepSeek counts blocks from 0, the others from 1.
        let from_zero = keys.size(&["moe_layer_freq"], 1, MAX_BLOCKS)?;
        let names = ["decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval"];
        let from_one = keys.size(&names, 1, MAX_BLOCKS)?;
        // Llama 4 and Granite have a key of their own for blocks without experts.
        let without = if experts.is_some() { "intermediate_size_mlp" } else { "shared_intermediate_size" };
        let inner = keys.size(&[without], 1, MAX_SIZE)?.or(usual);
        Ok(Self {
            dense: inner.map(|inner| Dense { inner, gated }),
            experts,
            first_dense,
            every: from_zero.or(from_one).unwrap_or(1),
            phase: u64::from(from_zero.is_none()),
            dense_only: keys.layer_numbers("mlp_only_layers", MAX_BLOCKS)?.unwrap_or_default(),
            listed: keys.layer_numbers("moe_layers", layers)?,
        })
    }

    /// Returns the part without experts.
    pub(super) fn dense(&self) -> Result<FeedForward, ShapeError> {
        self.dense.map(FeedForward::Dense).ok_or_else(|| missing(&INNER))
    }

    /// Returns the feed-forward part of a block.
    pub(super) fn of_block(&self, layer: u64) -> Result<FeedForward, ShapeError> {
        let by_rule = layer >= self.first_dense
            && (layer + self.phase).is_multiple_of(self.every)
            && !self.dense_only.contains(&layer);
        let has_experts = self.listed.as_ref().map_or(by_rule, |listed| listed.contains(&layer));
        match self.experts.filter(|_| has_experts) {
            Some(experts) => Ok(experts),
            None => self.dense(),
        }
    }
}

fn is_gated(keys: &mut Keys<'_>, family: &Family) -> Result<bool, ShapeError> {
    let names = ["hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act", "activation"];
    let activation = keys.text(&names)?;
    let by_activation = !activation.is_some_and(|activation| NOT_GATED.contains(&activation));
    Ok(family.gated.unwrap_or(by_activation))
}

/// Reads the experts. `usual` is the width of a part without experts.
fn experts(keys: &mut Keys<'_>, usual: Option<u64>, gated: bool) -> Result<Option<FeedForward>, ShapeError> {
    let width = keys.size(&["moe_latent_size"], 1, MAX_SIZE)?;
    let names = ["n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"];
    let Some(count) = keys.size(&names, 0, MAX_SIZE)?.filter(|&count| count > 0) else {
        // The other keys of experts have no meaning.
        keys.mark(&["num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"]);
        return Ok(None);
    };
    let names = ["num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_topk", "moe_k"];
    let per_token = keys.needed(&names)?;
    if per_token > count {
        let expected = format!("at most the {count} experts");
        return Err(contradiction("num_experts_per_tok", per_token, expected));
    }
    let given = keys.size(&["moe_intermediate_size"], 1, MAX_SIZE)?;
    // Mixtral's experts have the width of a part without experts.
    let names = [&["moe_intermediate_size"][..], &INNER].concat();
    let inner = given.or(usual).ok_or_else(|| missing(&names))?;
    let shared_inner = shared_inner(keys, inner)?;
    let experts = Experts { count, per_token, expert: Dense { inner, gated }, shared_inner };
    Ok(Some(match width {
        Some(width) => FeedForward::LatentExperts { experts, width },
        None => FeedForward::Experts(experts),
    }))
}

/// Reads the width of the experts that all tokens pass.
fn shared_inner(keys: &mut Keys<'_>, inner: u64) -> Result<u64, ShapeError> {
    let shared =
        keys.size(&["n_shared_experts", "num_shared_experts", "moe_num_shared_experts"], 0, MAX_SIZE)?;
    let names = [
        "moe_shared_expert_intermediate_size",
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
    ];
    let of_one = keys.size(&names, 0, MAX_SIZE)?;
    Ok(of_one.map_or_else(
        || shared.unwrap_or(0).saturating_mul(inner),
        |inner| inner.saturating_mul(shared.unwrap_or(1)),
    ))
}
