//! The families without experts that training knows.

use super::keys::{
    COMPUTED_KEYS, GEMMA_KEYS, GEMMA_REFUSED, LAYER_WINDOW_KEYS, REFUSED_BESIDE_WINDOWS, REFUSED_KEYS,
};
use super::row::AbsentKey::{Count, Flag, Number, Table};
use super::row::{ALL_NORM, BASE, BIASED, Family, GPT, HEAD_NORM, SANDWICH};
use crate::key_table::{Harmless, KeyTable, Refused};
use crate::vectors::{QueryKeyNorm, Vectors};

/// Llama.
pub const LLAMA: Family = Family {
    names: &["llama"],
    class: "LlamaForCausalLM",
    keys: &KeyTable {
        computes: &[COMPUTED_KEYS, &["attention_bias", "mlp_bias"]],
        ignored: &[&["max_window_layers"]],
        refused: &[
            REFUSED_KEYS,
            &[Refused { key: "sliding_window", harmless: Harmless::Without("use_sliding_window") }],
        ],
    },
    ..BASE
};

/// Mistral.
pub const MISTRAL: Family = Family {
    names: &["mistral"],
    class: "MistralForCausalLM",
    keys: &KeyTable {
        computes: &[COMPUTED_KEYS, &["sliding_window"]],
        ignored: &[],
        refused: &[REFUSED_KEYS],
    },
    absent: &[("num_key_value_heads", Count(8)), ("sliding_window", Count(4096))],
    ..BASE
};

/// SmolLM 3.
pub const SMOLLM3: Family = Family {
    names: &["smollm3"],
    class: "SmolLM3ForCausalLM",
    keys: &KeyTable {
        computes: &[
            COMPUTED_KEYS,
            &["use_sliding_window", "sliding_window", "layer_types"],
            &["no_rope_layers", "no_rope_layer_interval", "attention_bias", "mlp_bias"],
        ],
        ignored: &[&["max_window_layers"]],
        refused: &[REFUSED_BESIDE_WINDOWS],
    },
    absent: &[
        ("num_key_value_heads", Count(4)),
        ("rope_theta", Number(2e6)),
        ("tie_word_embeddings", Flag(true)),
    ],
    without_positions_every: Some(4),
    ..BASE
};

/// Qwen2.
pub const QWEN2: Family = Family {
    names: &["qwen2"],
    class: "Qwen2ForCausalLM",
    keys: &KeyTable {
        computes: &[COMPUTED_KEYS, LAYER_WINDOW_KEYS],
        ignored: &[&["attention_bias"]],
        refused: &[REFUSED_BESIDE_WINDOWS, &[Refused { key: "mlp_bias", harmless: Harmless::False }]],
    },
    absent: &[("num_key_value_heads", Count(32)), ("sliding_window", Count(4096))],
    vectors: BIASED,
    output_bias_is_given: false,
    ..BASE
};

/// Qwen3.
pub const QWEN3: Family = Family {
    names: &["qwen3"],
    class: "Qwen3ForCausalLM",
    keys: &KeyTable {
        computes: &[COMPUTED_KEYS, LAYER_WINDOW_KEYS, &["attention_bias"]],
        ignored: &[],
        refused: &[
            REFUSED_BESIDE_WINDOWS,
            &[
                Refused { key: "mlp_bias", harmless: Harmless::False },
                Refused { key: "use_qk_norm", harmless: Harmless::True },
                Refused { key: "qk_norm", harmless: Harmless::True },
            ],
        ],
    },
    absent: &[("num_key_value_heads", Count(32)), ("head_dim", Count(128)), ("sliding_window", Count(4096))],
    vectors: HEAD_NORM,
    ..BASE
};

/// Gemma 2.
pub const GEMMA2: Family = Family {
    names: &["gemma2"],
    class: "Gemma2ForCausalLM",
    keys: &KeyTable {
        computes: &[COMPUTED_KEYS, GEMMA_KEYS, &["attn_logit_softcapping"]],
        ignored: &[&["hidden_act"]],
        refused: &[
            GEMMA_REFUSED,
            &[Refused { key: "sliding_window_size", harmless: Harmless::SameAs("sliding_window") }],
        ],
    },
    absent: &[
        ("num_key_value_heads", Count(4)),
        ("head_dim", Count(256)),
        ("query_pre_attn_scalar", Count(256)),
        ("sliding_window", Count(4096)),
        ("attn_logit_softcapping", Number(50.0)),
        ("final_logit_softcapping", Number(30.0)),
        ("tie_word_embeddings", Flag(true)),
    ],
    gated: Some(true),
    vectors: SANDWICH,
    whole_every: Some(2),
    ..BASE
};

