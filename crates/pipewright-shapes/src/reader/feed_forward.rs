//! The feed-forward parts of a configuration.

use super::keys::{Keys, MAX_BLOCKS, MAX_SIZE, contradiction, missing};
use crate::error::ShapeError;
use crate::family::Family;
use crate::model::{Dense, Experts, FeedForward, MAX_GROUPS};

/// The activations of feed-forward parts without a gate, in families whose form the activation decides.
const NOT_GATED: [&str; 5] = ["relu2", "gelu_new", "relu", "gelu_fast", "xielu"];

/// The keys of the width of a part without experts.
const INNER: [&str; 4] = ["intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim"];

/// The key of the last block with experts; -1 is the last block of the model.
const LAST_SPARSE: &str = "moe_layer_end_index";

/// The feed-forward parts of a model, and the blocks that have which.
pub(super) struct FeedForwards {
    /// The part without experts; `None` if the file does not say how wide it is.
    dense: Option<Dense>,
    /// The part with experts.
    pub(super) experts: Option<FeedForward>,
    /// The first blocks, which have no experts.
    first_dense: u64,
    /// The block after the last one with experts.
    after_last: u64,
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
        let names = ["first_k_dense_replace", "moe_layer_start_index"];
        let first_dense = keys.size(&names, 0, MAX_BLOCKS)?.unwrap_or(0);
        let is_last = keys.value(&[LAST_SPARSE]).is_some_and(|(_, value)| value.as_i64() == Some(-1));
        let last = if is_last { None } else { keys.size(&[LAST_SPARSE], 0, MAX_BLOCKS)? };
        let after_last = last.map_or(layers, |last| last + 1);
        let listed = listed(keys, layers)?;
        // DeepSeek counts blocks from 0, the others from 1.
        let from_zero = if listed.is_some() { None } else { keys.size(&["moe_layer_freq"], 1, MAX_BLOCKS)? };
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
            after_last,
            listed,
        })
    }

    /// Returns the part without experts.
    pub(super) fn dense(&self) -> Result<FeedForward, ShapeError> {
        self.dense.map(FeedForward::Dense).ok_or_else(|| missing(&INNER))
    }

    /// Returns the feed-forward part of a block.
    pub(super) fn of_block(&self, layer: u64) -> Result<FeedForward, ShapeError> {
        let by_rule = (self.first_dense..self.after_last).contains(&layer)
            && (layer + self.phase).is_multiple_of(self.every)
            && !self.dense_only.contains(&layer);
        let has_experts = self.listed.as_ref().map_or(by_rule, |listed| listed.contains(&layer));
        match self.experts.filter(|_| has_experts) {
            Some(experts) => Ok(experts),
            None => self.dense(),
        }
    }
}

/// Returns the blocks with experts, if the file lists them: by their numbers, or with a word or a flag for each block.
fn listed(keys: &mut Keys<'_>, layers: u64) -> Result<Option<Vec<u64>>, ShapeError> {
    if let Some((_, words)) = keys.words_of_blocks("mlp_layer_types")? {
        keys.mark(&["moe_layer_freq"]);
        let sparse = (0..).zip(words).filter(|(_, word)| *word != "dense").map(|(layer, _)| layer);
        return Ok(Some(sparse.collect()));
    }
    let has_flags = keys.value(&["moe_layer_freq"]).is_some_and(|(_, value)| value.is_array());
    if has_flags {
        let flags = keys.flags_of_blocks("moe_layer_freq")?.unwrap_or_default();
        let sparse = (0..).zip(flags).filter(|(_, flag)| *flag == 1).map(|(layer, _)| layer);
        return Ok(Some(sparse.collect()));
    }
    keys.layer_numbers("moe_layers", layers)
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
    let (groups, groups_per_token) = groups(keys, count, per_token)?;
    let expert = Dense { inner, gated };
    let experts = Experts { count, per_token, expert, shared_inner, groups, groups_per_token };
    Ok(Some(match width {
        Some(width) => FeedForward::LatentExperts { experts, width },
        None => FeedForward::Experts(experts),
    }))
}

/// Reads the groups of `count` experts, and the groups from which the `per_token` experts of a token are chosen.
fn groups(keys: &mut Keys<'_>, count: u64, per_token: u64) -> Result<(u64, u64), ShapeError> {
    let groups = keys.size(&["n_group", "num_expert_group"], 1, MAX_GROUPS)?;
    let open = keys.size(&["topk_group"], 1, MAX_SIZE)?;
    // DeepSeek V2 chooses among all experts with this method.
    let is_greedy = keys.text(&["topk_method"])? == Some("greedy");
    let Some(groups) = groups.filter(|_| !is_greedy) else { return Ok((1, 1)) };
    let open = open.unwrap_or(groups);
    if !count.is_multiple_of(groups) {
        let expected = format!("a number that divides the {count} experts");
        return Err(contradiction("n_group", groups, expected));
    }
    if open > groups {
        return Err(contradiction("topk_group", open, format!("at most the {groups} groups of `n_group`")));
    }
    let eligible = open * (count / groups);
    if per_token > eligible {
        let expected = format!("at most the {eligible} experts of the `topk_group` groups");
        return Err(contradiction("num_experts_per_tok", per_token, expected));
    }
    Ok((groups, open))
}

/// Reads the width of the experts that all tokens pass.
fn shared_inner(keys: &mut Keys<'_>, inner: u64) -> Result<u64, ShapeError> {
    let shared = keys.size(
        &["n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert"],
        0,
        MAX_SIZE,
    )?;
    // Hunyuan's flag says that there is a shared expert, whose number the file has too.
    keys.mark(&["use_mixed_mlp_moe"]);
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
