//! The families of models: the keys of their files, and what their files do not state.
//!
//! The numbers of parameters that follow from these tables are compared with published ones, with transformers'
//! own models and with the models that training builds.

mod keys;
mod row;

mod dense;
mod hybrids;
mod mixtures;
mod linear;

use crate::key_table::{KeyTable, is_dropout, is_ignored};
use crate::vectors::{Biases, Vectors};
pub use dense::{
    GEMMA2, GEMMA3, GPT2, GRANITE, GRANITE_HYBRID, LLAMA, MINISTRAL3, MISTRAL, OLMO2, OLMO3, PHI3, QWEN2,
    QWEN3, SMOLLM3, STARCODER2,
};
pub use hybrids::{HYBRID, NEMOTRON_H};
pub use linear::{QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT};
pub use mixtures::{DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE, GPT_OSS, MIXTRAL, QWEN2_MOE, QWEN3_MOE};
use row::{ALL_NORM, BASE, BIASED, GPT, HEAD_NORM, SANDWICH, TIED};
pub use row::{AbsentKey, Family, LinearKind};

/// The families of decoders that training knows.
const DECODERS: &[Family] = &[
    LLAMA,
    MISTRAL,
    MINISTRAL3,
    MIXTRAL,
    SMOLLM3,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GLM4_MOE,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    QWEN3_NEXT,
    QWEN3_5,
    QWEN3_5_MOE,
    GEMMA2,
    GEMMA3,
    GPT_OSS,
    GRANITE,
    GRANITE_HYBRID,
    OLMO2,
    OLMO3,
    PHI3,
    STARCODER2,
    GPT2,
];

/// The end of the names of classes that score sequences.
pub const SCORES: &str = "ForSequenceClassification";

/// The families of decoders for which transformers has no class that scores sequences.
const WITHOUT_SCORES: [&str; 4] = ["granite", "granitemoehybrid", "glm4_moe", "qwen3_5_moe_text"];

/// The families of hybrids that training knows.
const HYBRIDS: &[Family] = &[NEMOTRON_H, HYBRID];

/// The families that only costs are known of.
const OTHERS: &[Family] = &[
    Family {
        names: &[
            "ministral",
            "granitemoe",
            "bamba",
            "kimi_k2",
            "ernie4_5",
            "seed_oss",
            "helium",
            "mamba2",
            "arcee",
            "minicpm3",
            "deepseek_v32",
            "glm_moe_dsa",
            "glm4_moe_lite",
            "hunyuan_v1_dense",
            "hunyuan_v1_moe",
            "bailing_moe",
            "bailing_moe_v2",
            "mistral4",
        ],
        ..BASE
    },
    Family { names: &["mimo"], vectors: BIASED, output_bias_is_given: false, ..BASE },
    Family { names: &["dots1", "exaone4", "qwen3_vl_text", "qwen3_vl_moe_text"], vectors: HEAD_NORM, ..BASE },
    Family {
        names: &["olmo_hybrid"],
        vectors: ALL_NORM,
        whole_every: Some(4),
        linear: LinearKind::Gated,
        ..BASE
    },
    Family {
        names: &["kimi_linear"],
        whole_every: Some(4),
        linear: LinearKind::Channel { has_ranks: true },
        ..BASE
    },
    Family {
        names: &["bailing_hybrid"],
        whole_every: Some(6),
        linear: LinearKind::Channel { has_ranks: false },
        gate: true,
        ..BASE
    },
    Family {
        names: &["ernie4_5_moe"],
        vectors: Vectors { biases: Biases { router: true, ..Biases::NONE }, ..Vectors::LLAMA },
        ..BASE
    },
    Family { names: &["minimax", "minimax_text_01"], linear: LinearKind::Lightning, ..BASE },
    Family { names: &["minimax_m2"], vectors: ALL_NORM, ..BASE },
    Family { names: &["gemma"], absent: TIED, gated: Some(true), ..BASE },
    Family { names: &["glm"], vectors: BIASED, output_bias_is_given: false, rotary: 0.5, ..BASE },
    Family { names: &["glm4"], vectors: SANDWICH, output_bias_is_given: false, rotary: 0.5, ..BASE },
    Family { names: &["olmo"], vectors: Vectors { norm_parameters: 0, ..Vectors::LLAMA }, ..BASE },
    Family { names: &["olmoe"], vectors: ALL_NORM, ..BASE },
    Family {
        names: &["llama4_text"],
        gated: Some(true),
        whole_every: Some(4),
        without_positions_every: Some(4),
        fixed: &[("n_shared_experts", 1)],
        ..BASE
    },
    Family {
        names: &["nemotron"],
        gated: Some(false),
        rotary: 0.5,
        vectors: Vectors { norm_parameters: 2, ..Vectors::LLAMA },
        ..BASE
    },
    Family {
        names: &["stablelm"],
        vectors: Vectors { norm_parameters: 2, ..Vectors::LLAMA },
        rotary: 0.25,
        ..BASE
    },
    COHERE,
    Family { names: &["cohere2"], whole_every: Some(4), without_positions_every: Some(4), ..COHERE },
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
    refused(&["rwkv", "recurrent_gemma"], "the costs of its recurrence are not known"),
];

