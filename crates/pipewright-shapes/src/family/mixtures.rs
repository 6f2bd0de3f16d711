//! The families with experts that training knows.

use super::keys::{
    COMPUTED_KEYS, DEEPSEEK_IGNORED, DEEPSEEK_KEYS, DEEPSEEK_REFUSED, GROUPED_EXPERTS_KEYS,
    LAYER_WINDOW_KEYS, MIXTURE_KEYS, PREDICTION_KEYS, REFUSED_BESIDE_WINDOWS, REFUSED_KEYS,
};
use super::row::AbsentKey::{Count, Flag, Number, Table};
use super::row::{BASE, BIASED, Family, HEAD_NORM};
use crate::key_table::{Harmless, KeyTable, Refused};
use crate::vectors::{Biases, Vectors};

/// The keys of the blocks with experts in files of DeepSeek, and in files of Qwen.
pub(super) const OF_DEEPSEEK: &[&str] = &["first_k_dense_replace", "moe_layer_freq"];
const OF_QWEN: &[&str] = &["decoder_sparse_step", "mlp_only_layers"];
const OF_BOTH: &[&str] =
    &["first_k_dense_replace", "moe_layer_freq", "decoder_sparse_step", "mlp_only_layers"];

/// Mixtral.
pub const MIXTRAL: Family = Family {
    names: &["mixtral"],
    class: "MixtralForCausalLM",
    keys: &KeyTable {
        computes: &[
            COMPUTED_KEYS,
            &[
                "sliding_window",
                "num_local_experts",
                "num_experts",
                "num_experts_per_tok",
                "router_aux_loss_coef",
                "output_router_logits",
            ],
        ],
        ignored: &[],
        refused: &[REFUSED_KEYS, &[Refused { key: "router_jitter_noise", harmless: Harmless::Number(0.0) }]],
    },
    absent: &[
        ("num_key_value_heads", Count(8)),
        ("rms_norm_eps", Number(1e-5)),
        ("rope_theta", Number(1e6)),
        ("num_experts_per_tok", Count(2)),
    ],
    foreign: OF_BOTH,
    ..BASE
};

/// DeepSeek V2.
pub const DEEPSEEK_V2: Family = Family {
    names: &["deepseek_v2"],
    class: "DeepseekV2ForCausalLM",
    keys: &KeyTable {
        computes: &[COMPUTED_KEYS, DEEPSEEK_KEYS, GROUPED_EXPERTS_KEYS, &["topk_method"]],
        ignored: &[DEEPSEEK_IGNORED],
        refused: &[
            DEEPSEEK_REFUSED,
            &[
                Refused { key: "scoring_func", harmless: Harmless::Word("softmax") },
                Refused { key: "norm_topk_prob", harmless: Harmless::False },
            ],
        ],
    },
    absent: &[
        ("q_lora_rank", Count(1536)),
        ("kv_lora_rank", Count(512)),
        ("qk_rope_head_dim", Count(64)),
        ("qk_nope_head_dim", Count(128)),
        ("v_head_dim", Count(128)),
        ("n_routed_experts", Count(64)),
        ("moe_intermediate_size", Count(1407)),
        ("first_k_dense_replace", Count(0)),
        ("n_shared_experts", Count(2)),
        ("routed_scaling_factor", Number(1.0)),
    ],
    foreign: OF_QWEN,
    ..BASE
};

/// DeepSeek V3.
pub const DEEPSEEK_V3: Family = Family {
    names: &["deepseek_v3"],
    class: "DeepseekV3ForCausalLM",
    keys: &KeyTable {
        computes: &[
            COMPUTED_KEYS,
            DEEPSEEK_KEYS,
            GROUPED_EXPERTS_KEYS,
            &["norm_topk_prob", "rope_interleave"],
        ],
        // The modules that predict further tokens have no part in the loss of transformers either.
        ignored: &[DEEPSEEK_IGNORED, PREDICTION_KEYS],
        refused: &[
            DEEPSEEK_REFUSED,
            &[
                Refused { key: "scoring_func", harmless: Harmless::Word("sigmoid") },
                Refused { key: "topk_method", harmless: Harmless::Word("noaux_tc") },
            ],
        ],
    },
    absent: &[
        ("q_lora_rank", Count(1536)),
        ("kv_lora_rank", Count(512)),
        ("qk_rope_head_dim", Count(64)),
        ("qk_nope_head_dim", Count(128)),
        ("v_head_dim", Count(128)),
        ("n_routed_experts", Count(256)),
        ("num_experts_per_tok", Count(8)),
        ("moe_intermediate_size", Count(2048)),
        ("first_k_dense_replace", Count(3)),
        ("n_shared_experts", Count(1)),
        ("routed_scaling_factor", Number(2.5)),
        ("n_group", Count(8)),
        ("topk_group", Count(4)),
        ("norm_topk_prob", Flag(true)),
    ],
    foreign: OF_QWEN,
    ..BASE
};

