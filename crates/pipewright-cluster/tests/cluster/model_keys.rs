//! The keys of a `config.json`: each is read, changes nothing, or is refused with its place.

use pipewright_shapes::kept::KeptNumbers;
use pipewright_shapes::model::{Attention, Delta, Indexer, Latent, Mixer, StateDecay};
use pipewright_shapes::reader::{Described, read};
use serde_json::{Map, Value, json};

use crate::data::cases;

fn base() -> Value {
    json!({
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100
    })
}

/// The file with further keys, which replace its own.
fn file(keys: &Value) -> String {
    let mut json = base();
    let table = |json: &Value| json.as_object().cloned().unwrap_or_default();
    json.as_object_mut().expect("a table").extend(table(keys));
    serde_json::to_string_pretty(&json).expect("JSON")
}

fn described(keys: &Value) -> Described {
    read(&file(keys)).unwrap_or_else(|error| panic!("{keys}: {error}"))
}

fn attention(keys: &Value, block: usize) -> Attention {
    let Mixer::Attention(attention) = described(keys).model.blocks[block].mixer else { panic!("{keys}") };
    attention
}

/// Reads the keys of each case, and compares the message of the error.
fn check_refused(table: &str) {
    for (keys, message) in cases(table) {
        let keys: Map<String, Value> = serde_json::from_str(&format!("{{{keys}}}")).expect("JSON");
        let error = read(&file(&keys.clone().into())).expect_err("an error").to_string();
        assert!(error.contains(&message), "{keys:?}: {error}");
    }
}

#[test]
fn keys_that_nobody_knows_are_refused_with_their_line() {
    let error = read(&file(&json!({"altup_num_inputs": 4}))).expect_err("an error");
    assert_eq!(error.keys(), ["altup_num_inputs"]);
    let expected = "line 2: the key `altup_num_inputs` is not known, and may change the parameters or the \
                    computation; remove what changes neither";
    assert_eq!(error.to_string(), expected);
    check_refused(
        r#"
"sparse_attention_config": {"block": 64}, "hc_mult": 4 => the keys `hc_mult`, `sparse_attention_config` are not known
"linear_attn_config": {"gate_lower_bound": -5.0} => the key `linear_attn_config.gate_lower_bound` is not known
"index_topk": 2048 => `index_topk`
"use_cla": true => `use_cla`
"normalization_function": "layernorm" => `normalization_function`
"mtp_use_dedicated_embeddings": true => `mtp_use_dedicated_embeddings`
"altup_active_idx": 0, "laurel_rank": 64 => the key `laurel_rank` is
"causal": false => `causal` is false; use true
"is_causal": false, "rms_norm": false => `is_causal` is false; use true
"rms_norm": false => `rms_norm` is false; use true
"use_rmsnorm": false => `use_rmsnorm` is false; use true
"layer_norm_elementwise_affine": false => `layer_norm_elementwise_affine` is false; use true
"do_layer_norm_before": false => `do_layer_norm_before` is false; use true
"enable_bias": false => `enable_bias` is false; use true
"use_rotary_pos_emb": false => `use_rotary_pos_emb` is false; use true
"use_rotary_pos_emb": 0 => `use_rotary_pos_emb` is 0; use true
"model_type": "qwen3", "use_qk_norm": false => `use_qk_norm` is false; use true
"model_type": "qwen3_moe", "qk_norm": false => `qk_norm` is false; use true
"model_type": "starcoder2", "scale_attn_weights": false => `scale_attn_weights` is false; use true
"word_embed_proj_dim": 0 => `word_embed_proj_dim` is 0; use the value of `hidden_size`
"#,
    );
    // The line belongs to the decoder's part.
    let inner = r#"{"vision_config": {"laurel_rank": 1},
"text_config":
"#;
    let error = read(&format!("{inner}{}}}", file(&json!({"laurel_rank": 64})))).expect_err("an error");
    assert!(error.to_string().starts_with("line 6: the key `laurel_rank`"), "{error}");
}

