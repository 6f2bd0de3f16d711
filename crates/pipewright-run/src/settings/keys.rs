//! The sections and keys of a configuration, and the known name that is nearest to a misspelt one.
//!
//! The types, ranges and defaults are in the file of each section.

use std::fmt;

use pipewright_schedule::words;

/// The word that the user probably meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Suggestion {
    /// Another name in the same place.
    Name(String),
    /// A key of some section.
    KeyOf {
        /// The section.
        section: String,
        /// The key.
        key: String,
    },
}

impl fmt::Display for Suggestion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => write!(f, "`{name}`"),
            Self::KeyOf { section, key } => write!(f, "`{key}` in [{section}]"),
        }
    }
}

/// The sections in the order in which they are written, each with its keys.
pub(super) const SECTIONS: &[(&str, &[&str])] = &[
    (
        "model",
        &[
            "from",
            "architecture",
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "rms_norm_eps",
            "rope_theta",
            "tie_word_embeddings",
            "head_dim",
            "rope_scaling",
            "sliding_window",
            "use_sliding_window",
            "max_window_layers",
            "sliding_window_pattern",
            "rope_local_base_freq",
            "no_rope_layers",
            "no_rope_layer_interval",
            "embedding_multiplier",
            "residual_multiplier",
            "attention_multiplier",
            "logits_scaling",
            "partial_rotary_factor",
            "qkv_bias",
            "query_pre_attn_scalar",
            "layer_types",
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "attention_bias",
            "mlp_bias",
            "num_experts",
            "num_local_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "norm_topk_prob",
            "decoder_sparse_step",
            "mlp_only_layers",
            "router_aux_loss_coef",
            "output_router_logits",
            "layers_block_type",
            "hybrid_override_pattern",
            "layer_norm_epsilon",
            "mamba_num_heads",
            "mamba_head_dim",
            "n_groups",
            "ssm_state_size",
            "conv_kernel",
            "use_conv_bias",
            "use_bias",
            "time_step_limit",
            "time_step_min",
            "time_step_max",
            "time_step_floor",
            "rescale_prenorm_residual",
            "n_routed_experts",
            "n_group",
            "topk_group",
            "routed_scaling_factor",
            "moe_shared_expert_intermediate_size",
            "moe_latent_size",
            "initializer_range",
            "pattern",
            "bos_token_id",
            "embed_scale",
            "embed_norm",
            "ngram_orders",
            "ngram_buckets",
            "structure_vocab_sizes",
            "platform_vocab_size",
            "num_relations",
            "window_sizes",
            "nope_layers",
            "shared_expert_intermediate_size",
            "moe_aux_loss_weight",
            "moe_router_z_loss_weight",
            "mod_layers",
            "mod_capacity_factor",
            "mod_aux_loss_weight",
            "mtp_loss_weight",
            "mtp_block",
            "mtp_depth",
        ],
    ),
    ("adapter", &["kind", "rank", "alpha", "dropout", "rslora", "dora", "targets", "path"]),
    (
        "data",
        &[
            "path",
            "mix",
            "tokenizer",
            "seq_len",
            "shuffle",
            "side",
            "validation",
            "validation_share",
            "validation_side",
            "bos_id",
            "packed",
            "restart_positions",
            "keys",
            "chat_template",
            "train_on",
            "long_records",
            "date",
        ],
    ),
    (
        "pipeline",
        &[
            "ranks",
            "stages_per_rank",
            "schedule",
            "microbatches",
            "microbatch_size",
            "partition",
            "boundaries",
            "layout",
            "head_parts",
            "embedding_parts",
            "transport",
            "threads_per_rank",
            "recompute",
            "offload",
            "offload_folder",
            "group_size",
            "wide_warmup",
            "memory_limit",
            "costs",
            "slices",
            "overlap",
        ],
    ),
    (
        "mesh",
        &[
            "data_parallel",
            "data_parallel_mode",
            "tensor_parallel",
            "whole_experts",
            "expert_parallel",
            "unshard_window",
            "unshard_lookahead",
            "reduce_wait",
        ],
    ),
    (
        "optimizer",
        &[
            "name",
            "learning_rate",
            "min_learning_rate",
            "betas",
            "eps",
            "momentum",
            "nesterov",
            "weight_decay",
            "no_decay",
            "clip_norm",
            "clip_value",
            "post_validation",
            "schedule",
            "warmup_steps",
            "decay_steps",
            "restart_at",
            "expert_balance_speed",
            "groups",
        ],
    ),
    (
        "run",
        &[
            "steps",
            "seed",
            "out",
            "checkpoint_every",
            "failure_every",
            "keep_checkpoints",
            "deadline_seconds",
            "restarts",
            "replace_slow",
            "verify",
            "replace_wrong",
            "grow",
            "copy_every",
            "copies",
            "copy_folder",
            "device",
            "devices",
            "exclusive",
            "precision",
            "loss_scale",
            "loss_scale_interval",
            "timelines",
            "tensorboard",
            "planned_step_ms",
            "accumulate",
            "rampup_steps",
            "eval_every",
            "eval_batches",
            "patience",
            "sample_prompts",
            "sample_tokens",
        ],
    ),
];

