//! The properties of families of models that their `config.json` does not state.
//!
//! The numbers of parameters that follow from this table are compared with published ones and with
//! transformers' own models in `tests/cluster/parameters.rs`.

use crate::vectors::{Biases, QueryKeyNorm, Vectors};

/// The `model_type` of this project's hybrids.
pub(super) const HYBRID: &str = "hybrid";

/// Families of one form.
#[derive(Debug, Clone, Copy)]
pub(super) struct Family {
    /// The values of `model_type`.
    pub(super) names: &'static [&'static str],
    /// Whether a second product gates the first in feed-forward parts; `None` if the activation decides.
    pub(super) gated: Option<bool>,
    /// Whether feed-forward parts are four times as wide as the hidden states, unless the file says otherwise.
    pub(super) four_times: bool,
    /// Whether the head uses the table of the embedding, unless the file says otherwise.
    pub(super) tied: bool,
    /// Whether dropout follows each residual branch, and positions are not rotary.
    pub(super) gpt: bool,
    /// Whether `attention_bias` includes the product behind attention.
    pub(super) output_bias_is_given: bool,
    /// The rows of the table of positions in addition to the positions; `None` without such a table.
    pub(super) more_positions: Option<u64>,
    /// Norms and biases.
    pub(super) vectors: Vectors,
    /// Every how many blocks one sees all tokens, if the others have a window and the file does not say it.
    pub(super) whole_every: Option<u64>,
    /// The values of keys that files leave out. Transformers and `train` assume the same values.
    pub(super) defaults: &'static [(&'static str, u64)],
    /// The values of keys that all models of the family share and no file has.
    pub(super) fixed: &'static [(&'static str, u64)],
    /// Keys of other families, which have no meaning in files of this one.
    pub(super) foreign: &'static [&'static str],
    /// Whether a size of 0 says the same as a missing key.
    pub(super) zero_is_missing: bool,
    /// Why models of this form have no costs.
    pub(super) refused: Option<&'static str>,
}

