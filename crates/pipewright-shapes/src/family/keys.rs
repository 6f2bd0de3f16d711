//! Lists of keys that several families share.

use crate::key_table::{Harmless, Refused};

/// The keys with which every family of this form computes.
pub(super) const COMPUTED_KEYS: &[&str] = &[
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
pub(super) const MIXTURE_KEYS: &[&str] = &[
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
pub(super) const REFUSED_KEYS: &[Refused] = &[
    Refused { key: "attention_dropout", harmless: Harmless::Number(0.0) },
    Refused { key: "use_sliding_window", harmless: Harmless::False },
    Refused { key: "layer_types", harmless: Harmless::AllOf("full_attention") },
];

/// The keys of layers with windows.
pub(super) const LAYER_WINDOW_KEYS: &[&str] =
    &["use_sliding_window", "sliding_window", "max_window_layers", "layer_types"];

/// The keys that families with [`LAYER_WINDOW_KEYS`] refuse.
pub(super) const REFUSED_BESIDE_WINDOWS: &[Refused] =
    &[Refused { key: "attention_dropout", harmless: Harmless::Number(0.0) }];

/// The keys with which Gemma 2 and 3 compute, in addition to every decoder's keys.
pub(super) const GEMMA_KEYS: &[&str] =
    &["query_pre_attn_scalar", "sliding_window", "layer_types", "final_logit_softcapping", "attention_bias"];

/// The keys that Gemma 2 and 3 refuse.
pub(super) const GEMMA_REFUSED: &[Refused] = &[
    Refused { key: "hidden_activation", harmless: Harmless::Word("gelu_pytorch_tanh") },
    Refused { key: "attention_dropout", harmless: Harmless::Number(0.0) },
    Refused { key: "use_bidirectional_attention", harmless: Harmless::False },
];

/// The keys of the latents in both families of DeepSeek.
pub(super) const DEEPSEEK_KEYS: &[&str] =
    &["q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"];

/// The keys of predictors of further tokens, which have no part in the loss.
pub(super) const PREDICTION_KEYS: &[&str] = &["num_nextn_predict_layers", "num_mtp_layers"];

/// The keys with which families with experts in groups compute, in addition to every decoder's keys.
pub(super) const GROUPED_EXPERTS_KEYS: &[&str] = &[
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "first_k_dense_replace",
    "n_shared_experts",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
    "attention_bias",
];

/// The keys of both families of DeepSeek that transformers ignores too: the loss of another library, and sums of others.
pub(super) const DEEPSEEK_IGNORED: &[&str] =
    &["aux_loss_alpha", "seq_aux", "ep_size", "output_router_logits", "qk_head_dim"];

/// The keys that both families of DeepSeek refuse.
pub(super) const DEEPSEEK_REFUSED: &[Refused] = &[
    Refused { key: "attention_dropout", harmless: Harmless::Number(0.0) },
    Refused { key: "num_key_value_heads", harmless: Harmless::SameAs("num_attention_heads") },
    Refused { key: "head_dim", harmless: Harmless::SameAs("qk_rope_head_dim") },
    Refused { key: "moe_layer_freq", harmless: Harmless::Number(1.0) },
    Refused { key: "mlp_bias", harmless: Harmless::False },
    Refused { key: "layer_types", harmless: Harmless::AllOf("full_attention") },
];
