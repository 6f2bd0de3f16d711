//! The families with linear attention that training knows.

use super::keys::{COMPUTED_KEYS, MIXTURE_KEYS, PREDICTION_KEYS, REFUSED_BESIDE_WINDOWS};
use super::mixtures::OF_DEEPSEEK;
use super::row::AbsentKey::{Count, Flag, Number};
use super::row::{AbsentKey, BASE, Family, HEAD_NORM, LinearKind};
use crate::key_table::{Harmless, KeyTable, Refused};
use crate::vectors::Vectors;

/// The keys of layers with linear attention, in addition to every decoder's keys.
const LINEAR_KEYS: &[&str] = &[
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "layer_types",
    "full_attention_interval",
    "attention_bias",
    "partial_rotary_factor",
];

/// Keys without an effect in training: predictors of further tokens, and the type in which states are computed.
const LINEAR_IGNORED: &[&str] = &["mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype"];

const LINEAR_REFUSED: &[Refused] = &[
    Refused { key: "use_sliding_window", harmless: Harmless::False },
    Refused { key: "mlp_bias", harmless: Harmless::False },
    Refused { key: "attn_output_gate", harmless: Harmless::True },
    Refused { key: "output_gate_type", harmless: Harmless::OneOf(&["swish", "silu"]) },
];

/// The sizes of linear attention that files leave out.
const USUAL: &[(&str, u64)] = &[
    ("linear_num_key_heads", 16),
    ("linear_num_value_heads", 32),
    ("linear_key_head_dim", 128),
    ("linear_value_head_dim", 128),
    ("linear_conv_kernel_dim", 4),
];

const LINEAR: Family = Family {
    // The keys of images, which text does not have.
    ignored_positions: &["mrope_section", "mrope_interleaved"],
    usual: USUAL,
    vectors: Vectors { shared_gate: true, ..HEAD_NORM },
    whole_every: Some(4),
    linear: LinearKind::Gated,
    gate: true,
    rotary: 0.25,
    foreign: OF_DEEPSEEK,
    ..BASE
};

const ROTARY: (&str, AbsentKey) = ("partial_rotary_factor", Number(0.25));
const HEAD_DIM: (&str, AbsentKey) = ("head_dim", Count(256));

/// Qwen3-Next.
pub const QWEN3_NEXT: Family = Family {
    names: &["qwen3_next"],
    class: "Qwen3NextForCausalLM",
    keys: &KeyTable {
        computes: &[COMPUTED_KEYS, MIXTURE_KEYS, LINEAR_KEYS, &["shared_expert_intermediate_size"]],
        ignored: &[LINEAR_IGNORED, PREDICTION_KEYS],
        refused: &[REFUSED_BESIDE_WINDOWS, LINEAR_REFUSED],
    },
    absent: &[
        ("num_key_value_heads", Count(2)),
        HEAD_DIM,
        ROTARY,
        ("num_experts", Count(512)),
        ("num_experts_per_tok", Count(10)),
        ("moe_intermediate_size", Count(512)),
        ("shared_expert_intermediate_size", Count(512)),
        ("norm_topk_prob", Flag(true)),
    ],
    ..LINEAR
};

/// Qwen3.5 without experts, the models of text.
pub const QWEN3_5: Family = Family {
    names: &["qwen3_5_text", "qwen3_5"],
    class: "Qwen3_5ForCausalLM",
    keys: &KeyTable {
        computes: &[COMPUTED_KEYS, LINEAR_KEYS],
        ignored: &[LINEAR_IGNORED],
        refused: &[REFUSED_BESIDE_WINDOWS, LINEAR_REFUSED],
    },
    absent: &[("num_key_value_heads", Count(4)), HEAD_DIM, ROTARY],
    ..LINEAR
};

/// Qwen3.5 with experts, the models of text.
pub const QWEN3_5_MOE: Family = Family {
    names: &["qwen3_5_moe_text", "qwen3_5_moe"],
    class: "Qwen3_5MoeForCausalLM",
    keys: &KeyTable {
        computes: &[COMPUTED_KEYS, MIXTURE_KEYS, LINEAR_KEYS, &["shared_expert_intermediate_size"]],
        ignored: &[LINEAR_IGNORED],
        refused: &[
            REFUSED_BESIDE_WINDOWS,
            LINEAR_REFUSED,
            // transformers does not read them.
            &[
                Refused { key: "norm_topk_prob", harmless: Harmless::True },
                Refused { key: "decoder_sparse_step", harmless: Harmless::Number(1.0) },
                Refused { key: "mlp_only_layers", harmless: Harmless::Empty },
            ],
        ],
    },
    absent: &[
        ("num_key_value_heads", Count(2)),
        HEAD_DIM,
        ROTARY,
        ("num_experts", Count(256)),
        ("num_experts_per_tok", Count(8)),
        ("moe_intermediate_size", Count(512)),
        ("shared_expert_intermediate_size", Count(512)),
    ],
    ..LINEAR
};
