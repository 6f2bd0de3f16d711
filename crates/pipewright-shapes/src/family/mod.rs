//! The families of models: the keys of their files, and what their files do not state.
//!
//! The numbers of parameters that follow from these tables are compared with published ones, with transformers'
//! own models and with the models that training builds.

mod keys;
mod row;

mod dense;
mod hybrids;
mod mixtures;

use crate::key_table::{KeyTable, is_dropout, is_ignored};
use crate::vectors::Vectors;
pub use dense::{
    GEMMA2, GEMMA3, GPT2, GRANITE, LLAMA, MISTRAL, OLMO2, PHI3, QWEN2, QWEN3, SMOLLM3, STARCODER2,
};
pub use hybrids::{HYBRID, NEMOTRON_H};
pub use mixtures::{DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS, MIXTRAL, QWEN2_MOE, QWEN3_MOE};
use row::{ALL_NORM, BASE, BIASED, GPT, HEAD_NORM, SANDWICH, TIED};
pub use row::{AbsentKey, Family};

/// The families of decoders that training knows.
const DECODERS: &[Family] = &[
    LLAMA,
    MISTRAL,
    MIXTRAL,
    SMOLLM3,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    GEMMA2,
    GEMMA3,
    GPT_OSS,
    GRANITE,
    OLMO2,
    PHI3,
    STARCODER2,
    GPT2,
];

/// The families of hybrids that training knows.
const HYBRIDS: &[Family] = &[NEMOTRON_H, HYBRID];

/// The families that only costs are known of.
const OTHERS: &[Family] = &[
    Family {
        names: &[
            "ministral",
            "ministral3",
            "granitemoe",
            "granitemoehybrid",
            "bamba",
            "kimi_k2",
            "ernie4_5",
            "seed_oss",
            "helium",
            "mamba2",
            "arcee",
            "minicpm3",
        ],
        ..BASE
    },
    Family { names: &["dots1", "exaone4"], vectors: HEAD_NORM, ..BASE },
    Family { names: &["gemma"], absent: TIED, gated: Some(true), ..BASE },
    Family { names: &["glm"], vectors: BIASED, output_bias_is_given: false, ..BASE },
    Family { names: &["glm4"], vectors: SANDWICH, output_bias_is_given: false, ..BASE },
    Family { names: &["glm4_moe"], output_bias_is_given: false, ..BASE },
    Family { names: &["olmo"], vectors: Vectors { norm_parameters: 0, ..Vectors::LLAMA }, ..BASE },
    Family { names: &["olmo3", "olmoe"], vectors: ALL_NORM, ..BASE },
    Family {
        names: &["llama4_text"],
        gated: Some(true),
        whole_every: Some(4),
        fixed: &[("n_shared_experts", 1)],
        ..BASE
    },
    Family {
        names: &["nemotron"],
        gated: Some(false),
        vectors: Vectors { norm_parameters: 2, ..Vectors::LLAMA },
        ..BASE
    },
    Family { names: &["stablelm"], vectors: Vectors { norm_parameters: 2, ..Vectors::LLAMA }, ..BASE },
    Family {
        names: &["cohere", "cohere2"],
        absent: TIED,
        gated: Some(true),
        vectors: Vectors { shares_norm: true, ..Vectors::LLAMA },
        whole_every: Some(4),
        ..BASE
    },
    Family {
        names: &["falcon"],
        absent: TIED,
        gated: Some(false),
        four_times: true,
        vectors: Vectors { norm_parameters: 2, ..Vectors::LLAMA },
        ..BASE
    },
    Family { names: &["gpt_bigcode"], ..GPT },
    Family { names: &["gpt_neox"], absent: &[], more_positions: None, ..GPT },
    Family { names: &["opt"], more_positions: Some(2), ..GPT },
    Family {
        names: &["phi"],
        absent: &[],
        more_positions: None,
        vectors: Vectors { shares_norm: true, ..Vectors::GPT },
        ..GPT
    },
    refused(&["jamba", "mamba", "falcon_mamba"], "the costs of Mamba-1 blocks are not known"),
    refused(&["zamba", "zamba2"], "the costs of blocks that share parameters are not known"),
    refused(&["falcon_h1"], "the costs of blocks with attention next to Mamba-2 are not known"),
    refused(&["t5", "mt5", "bart", "t5gemma"], "it has an encoder, and only decoders have costs"),
    refused(
        &["bert", "roberta", "deberta_v2", "modernbert"],
        "it is an encoder, and only decoders have costs",
    ),
    refused(&["rwkv", "recurrent_gemma", "minimax"], "the costs of its recurrence are not known"),
];