const COHERE: Family = Family {
    names: &["cohere"],
    absent: TIED,
    gated: Some(true),
    vectors: Vectors { shares_norm: true, ..Vectors::LLAMA },
    ..BASE
};

const fn refused(names: &'static [&'static str], why: &'static str) -> Family {
    Family { names, refused: Some(why), ..BASE }
}

/// Keys that change what a model computes, and next to nothing of what it costs, in files of families that training
/// does not know: constants, activations of routers, and the form in which a file stores its matrices. A cap of
/// attention's scores is a part of its kernel.
const FREE: &[&str] = &[
    "attn_logit_softcapping",
    "attn_scale",
    "attn_temperature_tuning",
    "cla_share_factor",
    "clip_qkv",
    "dim_model_base",
    "eod_token_id",
    "floor_scale",
    "full_attn_alpha_factor",
    "full_attn_beta_factor",
    "index_share_for_mtp_iteration",
    "index_skip_topk_offset",
    "indexer_rope_interleave",
    "init_method",
    "init_std",
    "initializer_factor",
    "kda_lower_bound",
    "kda_safe_gate",
    "layer_norm_eps",
    "layernorm_full_attention_alpha",
    "layernorm_full_attention_beta",
    "layernorm_linear_attention_alpha",
    "layernorm_linear_attention_beta",
    "layernorm_mlp_alpha",
    "layernorm_mlp_beta",
    "linear_allow_neg_eigval",
    "linear_attn_alpha_factor",
    "linear_attn_beta_factor",
    "logit_scale",
    "mamba_hidden_act",
    "mamba_ssm_dtype",
    "mla_use_nope",
    "mlp_alpha_factor",
    "mlp_beta_factor",
    "moe_capacity",
    "moe_renormalize",
    "moe_router_activation_func",
    "moe_router_dtype",
    "moe_router_enable_expert_bias",
    "moe_use_aux_free",
    "mtp_loss_scaling_factor",
    "norm_before_gate",
    "norm_eps",
    "order_of_interleaved_layers",
    "org_vocab_size",
    "output_gate_type",
    "output_past",
    "output_projection",
    "pad_key_length",
    "postnorm",
    "quantization_config",
    "rescale_prenorm_residual",
    "rope_theta_local",
    "rotary_emb_base",
    "router_dtype",
    "router_jitter_noise",
    "router_z_loss_coef",
    "scale_depth",
    "scale_emb",
    "scale_embedding",
    "score_function",
    "scoring_func",
    "ssm_dtype",
    "time_step_floor",
    "time_step_init_scheme",
    "time_step_limit",
    "time_step_max",
    "time_step_min",
    "time_step_scale",
    "use_embedding_sharing",
    "use_gated_activation",
    "use_grouped_topk",
    "use_parallel_block",
    "use_parallel_embedding",
    "use_parallel_residual",
    "use_routing_bias",
    "validate_runner_input",
];

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

    /// Returns the class of transformers that scores sequences with models of this family, if there is one.
    pub fn scoring_class(&self) -> Option<String> {
        let stem = ["ForCausalLM", "LMHeadModel"].iter().find_map(|end| self.class.strip_suffix(end))?;
        let text = if self.name().ends_with("_text") { "Text" } else { "" };
        let has_class = self.is_decoder() && !WITHOUT_SCORES.contains(&self.name());
        has_class.then(|| format!("{stem}{text}{SCORES}"))
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
            || self.gpt && is_dropout(key)
            || is_known(self.keys)
            || DECODERS.iter().any(|family| is_known(family.keys))
            || NEMOTRON_H.keys.ignores(key);
        // Only the hybrid's predictions of further tokens are counted.
        let is_counted = !key.starts_with("mtp_") || self.keys.computes(key);
        FREE.contains(&key) || is_free && is_counted
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