/// Gemma 3.
pub const GEMMA3: Family = Family {
    names: &["gemma3_text", "gemma3"],
    class: "Gemma3ForCausalLM",
    keys: &KeyTable {
        computes: &[COMPUTED_KEYS, GEMMA_KEYS, &["sliding_window_pattern", "rope_local_base_freq"]],
        ignored: &[&["hidden_act", "_sliding_window_pattern"]],
        refused: &[
            GEMMA_REFUSED,
            // transformers reads it and does not compute with it.
            &[Refused { key: "attn_logit_softcapping", harmless: Harmless::Nothing }],
        ],
    },
    absent: &[
        ("vocab_size", Count(262_208)),
        ("num_attention_heads", Count(8)),
        ("num_key_value_heads", Count(4)),
        ("head_dim", Count(256)),
        ("rope_theta", Number(1e6)),
        ("query_pre_attn_scalar", Count(256)),
        ("sliding_window", Count(4096)),
        ("tie_word_embeddings", Flag(true)),
    ],
    gated: Some(true),
    vectors: Vectors { query_key_norm: QueryKeyNorm::Head, ..SANDWICH },
    whole_every: Some(6),
    ..BASE
};

/// Granite.
pub const GRANITE: Family = Family {
    names: &["granite"],
    class: "GraniteForCausalLM",
    keys: &KeyTable {
        computes: &[
            COMPUTED_KEYS,
            &[
                "embedding_multiplier",
                "residual_multiplier",
                "attention_multiplier",
                "logits_scaling",
                "attention_bias",
                "mlp_bias",
            ],
        ],
        ignored: &[],
        refused: &[REFUSED_KEYS],
    },
    ..BASE
};

/// Granite 4.
pub const GRANITE_HYBRID: Family = Family {
    names: &["granitemoehybrid"],
    class: "GraniteMoeHybridForCausalLM",
    keys: &KeyTable {
        computes: &[
            COMPUTED_KEYS,
            &[
                "embedding_multiplier",
                "residual_multiplier",
                "attention_multiplier",
                "logits_scaling",
                "attention_bias",
                "shared_intermediate_size",
                "num_local_experts",
                "num_experts_per_tok",
                "output_router_logits",
                "router_aux_loss_coef",
                "position_embedding_type",
                "layer_types",
                "mamba_n_heads",
                "mamba_d_head",
                "mamba_n_groups",
                "mamba_d_state",
                "mamba_d_conv",
                "mamba_expand",
                "mamba_conv_bias",
                "time_step_limit",
            ],
        ],
        ignored: &[&["mamba_chunk_size", "init_method"]],
        refused: &[
            REFUSED_BESIDE_WINDOWS,
            &[
                Refused { key: "mlp_bias", harmless: Harmless::False },
                Refused { key: "mamba_proj_bias", harmless: Harmless::False },
                Refused { key: "normalization_function", harmless: Harmless::Word("rmsnorm") },
                // transformers does not read them: all layers have the experts of `num_local_experts`.
                Refused { key: "num_experts", harmless: Harmless::SameAs("num_local_experts") },
                Refused { key: "decoder_sparse_step", harmless: Harmless::Number(1.0) },
                Refused { key: "first_k_dense_replace", harmless: Harmless::Number(0.0) },
            ],
        ],
    },
    usual: &[
        ("num_local_experts", 8),
        ("num_experts_per_tok", 2),
        ("shared_intermediate_size", 1024),
        ("mamba_n_heads", 128),
        ("mamba_n_groups", 1),
        ("mamba_d_state", 256),
        ("mamba_d_conv", 4),
        ("mamba_chunk_size", 256),
    ],
    rotary: 0.0,
    ..BASE
};

/// OLMo 2.
pub const OLMO2: Family = Family {
    names: &["olmo2"],
    class: "Olmo2ForCausalLM",
    keys: &KeyTable {
        computes: &[COMPUTED_KEYS, &["attention_bias"]],
        ignored: &[],
        refused: &[REFUSED_KEYS],
    },
    absent: &[("rms_norm_eps", Number(1e-5))],
    vectors: ALL_NORM,
    ..BASE
};

/// OLMo 3.
pub const OLMO3: Family = Family {
    names: &["olmo3"],
    class: "Olmo3ForCausalLM",
    keys: &KeyTable {
        computes: &[COMPUTED_KEYS, &["sliding_window", "layer_types", "attention_bias"]],
        ignored: &[],
        refused: &[REFUSED_BESIDE_WINDOWS],
    },
    absent: &[
        ("rms_norm_eps", Number(1e-5)),
        ("rope_theta", Number(500_000.0)),
        ("sliding_window", Count(4096)),
    ],
    vectors: ALL_NORM,
    whole_every: Some(4),
    ..BASE
};

/// Ministral 3.
pub const MINISTRAL3: Family = Family {
    names: &["ministral3"],
    class: "Ministral3ForCausalLM",
    ignored_positions: &["max_position_embeddings"],
    keys: &KeyTable {
        computes: &[COMPUTED_KEYS, &["sliding_window"]],
        ignored: &[],
        refused: &[REFUSED_KEYS],
    },
    absent: &[
        ("num_key_value_heads", Count(8)),
        ("head_dim", Count(128)),
        ("rms_norm_eps", Number(1e-5)),
        (
            "rope_scaling",
            Table(
                r#"{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
                    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                    "llama_4_scaling_beta": 0.1}"#,
            ),
        ),
    ],
    ..BASE
};