const fn refused(names: &'static [&'static str], why: &'static str) -> Family {
    Family { names, refused: Some(why), ..BASE }
}

/// Keys that change what a model computes, and next to nothing of what it costs, in files of families that training
/// does not know.
const FREE: [&str; 30] = [
    "add_cross_attention",
    "attn_scale",
    "attn_temperature_tuning",
    "clip_qkv",
    "floor_scale",
    "initializer_factor",
    "layer_norm_bias",
    "layer_norm_elementwise_affine",
    "layer_norm_eps",
    "logit_scale",
    "mamba_hidden_act",
    "moe_router_dtype",
    "nope_layer_interval",
    "norm_before_gate",
    "norm_eps",
    "norm_type",
    "rescale_prenorm_residual",
    "rope_theta_local",
    "rotary_emb_base",
    "rotary_pct",
    "router_jitter_noise",
    "router_z_loss_coef",
    "scale_embedding",
    "scoring_func",
    "ssm_dtype",
    "time_step_floor",
    "time_step_limit",
    "time_step_max",
    "time_step_min",
    "use_parallel_residual",
];

/// Keys with which some family computes, or which it ignores, and whose costs are not counted.
const UNCOUNTED: [&str; 3] = ["attn_logit_softcapping", "final_logit_softcapping", "num_mtp_layers"];

/// A size that training assumes and costs do not, because it would make a prediction too low.
const NOT_ASSUMED: &str = "sliding_window";

impl Family {
    /// Returns the name of the family: `model_type` in the files that it writes.
    pub const fn name(&self) -> &'static str {
        match self.names {
            [name, ..] => name,
            [] => "",
        }
    }

    /// Returns whether training knows the family and its blocks are those of a decoder.
    pub fn is_decoder(&self) -> bool {
        DECODERS.iter().any(|family| family.name() == self.name())
    }

    /// Returns the family of a `model_type`, if it is known.
    pub(crate) fn named(model_type: &str) -> Option<Self> {
        all().find(|family| family.names.contains(&model_type)).copied()
    }

    /// Returns the form of families that are not known.
    pub(crate) fn unknown() -> Self {
        BASE
    }

    /// Returns whether a key from which no shape is read changes no costs: training ignores it, or a family computes
    /// with it, and all keys with costs are read. Only hybrids know the sizes of their mixers.
    pub(crate) fn is_free(&self, key: &str) -> bool {
        let is_known = |keys: &KeyTable| keys.computes(key) || keys.ignores(key);
        let is_free = is_ignored(key)
            || FREE.contains(&key)
            || self.gpt && is_dropout(key)
            || is_known(self.keys)
            || DECODERS.iter().any(|family| is_known(family.keys))
            || NEMOTRON_H.keys.ignores(key);
        // Only the hybrid's predictions of further tokens are counted.
        let is_counted = !key.starts_with("mtp_") || self.keys.computes(key);
        is_free && is_counted && !UNCOUNTED.contains(&key)
    }

    /// Returns whether the head uses the table of the embedding if the file does not say it.
    pub(crate) fn is_tied(&self) -> bool {
        self.absent.iter().any(|entry| matches!(entry, ("tie_word_embeddings", AbsentKey::Flag(true))))
    }

    /// Returns the size with one of these names that files leave out, with its name.
    pub(crate) fn usual_size(&self, names: &[&str]) -> Option<(&'static str, u64)> {
        self.usual_sizes().find(|(name, _)| names.contains(name) && *name != NOT_ASSUMED)
    }

    /// Returns the size with this name that files leave out.
    ///
    /// # Panics
    /// When the family's table has no such size.
    pub fn usual(&self, name: &str) -> usize {
        let found = self.usual_sizes().find(|(other, _)| *other == name);
        found.unwrap_or_else(|| panic!("{} has no usual `{name}`", self.name())).1 as usize
    }

    fn usual_sizes(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let absent = self.absent.iter().filter_map(|&(name, value)| match value {
            AbsentKey::Count(count) if count > 0 => Some((name, u64::from(count))),
            _ => None,
        });
        absent.chain(self.usual.iter().copied())
    }
}

fn all() -> impl Iterator<Item = &'static Family> {
    DECODERS.iter().chain(HYBRIDS).chain(OTHERS)
}

/// Returns the values of `model_type` whose norms, biases and windows are known.
pub fn known_families() -> Vec<&'static str> {
    let known = all().filter(|family| family.refused.is_none());
    known.flat_map(|family| family.names.iter().copied()).collect()
}