/// Names and values from the files of public models.
#[test]
fn keys_of_public_files_that_change_nothing_are_accepted() {
    let plain = described(&json!({})).model;
    let check = |keys: Value| assert_eq!(described(&keys).model, plain, "{keys}");
    check(json!({
        "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "dtype": "bfloat16", "pretraining_tp": 1,
        "bos_token_id": 1, "eos_token_id": [1, 106], "eod_token_id": 2, "transformers_version": "4.57.0",
        "use_cache": true, "initializer_range": 0.02, "init_method": "mup", "rms_norm_eps": 1e-5, "norm_eps": 1e-5,
        "auto_map": {"AutoConfig": "configuration_x.X"}, "attn_implementation": "sdpa", "ep_size": 1,
        "_attn_implementation_autoset": true, "unsloth_fixed": true, "transformers.js_config": {"dtype": "q4"}
    }));
    check(json!({
        "quantization_config": {"quant_method": "fp8"}, "rope_theta": 1e6, "rope_interleave": true,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096, "model_max_length": 4096, "seq_length": 4096
    }));
    check(json!({
        "scoring_func": "sigmoid", "score_function": "sigmoid", "routed_scaling_factor": 2.5, "norm_topk_prob": true,
        "router_aux_loss_coef": 0.001, "output_router_logits": true, "aux_loss_alpha": 0.001, "seq_aux": true,
        "router_dtype": "fp32", "moe_router_dtype": "float32", "moe_router_enable_expert_bias": true,
        "use_routing_bias": true, "moe_capacity": [64, 64, 64], "moe_gate": "topk", "use_grouped_topk": true,
        "moe_renormalize": true, "moe_router_activation_func": "sigmoid", "moe_use_aux_free": true
    }));
    check(json!({
        "use_rmsnorm": true, "normalization_function": "rmsnorm", "use_rotary_pos_emb": true, "use_cla": false,
        "cla_share_factor": 2, "embedding_multiplier": 12, "residual_multiplier": 0.22, "logits_scaling": 16,
        "attention_multiplier": 0.0078125, "query_pre_attn_scalar": 168, "attn_logit_softcapping": 50.0,
        "mamba_ssm_dtype": "float32", "mla_use_nope": true, "linear_allow_neg_eigval": true,
        "layernorm_mlp_alpha": 3.5, "postnorm": true, "mtp_loss_scaling_factor": 0.1, "for_llm_compressor": false
    }));
}

#[test]
fn parts_that_do_not_count_are_named() {
    let assumed = |keys: Value| described(&keys).assumed;
    assert_eq!(assumed(json!({"attention_dropout": 0.0})), [""; 0]);
    let dropout = "`attention_dropout` is 0.1: it counts as 0, as in training";
    assert_eq!(assumed(json!({"attention_dropout": 0.1})), [dropout]);
    let vision = "`vision_config` is left out: only the decoder counts";
    assert_eq!(assumed(json!({"vision_config": {"depth": 27}})), [vision]);
    let wrapped = json!({"model_type": "x", "image_token_id": 5, "vision_config": {}, "text_config": base()});
    assert_eq!(read(&wrapped.to_string()).expect("a model").assumed, [vision]);
}

#[test]
fn capped_logits_are_read() {
    let caps = |value: Value| described(&json!({"final_logit_softcapping": value})).model.caps_logits;
    assert_eq!([caps(json!(30.0)), caps(Value::Null)], [true, false]);
}

#[test]
fn the_part_of_a_head_with_positions_is_read() {
    let check = |keys: Value, sizes: [u64; 4]| {
        assert_eq!([0, 1, 2, 3].map(|block| attention(&keys, block).rotary_size), sizes, "{keys}");
    };
    check(json!({}), [16; 4]);
    check(json!({"partial_rotary_factor": 0.5}), [8; 4]);
    check(json!({"rope_parameters": {"partial_rotary_factor": 0.25}}), [4; 4]);
    check(json!({"rotary_dim": 6}), [6; 4]);
    check(json!({"position_embedding_type": "nope"}), [0; 4]);
    check(json!({"model_type": "glm4_moe"}), [8; 4]);
    check(json!({"no_rope_layers": [1, 0, 1, 1]}), [16, 0, 16, 16]);
    check(json!({"model_type": "smollm3"}), [16, 16, 16, 0]);
    check(json!({"model_type": "smollm3", "no_rope_layer_interval": 2}), [16, 0, 16, 0]);
    check_refused(
        r#""partial_rotary_factor": 1.5 => `partial_rotary_factor` is 1.5; use a number from 0 to 1"#,
    );
}