/// Returns the keys of `section`, if there is such a section.
pub(super) fn keys_of(section: &str) -> Option<&'static [&'static str]> {
    SECTIONS.iter().find(|(name, _)| *name == section).map(|(_, keys)| *keys)
}

/// Returns the section that the user probably meant by an unknown name.
pub(super) fn suggest_section(section: &str) -> Option<Suggestion> {
    nearest(section, SECTIONS.iter().map(|(name, _)| *name)).map(|name| Suggestion::Name(name.to_owned()))
}

/// Returns the key that the user probably meant by an unknown key. The first match of these counts: the same
/// key in another section, a similar key in this section, a similar key in another section.
pub(super) fn suggest_key(section: &str, key: &str) -> Option<Suggestion> {
    let elsewhere = |wanted: &str| {
        let owner = SECTIONS.iter().find(|(name, keys)| *name != section && keys.contains(&wanted));
        owner.map(|(name, _)| Suggestion::KeyOf { section: (*name).to_owned(), key: wanted.to_owned() })
    };
    let here = keys_of(section).unwrap_or_default();
    let others = SECTIONS.iter().flat_map(|(_, keys)| keys.iter().copied());
    elsewhere(key)
        .or_else(|| nearest(key, here.iter().copied()).map(|name| Suggestion::Name(name.to_owned())))
        .or_else(|| nearest(key, others).and_then(elsewhere))
}

/// Returns the candidate that `name` probably misspells: at most a third of the letters differ.
pub fn nearest<'a>(name: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    words::nearest(name, candidates, |letters| (letters / 3).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(section: &str, key: &str, expected: Option<&str>) {
        assert_eq!(suggest_key(section, key).map(|found| found.to_string()).as_deref(), expected);
    }

    #[test]
    fn misspelt_keys() {
        check("pipeline", "rnaks", Some("`ranks`"));
        check("pipeline", "Microbatches", Some("`microbatches`"));
        check("pipeline", "micro_batches", Some("`microbatches`"));
        check("run", "deadline_second", Some("`deadline_seconds`"));
        check("pipeline", "seq_len", Some("`seq_len` in [data]"));
        check("pipeline", "seqlen", Some("`seq_len` in [data]"));
        check("pipeline", "colour", None);
        check("pipeline", "", None);
    }

    #[test]
    fn misspelt_sections() {
        assert_eq!(
            suggest_section("pipelines").map(|found| found.to_string()).as_deref(),
            Some("`pipeline`")
        );
        assert_eq!(suggest_section("colours").map(|found| found.to_string()), None);
    }
}