/// Phi 3.
pub const PHI3: Family = Family {
    names: &["phi3"],
    class: "Phi3ForCausalLM",
    // Older names, which transformers reads so too.
    longrope_names: &["su", "yarn"],
    keys: &KeyTable {
        computes: &[COMPUTED_KEYS, &["partial_rotary_factor", "sliding_window"]],
        ignored: &[&["interpolate_factor", "full_attn_mod"]],
        refused: &[
            REFUSED_KEYS,
            &[
                Refused { key: "resid_pdrop", harmless: Harmless::Number(0.0) },
                Refused { key: "embd_pdrop", harmless: Harmless::Number(0.0) },
                Refused { key: "attention_bias", harmless: Harmless::False },
                Refused { key: "mlp_bias", harmless: Harmless::False },
                Refused { key: "lm_head_bias", harmless: Harmless::False },
            ],
        ],
    },
    absent: &[
        ("rms_norm_eps", Number(1e-5)),
        ("max_position_embeddings", Count(4096)),
        ("original_max_position_embeddings", Count(4096)),
    ],
    ..BASE
};

/// StarCoder 2.
pub const STARCODER2: Family = Family {
    names: &["starcoder2"],
    class: "Starcoder2ForCausalLM",
    keys: &KeyTable {
        computes: &[COMPUTED_KEYS, &["norm_epsilon", "sliding_window", "use_bias"]],
        // Published files have these keys, and transformers does not read them: `hidden_act` is the activation, the
        // softmax always has single precision, and `sliding_window` alone says whether there is a window.
        ignored: &[&[
            "activation_function",
            "attention_softmax_in_fp32",
            "scale_attention_softmax_in_fp32",
            "use_sliding_window",
        ]],
        refused: &[&[
            Refused { key: "attention_dropout", harmless: Harmless::Number(0.0) },
            Refused { key: "layer_types", harmless: Harmless::AllOf("full_attention") },
            Refused { key: "scale_attn_weights", harmless: Harmless::True },
            Refused { key: "hidden_act", harmless: Harmless::Word("gelu_pytorch_tanh") },
            Refused { key: "residual_dropout", harmless: Harmless::Number(0.0) },
            Refused { key: "embedding_dropout", harmless: Harmless::Number(0.0) },
            Refused { key: "layer_norm_epsilon", harmless: Harmless::SameAs("norm_epsilon") },
            Refused { key: "norm_type", harmless: Harmless::Word("layer_norm") },
            Refused { key: "mlp_type", harmless: Harmless::Word("default") },
        ]],
    },
    renamed: &[("norm_epsilon", "rms_norm_eps")],
    absent: &[
        ("num_key_value_heads", Count(2)),
        ("norm_epsilon", Number(1e-5)),
        ("initializer_range", Number(0.018_042)),
        ("tie_word_embeddings", Flag(true)),
    ],
    more_positions: None,
    ..GPT
};

/// GPT-2.
pub const GPT2: Family = Family {
    names: &["gpt2"],
    class: "GPT2LMHeadModel",
    keys: &KeyTable {
        computes: &[&[
            "vocab_size",
            "n_positions",
            "max_position_embeddings",
            "n_embd",
            "hidden_size",
            "n_layer",
            "num_hidden_layers",
            "n_head",
            "num_attention_heads",
            "n_inner",
            "layer_norm_epsilon",
            "initializer_range",
            "tie_word_embeddings",
            "scale_attn_weights",
            "scale_attn_by_inverse_layer_idx",
        ]],
        // Scores are computed in single precision anyway, and the keys of the summary belong to classifiers.
        ignored: &[&["reorder_and_upcast_attn", "n_ctx", "summary_*", "gradient_checkpointing"]],
        refused: &[&[
            Refused { key: "resid_pdrop", harmless: Harmless::Number(0.0) },
            Refused { key: "embd_pdrop", harmless: Harmless::Number(0.0) },
            Refused { key: "attn_pdrop", harmless: Harmless::Number(0.0) },
            Refused {
                key: "activation_function",
                harmless: Harmless::OneOf(&["gelu_new", "gelu_pytorch_tanh"]),
            },
            Refused { key: "intermediate_size", harmless: Harmless::SameAs("n_inner") },
            Refused { key: "num_key_value_heads", harmless: Harmless::SameAs("n_head") },
            Refused { key: "add_cross_attention", harmless: Harmless::False },
        ]],
    },
    renamed: &[
        ("n_positions", "max_position_embeddings"),
        ("n_embd", "hidden_size"),
        ("n_layer", "num_hidden_layers"),
        ("n_head", "num_attention_heads"),
        ("n_inner", "intermediate_size"),
        ("layer_norm_epsilon", "rms_norm_eps"),
    ],
    absent: &[
        ("n_positions", Count(1024)),
        ("layer_norm_epsilon", Number(1e-5)),
        ("tie_word_embeddings", Flag(true)),
        ("resid_pdrop", Number(0.1)),
        ("embd_pdrop", Number(0.1)),
        ("attn_pdrop", Number(0.1)),
    ],
    ..GPT
};