/// Cohere names the interval `layer_switch`. Blocks without a window have no positions.
#[test]
fn the_blocks_with_windows_are_read() {
    let check = |keys: Value, windows: [Option<u64>; 4], rotary_sizes: [u64; 4]| {
        let keys = with(json!({"model_type": "cohere2", "sliding_window": 8}), keys);
        let blocks = [0, 1, 2, 3].map(|block| attention(&keys, block));
        let found = (blocks.map(|block| block.window), blocks.map(|block| block.rotary_size));
        assert_eq!(found, (windows, rotary_sizes), "{keys}");
    };
    let some = Some(8);
    check(json!({}), [some, some, some, None], [16, 16, 16, 0]);
    check(json!({"layer_switch": 2}), [some, None, some, None], [16, 0, 16, 0]);
    check(json!({"sliding_window_pattern": 2}), [some, None, some, None], [16, 0, 16, 0]);
    check(
        json!({"_sliding_window_pattern": 3, "layer_switch": 3}),
        [some, some, None, some],
        [16, 16, 0, 16],
    );
    let kinds = json!(["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"]);
    let window =
        attention(&json!({"model_type": "cohere2", "sliding_window": 8, "layer_types": kinds}), 0).window;
    assert_eq!(window, None);
    check_refused(r#""layer_switch": 0 => `layer_switch` is 0; use a whole number from 1 to"#);
}

#[test]
fn gates_of_attention_are_read() {
    assert_eq!(attention(&json!({"attn_output_gate": true}), 0).gate, 64);
    check_refused(
        r#""model_type": "qwen3_next", "attn_output_gate": false => `attn_output_gate` is false; use true"#,
    );
    let parameters = |keys: Value| described(&keys).model.parameters();
    let more = parameters(json!({"attn_output_gate": true})) - parameters(json!({}));
    assert_eq!(more, 4 * 64 * 64);
}

/// The sizes of a latent attention of 4 heads.
fn latent() -> Value {
    json!({"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8})
}

fn with(table: Value, more: Value) -> Value {
    let (mut table, more) = (table.as_object().cloned().expect("a table"), more);
    table.extend(more.as_object().cloned().expect("a table"));
    table.into()
}

#[test]
fn latent_attention_needs_all_its_sizes() {
    for key in ["qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"] {
        let mut keys = latent();
        keys.as_object_mut().expect("a table").remove(key);
        let error = read(&file(&keys)).expect_err("an error").to_string();
        assert_eq!(error, format!("the configuration needs one of the keys {key}; add it"));
    }
    let keys = with(latent(), json!({"qk_rope_head_dim": 0}));
    let Mixer::Latent(without) = described(&keys).model.blocks[0].mixer else { panic!("latent attention") };
    assert_eq!(without.rotary_size, 0);
}

#[test]
fn an_indexer_has_parameters_and_limits_the_keys() {
    let keys = with(latent(), json!({"index_topk": 32, "index_n_heads": 2, "index_head_dim": 8}));
    let (plain, indexed) = (described(&latent()).model, described(&keys).model);
    let Mixer::Latent(Latent { indexer, .. }) = indexed.blocks[0].mixer else { panic!("latent attention") };
    assert_eq!(indexer, Some(Indexer { heads: 2, head_size: 8, keys: 32 }));
    let more = (indexed.parameters() - plain.parameters()) / 4;
    assert_eq!(more, 24 * 2 * 8 + 64 * (8 + 2) + 2 * 8);
    let operations =
        |mixer: Mixer| mixer.pair_operations(4096, pipewright_shapes::operations::AttentionCount::Causal);
    // The first 32 tokens see fewer keys.
    let seen = 32.0 * (1.0 - 32.0 / (2.0 * 4096.0));
    let expected = 2.0 * (4 * (8 + 4 + 8)) as f64 * seen + 2.0 * 16.0 * 2048.0;
    assert_eq!(operations(indexed.blocks[0].mixer), expected);
    for (further, message) in [
        (
            json!({"indexer_types": ["full", "shared", "full", "full"]}),
            "blocks without an indexer of their own",
        ),
        (json!({"index_topk_freq": 4}), "`index_topk_freq` is 4; use a whole number from 1 to 1"),
    ] {
        let error = read(&file(&with(keys.clone(), further))).expect_err("an error").to_string();
        assert!(error.contains(message), "{error}");
    }
}

/// The sizes of a Gated DeltaNet with 2 heads of keys and 4 of values.
fn gated() -> Value {
    json!({
        "model_type": "qwen3_next", "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "num_experts": 0
    })
}

const GATED: Delta = Delta {
    key_heads: 2,
    value_heads: 4,
    key_size: 8,
    value_size: 16,
    convolution: 4,
    decay: StateDecay::Head,
    chunk: 64,
};

/// Which blocks have this linear attention.
fn linear_blocks(keys: &Value, expected: Delta) -> Vec<usize> {
    let blocks = described(keys).model.blocks;
    let is_linear = |index: &usize| match blocks[*index].mixer {
        Mixer::Delta(delta) => {
            assert_eq!(delta, expected, "{keys}");
            true
        }
        _ => false,
    };
    (0..blocks.len()).filter(is_linear).collect()
}

#[test]
fn the_blocks_with_linear_attention_are_read() {
    let check = |keys: Value, delta: Delta, blocks: &[usize]| {
        assert_eq!(linear_blocks(&keys, delta), blocks, "{keys}");
    };
    check(gated(), GATED, &[0, 1, 2]);
    check(with(gated(), json!({"full_attention_interval": 2})), GATED, &[0, 2]);
    let kinds = json!(["full_attention", "linear_attention", "linear_attention", "full_attention"]);
    check(with(gated(), json!({"layer_types": kinds})), GATED, &[1, 2]);
    // Sizes that OLMo's files leave out.
    let olmo = Delta { key_heads: 4, value_heads: 4, key_size: 12, value_size: 24, ..GATED };
    check(json!({"model_type": "olmo_hybrid"}), olmo, &[0, 1, 2]);
    let channel = StateDecay::Channel { rank: Some(8) };
    let kimi = Delta { key_heads: 3, value_heads: 3, value_size: 8, decay: channel, ..GATED };
    let table = json!({
        "full_attn_layers": [2], "kda_layers": [1, 3, 4], "num_heads": 3, "head_dim": 8, "short_conv_kernel_size": 4
    });
    let keys = json!({"model_type": "kimi_linear", "linear_attn_config": table, "head_dim": 72});
    check(with(latent(), keys), kimi, &[0, 2, 3]);
    let ling = Delta { key_heads: 4, value_heads: 4, decay: StateDecay::Channel { rank: None }, ..kimi };
    let keys = json!({
        "model_type": "bailing_hybrid", "layer_group_size": 4, "head_dim": 8, "short_conv_kernel_size": 4
    });
    check(with(latent(), keys), ling, &[0, 1, 2]);
    let lightning = Delta {
        key_heads: 4,
        value_heads: 4,
        key_size: 16,
        value_size: 16,
        convolution: 0,
        decay: StateDecay::Fixed,
        chunk: 256,
    };
    check(json!({"model_type": "minimax_text_01", "attn_type_list": [0, 0, 0, 1]}), lightning, &[0, 1, 2]);
    check(
        json!({"model_type": "minimax", "layer_types": kinds, "block_size": 32}),
        Delta { chunk: 32, ..lightning },
        &[1, 2],
    );
    check_refused(
        r#"
"layer_types": ["linear_attention", "full_attention", "full_attention", "full_attention"] => the kind of block `linear_attention`
"attn_type_list": [0, 1, 1, 1] => the kind of block `linear_attention`
"model_type": "minimax", "attn_type_list": [0, 1] => `attn_type_list` is 2; use as many numbers as `num_hidden_layers`, 4
"model_type": "minimax" => needs one of the keys layer_types, attn_type_list
"full_attention_interval": 4 => `full_attention_interval` names the kind of block `linear_attention`
"layer_group_size": 4 => the kind of block `linear_attention`
"model_type": "qwen3_next", "linear_num_key_heads": 3 => `linear_num_key_heads` is 3; use a number that divides the 32 heads
"model_type": "kimi_linear", "linear_attn_config": {"num_heads": 0} => `linear_attn_config.num_heads` is 0; use a whole number
"#,
    );
}

/// The parameters follow from the tensors of transformers.
#[test]
fn linear_attention_has_its_parameters() {
    let check = |keys: Value, expected: u128| {
        let model = described(&keys).model;
        let block = &model.blocks[0];
        let feed_forward = 3 * 64 * 128;
        assert_eq!(block.parameters(&model) - feed_forward - 2 * 64, expected, "{keys}");
    };
    // Queries, keys, values and their gate, a strength and a decay of each head; the convolution; rates, biases, a norm.
    check(gated(), 64 * (2 * 16 + 2 * 64 + 2 * 4) + (2 * 16 + 64) * 4 + 2 * 4 + 16 + 64 * 64);
    let table = json!({"full_attn_layers": [4], "num_heads": 3, "head_dim": 8, "short_conv_kernel_size": 4});
    let kimi = with(latent(), json!({"model_type": "kimi_linear", "linear_attn_config": table}));
    check(kimi, 64 * (3 * 24 + 3 + 2 * 8) + 2 * 8 * 24 + 3 * 24 * 4 + 24 + 3 + 8 + 24 * 64);
    let kinds = json!(["linear_attention", "full_attention", "full_attention", "full_attention"]);
    check(json!({"model_type": "minimax", "layer_types": kinds}), 64 * 4 * 64 + 64 + 64 * 64);
}

#[test]
fn experts_are_where_the_file_says() {
    let check = |keys: Value, expected: &[usize]| {
        let experts = json!({"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16});
        let blocks = described(&with(experts, keys.clone())).model.blocks;
        let found: Vec<usize> =
            (0..4).filter(|&index: &usize| blocks[index].feed_forward.experts().is_some()).collect();
        assert_eq!(found, expected, "{keys}");
    };
    check(json!({}), &[0, 1, 2, 3]);
    check(json!({"mlp_layer_types": ["dense", "sparse", "sparse", "dense"], "moe_layer_freq": 1}), &[1, 2]);
    check(json!({"moe_layer_freq": [0, 1, 0, 1]}), &[1, 3]);
    check(json!({"moe_layer_start_index": 1, "moe_layer_end_index": 2, "moe_layer_interval": 1}), &[1, 2]);
    // The last block.
    check(json!({"moe_layer_start_index": 1, "moe_layer_end_index": -1}), &[1, 2, 3]);
    // A list with the same size for each block.
    check(json!({"moe_topk": [2, 2, 2, 2], "num_experts_per_tok": null}), &[0, 1, 2, 3]);
    // The fifth entry belongs to a predictor of a further token.
    check(json!({"moe_layer_freq": [0, 1, 0, 1, 1]}), &[1, 3]);
    check_refused(
        r#"
"num_experts": 8, "num_experts_per_tok": [2, 3, 2, 2] => `num_experts_per_tok` is [2,3,2,2]
"num_experts": 8, "num_experts_per_tok": 2, "moe_layer_end_index": -2 => `moe_layer_end_index` is -2; use a whole number from 0
"#,
    );
}

#[test]
fn lists_need_an_entry_for_each_block() {
    check_refused(
        r#"
"no_rope_layers": [1, 0, 1] => `no_rope_layers` is a list of length 3; use one entry for each of the 4 blocks
"mlp_layer_types": ["dense"] => `mlp_layer_types` is a list of length 1; use one entry for each of the 4 blocks
"moe_layer_freq": [0, 1, 1] => `moe_layer_freq` is a list of length 3; use one entry for each of the 4 blocks
"intermediate_size": [128, 128] => `intermediate_size` is a list of length 2; use one entry for each of the 4 blocks
"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "index_topk": 32, "index_n_heads": 2,
    "index_head_dim": 8, "indexer_types": ["full"] => `indexer_types` is a list of length 1; use one entry for each of the 4 blocks
"layer_types": ["full_attention"] => `the number of kinds in layer_types` is 1; use as many kinds as `num_hidden_layers`, 4
"attn_type_list": [1] => `attn_type_list` is 1; use as many numbers as `num_hidden_layers`, 4
"#,
    );
}

#[test]
fn linear_attention_keeps_what_its_kernels_read_again() {
    let (mixed, values) = (2 * 16 + 64, 64);
    let others = |extra| mixed + extra + values + mixed + 4 * 64 + values;
    assert_eq!(GATED.kept(), KeptNumbers { inputs: values, others: others(2 * 4), scales: 4 });
    let channel = Delta { decay: StateDecay::Channel { rank: Some(8) }, ..GATED };
    assert_eq!(channel.kept().others, others(16 + 4));
    assert_eq!([GATED.ranks_kept().inputs, channel.ranks_kept().inputs], [0, 2 * 8]);
    let fixed = Delta { decay: StateDecay::Fixed, convolution: 0, ..GATED };
    assert_eq!(fixed.kept().others, mixed + values + values);
}