const LLAMA: Family = Family {
    names: &[
        "llama",
        "ministral",
        "ministral3",
        "phi3",
        "granite",
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
    gated: None,
    four_times: false,
    tied: false,
    gpt: false,
    output_bias_is_given: true,
    more_positions: None,
    vectors: Vectors::LLAMA,
    whole_every: None,
    defaults: &[],
    fixed: &[],
    foreign: &[],
    zero_is_missing: false,
    refused: None,
};

/// The keys of the blocks with experts in files of DeepSeek, and in files of Qwen.
const OF_DEEPSEEK: &[&str] = &["first_k_dense_replace", "moe_layer_freq"];
const OF_QWEN: &[&str] = &["decoder_sparse_step", "mlp_only_layers"];
const OF_BOTH: &[&str] =
    &["first_k_dense_replace", "moe_layer_freq", "decoder_sparse_step", "mlp_only_layers"];

const QUERY_KEY_VALUE: Biases = Biases { query_key_value: true, ..Biases::NONE };
const HEAD_NORM: Vectors = Vectors { query_key_norm: QueryKeyNorm::Head, ..Vectors::LLAMA };
const ALL_NORM: Vectors = Vectors { query_key_norm: QueryKeyNorm::All, ..Vectors::LLAMA };
const BIASED: Vectors = Vectors { biases: QUERY_KEY_VALUE, ..Vectors::LLAMA };
const SANDWICH: Vectors = Vectors { norms_per_part: 2, ..Vectors::LLAMA };

/// The families of blocks of attention and feed-forward parts, and hybrids with Mamba-2.
const FAMILIES: &[Family] = &[
    LLAMA,
    Family { names: &["mistral"], defaults: &[("num_key_value_heads", 8)], ..LLAMA },
    Family {
        names: &["mixtral"],
        defaults: &[("num_key_value_heads", 8), ("num_experts_per_tok", 2)],
        foreign: OF_BOTH,
        ..LLAMA
    },
    Family { names: &["smollm3"], tied: true, defaults: &[("num_key_value_heads", 4)], ..LLAMA },
    Family {
        names: &["deepseek_v2"],
        foreign: OF_QWEN,
        defaults: &[
            ("q_lora_rank", 1536),
            ("kv_lora_rank", 512),
            ("qk_rope_head_dim", 64),
            ("qk_nope_head_dim", 128),
            ("v_head_dim", 128),
            ("n_routed_experts", 64),
            ("moe_intermediate_size", 1407),
            ("n_shared_experts", 2),
        ],
        ..LLAMA
    },
    Family {
        names: &["deepseek_v3"],
        foreign: OF_QWEN,
        defaults: &[
            ("q_lora_rank", 1536),
            ("kv_lora_rank", 512),
            ("qk_rope_head_dim", 64),
            ("qk_nope_head_dim", 128),
            ("v_head_dim", 128),
            ("n_routed_experts", 256),
            ("num_experts_per_tok", 8),
            ("moe_intermediate_size", 2048),
            ("first_k_dense_replace", 3),
            ("n_shared_experts", 1),
        ],
        ..LLAMA
    },
    Family {
        names: &["qwen2"],
        vectors: BIASED,
        output_bias_is_given: false,
        defaults: &[("num_key_value_heads", 32)],
        ..LLAMA
    },
    Family {
        names: &["qwen2_moe"],
        foreign: OF_DEEPSEEK,
        vectors: Vectors { shared_gate: true, ..BIASED },
        output_bias_is_given: false,
        defaults: &[
            ("num_key_value_heads", 16),
            ("num_experts", 60),
            ("num_experts_per_tok", 4),
            ("moe_intermediate_size", 1408),
            ("shared_expert_intermediate_size", 5632),
        ],
        ..LLAMA
    },
    Family {
        names: &["qwen3"],
        vectors: HEAD_NORM,
        defaults: &[("num_key_value_heads", 32), ("head_dim", 128)],
        ..LLAMA
    },
    Family {
        names: &["qwen3_moe"],
        foreign: OF_DEEPSEEK,
        vectors: HEAD_NORM,
        defaults: &[
            ("num_key_value_heads", 4),
            ("num_experts", 128),
            ("num_experts_per_tok", 8),
            ("moe_intermediate_size", 768),
        ],
        ..LLAMA
    },
    Family { names: &["dots1"], vectors: HEAD_NORM, ..LLAMA },
    Family { names: &["gemma"], gated: Some(true), tied: true, ..LLAMA },
    Family {
        names: &["gemma2"],
        gated: Some(true),
        tied: true,
        vectors: SANDWICH,
        whole_every: Some(2),
        defaults: &[("num_key_value_heads", 4), ("head_dim", 256)],
        ..LLAMA
    },
    Family {
        names: &["gemma3_text", "gemma3"],
        gated: Some(true),
        tied: true,
        vectors: Vectors { query_key_norm: QueryKeyNorm::Head, ..SANDWICH },
        whole_every: Some(6),
        // The published files of the models with images leave them out.
        defaults: &[
            ("vocab_size", 262_208),
            ("num_attention_heads", 8),
            ("num_key_value_heads", 4),
            ("head_dim", 256),
        ],
        ..LLAMA
    },
    Family { names: &["glm"], vectors: BIASED, output_bias_is_given: false, ..LLAMA },
    Family { names: &["glm4"], vectors: SANDWICH, output_bias_is_given: false, ..LLAMA },
    Family { names: &["glm4_moe"], output_bias_is_given: false, ..LLAMA },
    Family { names: &["olmo"], vectors: Vectors { norm_parameters: 0, ..Vectors::LLAMA }, ..LLAMA },
    Family { names: &["olmo2", "olmo3", "olmoe"], vectors: ALL_NORM, ..LLAMA },
    Family { names: &["exaone4"], vectors: HEAD_NORM, ..LLAMA },
    Family {
        names: &["gpt_oss"],
        gated: Some(true),
        vectors: Vectors { sinks: true, biases: Biases { router: true, ..Biases::DENSE }, ..Vectors::LLAMA },
        defaults: &[
            ("num_key_value_heads", 8),
            ("head_dim", 64),
            ("num_local_experts", 128),
            ("num_experts_per_tok", 4),
        ],
        foreign: OF_BOTH,
        ..LLAMA
    },
    Family {
        names: &["llama4_text"],
        gated: Some(true),
        whole_every: Some(4),
        fixed: &[("n_shared_experts", 1)],
        ..LLAMA
    },
    Family {
        names: &["nemotron"],
        gated: Some(false),
        vectors: Vectors { norm_parameters: 2, ..Vectors::LLAMA },
        ..LLAMA
    },
    Family {
        names: &["nemotron_h"],
        gated: Some(false),
        defaults: &[
            ("num_attention_heads", 32),
            ("num_key_value_heads", 8),
            ("head_dim", 128),
            ("intermediate_size", 21_504),
            ("mamba_num_heads", 128),
            ("mamba_head_dim", 64),
            ("n_groups", 8),
            ("ssm_state_size", 128),
            ("conv_kernel", 4),
            ("chunk_size", 128),
            ("num_experts_per_tok", 2),
        ],
        ..LLAMA
    },
    Family {
        names: &[HYBRID],
        foreign: &[
            "first_k_dense_replace",
            "moe_layer_freq",
            "decoder_sparse_step",
            "mlp_only_layers",
            "use_conv_bias",
            "mamba_conv_bias",
        ],
        gated: Some(true),
        defaults: &[("n_groups", 1), ("conv_kernel", 4)],
        // `train` scans in chunks of this many tokens.
        fixed: &[("chunk_size", 64)],
        zero_is_missing: true,
        ..LLAMA
    },
    Family { names: &["stablelm"], vectors: Vectors { norm_parameters: 2, ..Vectors::LLAMA }, ..LLAMA },
    Family {
        names: &["cohere", "cohere2"],
        gated: Some(true),
        tied: true,
        vectors: Vectors { shares_norm: true, ..Vectors::LLAMA },
        whole_every: Some(4),
        ..LLAMA
    },
    Family {
        names: &["falcon"],
        gated: Some(false),
        four_times: true,
        tied: true,
        vectors: Vectors { norm_parameters: 2, ..Vectors::LLAMA },
        ..LLAMA
    },
    GPT,
    Family { names: &["gpt_bigcode"], ..GPT },
    Family { names: &["gpt_neox"], tied: false, more_positions: None, ..GPT },
    Family { names: &["starcoder2"], more_positions: None, defaults: &[("num_key_value_heads", 2)], ..GPT },
    Family { names: &["opt"], more_positions: Some(2), ..GPT },
    Family { names: &["phi"], tied: false, more_positions: None, vectors: PHI, ..GPT },
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

const GPT: Family = Family {
    names: &["gpt2"],
    gated: Some(false),
    four_times: true,
    tied: true,
    gpt: true,
    more_positions: Some(0),
    vectors: Vectors::GPT,
    ..LLAMA
};

const PHI: Vectors = Vectors { shares_norm: true, ..Vectors::GPT };

const fn refused(names: &'static [&'static str], why: &'static str) -> Family {
    Family { names, refused: Some(why), ..LLAMA }
}

impl Family {
    /// Returns the family of a `model_type`, if it is known.
    pub(super) fn named(model_type: &str) -> Option<Self> {
        FAMILIES.iter().find(|family| family.names.contains(&model_type)).copied()
    }

    /// Returns the form of families that are not known.
    pub(super) fn unknown() -> Self {
        LLAMA
    }
}

/// Returns the values of `model_type` whose norms, biases and windows are known.
pub fn known_families() -> Vec<&'static str> {
    let known = FAMILIES.iter().filter(|family| family.refused.is_none());
    known.flat_map(|family| family.names.iter().copied()).collect()
}
