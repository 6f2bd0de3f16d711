//! The keys of `config.json` that all families of this form share.

use crate::config_key::{Harmless, Refused};

/// The keys with which every family of this form computes.
pub(crate) const COMPUTED_KEYS: &[&str] = &[
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "original_max_position_embeddings",
    "tie_word_embeddings",
    "initializer_range",
    "max_position_embeddings",
];

/// The keys of a mixture of experts.
pub(crate) const MIXTURE_KEYS: &[&str] = &[
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
    "router_aux_loss_coef",
    "output_router_logits",
];

/// The keys that every family of this form refuses.
pub(crate) const REFUSED_KEYS: &[Refused] = &[
    Refused { key: "attention_dropout", harmless: Harmless::Number(0.0) },
    Refused { key: "use_sliding_window", harmless: Harmless::False },
    Refused { key: "layer_types", harmless: Harmless::AllOf("full_attention") },
];