/// GLM 4.5 and later with experts.
pub const GLM4_MOE: Family = Family {
    names: &["glm4_moe"],
    class: "Glm4MoeForCausalLM",
    keys: &KeyTable {
        computes: &[
            COMPUTED_KEYS,
            GROUPED_EXPERTS_KEYS,
            &["norm_topk_prob", "use_qk_norm", "partial_rotary_factor"],
        ],
        // As in DeepSeek V3.
        ignored: &[DEEPSEEK_IGNORED, PREDICTION_KEYS],
        refused: &[REFUSED_KEYS, &[Refused { key: "mlp_bias", harmless: Harmless::False }]],
    },
    absent: &[
        ("num_key_value_heads", Count(8)),
        ("rms_norm_eps", Number(1e-5)),
        ("partial_rotary_factor", Number(0.5)),
        ("n_routed_experts", Count(128)),
        ("num_experts_per_tok", Count(8)),
        ("moe_intermediate_size", Count(1408)),
        ("first_k_dense_replace", Count(1)),
        ("n_shared_experts", Count(1)),
        ("routed_scaling_factor", Number(1.0)),
        ("norm_topk_prob", Flag(true)),
    ],
    foreign: OF_QWEN,
    output_bias_is_given: false,
    rotary: 0.5,
    ..BASE
};

/// Qwen2-MoE.
pub const QWEN2_MOE: Family = Family {
    names: &["qwen2_moe"],
    class: "Qwen2MoeForCausalLM",
    keys: &KeyTable {
        computes: &[
            COMPUTED_KEYS,
            MIXTURE_KEYS,
            LAYER_WINDOW_KEYS,
            &["qkv_bias", "shared_expert_intermediate_size"],
        ],
        ignored: &[],
        refused: &[REFUSED_BESIDE_WINDOWS],
    },
    absent: &[
        ("num_key_value_heads", Count(16)),
        ("sliding_window", Count(4096)),
        ("num_experts", Count(60)),
        ("num_experts_per_tok", Count(4)),
        ("moe_intermediate_size", Count(1408)),
        ("shared_expert_intermediate_size", Count(5632)),
    ],
    foreign: OF_DEEPSEEK,
    vectors: Vectors { shared_gate: true, ..BIASED },
    output_bias_is_given: false,
    ..BASE
};

/// Qwen3-MoE.
pub const QWEN3_MOE: Family = Family {
    names: &["qwen3_moe"],
    class: "Qwen3MoeForCausalLM",
    keys: &KeyTable {
        computes: &[COMPUTED_KEYS, MIXTURE_KEYS, &["attention_bias", "use_sliding_window", "sliding_window"]],
        ignored: &[&["max_window_layers"]],
        refused: &[
            REFUSED_BESIDE_WINDOWS,
            &[
                Refused { key: "layer_types", harmless: Harmless::AllOf("full_attention") },
                Refused { key: "mlp_bias", harmless: Harmless::False },
                Refused { key: "use_qk_norm", harmless: Harmless::True },
                Refused { key: "qk_norm", harmless: Harmless::True },
            ],
        ],
    },
    absent: &[("num_key_value_heads", Count(4)), ("sliding_window", Count(4096))],
    foreign: OF_DEEPSEEK,
    vectors: HEAD_NORM,
    usual: &[("num_experts", 128), ("num_experts_per_tok", 8), ("moe_intermediate_size", 768)],
    ..BASE
};

/// gpt-oss.
pub const GPT_OSS: Family = Family {
    names: &["gpt_oss"],
    class: "GptOssForCausalLM",
    keys: &KeyTable {
        computes: &[
            COMPUTED_KEYS,
            &[
                "sliding_window",
                "layer_types",
                "attention_bias",
                "swiglu_alpha",
                "swiglu_limit",
                "num_local_experts",
                "num_experts",
                "num_experts_per_tok",
                "router_aux_loss_coef",
                "output_router_logits",
            ],
        ],
        ignored: &[&["initial_context_length"]],
        refused: &[&[
            Refused { key: "attention_dropout", harmless: Harmless::Number(0.0) },
            Refused { key: "experts_per_token", harmless: Harmless::SameAs("num_experts_per_tok") },
        ]],
    },
    absent: &[
        ("num_key_value_heads", Count(8)),
        ("head_dim", Count(64)),
        ("rms_norm_eps", Number(1e-5)),
        ("rope_theta", Number(150_000.0)),
        (
            "rope_scaling",
            Table(
                r#"{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
                    "original_max_position_embeddings": 4096}"#,
            ),
        ),
        ("sliding_window", Count(128)),
        ("num_experts_per_tok", Count(4)),
    ],
    gated: Some(true),
    vectors: Vectors { sinks: true, biases: Biases { router: true, ..Biases::DENSE }, ..Vectors::LLAMA },
    usual: &[("num_local_experts", 128)],
    foreign: OF_BOTH,
    ..BASE
};
