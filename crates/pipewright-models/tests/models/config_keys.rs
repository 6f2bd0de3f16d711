//! Every key of `config.json` is computed, harmless, or refused with its name.

use pipewright_models::ModelConfig;
use pipewright_models::decoder::DecoderConfig;
use serde_json::{Value, json};

/// Returns the configuration of a small model of a family with some keys changed.
fn changed(family: &str, change: Value) -> Value {
    let mut json = json!({
        "model_type": family, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8
    });
    if family == "nemotron_h" {
        json["hybrid_override_pattern"] = json!("M*-");
    }
    if family == "gemma2" || family == "gemma3_text" {
        json["query_pre_attn_scalar"] = json!(8);
    }
    if family == "gpt2" {
        json = json!({"model_type": family, "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4});
    }
    if family == "mixtral" || family == "gpt_oss" {
        json["num_local_experts"] = json!(4);
        json["num_experts_per_tok"] = json!(2);
    }
    if ["qwen2_moe", "qwen3_next", "qwen3_5_moe_text"].contains(&family) {
        let experts = [("num_experts", 4), ("num_experts_per_tok", 2), ("moe_intermediate_size", 8)];
        json["shared_expert_intermediate_size"] = json!(8);
        experts.into_iter().for_each(|(key, size)| json[key] = json!(size));
    }
    if family == "glm4_moe" {
        let experts = [("n_routed_experts", 4), ("num_experts_per_tok", 2), ("moe_intermediate_size", 8)];
        let more = [("first_k_dense_replace", 1), ("n_shared_experts", 1), ("routed_scaling_factor", 1)];
        experts.into_iter().chain(more).for_each(|(key, size)| json[key] = json!(size));
    }
    if family.starts_with("deepseek") {
        let sizes = json!({
            "num_key_value_heads": 4, "head_dim": 4, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
            "v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
            "first_k_dense_replace": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.0, "n_group": 2,
            "topk_group": 1
        });
        json.as_object_mut().expect("a table").extend(sizes.as_object().expect("a table").clone());
    }
    let (Value::Object(json), Value::Object(change)) = (&mut json, change) else { panic!("both are tables") };
    json.extend(change);
    Value::Object(json.clone())
}

const FAMILIES: [&str; 5] = ["llama", "qwen2", "qwen3", "qwen3_moe", "nemotron_h"];
/// The families that differ from these in a few parts.
const FURTHER: [&str; 21] = [
    "mistral",
    "mixtral",
    "smollm3",
    "granite",
    "granitemoehybrid",
    "phi3",
    "olmo2",
    "olmo3",
    "ministral3",
    "glm4_moe",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "gemma2",
    "gemma3_text",
    "starcoder2",
    "qwen2_moe",
    "gpt2",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
];

fn check_accepted(families: &[&str], change: Value) {
    for family in families {
        let read = ModelConfig::from_json(changed(family, change.clone()));
        assert!(read.is_ok(), "{family} {change}: {:?}", read.map_err(|error| error.to_string()));
    }
}

/// Checks that every family refuses a change, with an error that names its key.
fn check_refused(families: &[&str], change: Value) {
    let key = change.as_object().and_then(|change| change.keys().next().cloned()).expect("a key");
    for family in families {
        let error = ModelConfig::from_json(changed(family, change.clone())).expect_err(family).to_string();
        assert!(error.contains(&key), "{family} {change}: {error}");
    }
}

#[test]
fn keys_that_change_the_computation_are_refused() {
    let refused = [
        json!({"attention_dropout": 0.1}),
        json!({"attention_multiplier": 0.0078}),
        json!({"embedding_multiplier": 12.0}),
        json!({"residual_multiplier": 0.22}),
        json!({"logits_scaling": 8}),
        json!({"logit_scale": 0.0625}),
        json!({"final_logit_softcapping": 30.0}),
        json!({"attn_logit_softcapping": 50.0}),
        json!({"query_pre_attn_scalar": 256}),
        json!({"qk_layernorm": true}),
        json!({"clip_qkv": 8.0}),
        json!({"alibi": true}),
        json!({"no_rope_layers": [1, 0]}),
        json!({"use_parallel_residual": true}),
        json!({"hidden_activation": "gelu_pytorch_tanh"}),
        json!({"embd_pdrop": 0.1}),
        json!({"rope_interleaved": true}),
        json!({"use_mrope": true}),
        json!({"per_layer_config": {"0": {"head_dim": 2}}}),
        json!({"kv_lora_rank": 512}),
        json!({"attention_temperature": 2.0}),
        json!({"attention_temperature": 0}),
        json!({"num_sinks": 4}),
        json!({"logit_cap": 30.0}),
        json!({"pre_ln_gain": 2.0}),
        json!({"sliding_size": 128}),
        json!({"use_bidirectional": true}),
        json!({"parallel_ff": true}),
        json!({"dilation": 2}),
        json!({"rotary_pct": 0.0}),
        json!({"qkv_bias": true}),
        json!({"position_embedding_type": "alibi"}),
        json!({"is_encoder_decoder": true}),
        json!({"architectures": ["MistralForCausalLM"]}),
        json!({"quantization_config": {"quant_method": "gptq", "bits": 4}}),
    ];
    refused.into_iter().for_each(|change| check_refused(&FAMILIES, change));
    check_refused(&["llama", "qwen2", "nemotron_h"], json!({"use_qk_norm": true}));
    check_refused(&["qwen3", "qwen3_moe"], json!({"use_qk_norm": false}));
    let decoders = &FAMILIES[..4];
    check_refused(decoders, json!({"hidden_act": "gelu"}));
    check_refused(decoders, json!({"partial_rotary_factor": 0.5}));
    let table = json!({"rope_type": "default", "partial_rotary_factor": 0.5});
    check_refused(decoders, json!({"partial_rotary_factor": null, "rope_parameters": table}));
    check_refused(decoders, json!({"layer_types": ["full_attention", "sliding_attention"]}));
    check_refused(&["llama"], json!({"sliding_window": 4096}));
    check_refused(&["llama", "nemotron_h"], json!({"sliding_window": 4096, "use_sliding_window": true}));
    check_refused(&["qwen2", "qwen3", "qwen3_moe"], json!({"mlp_bias": true}));
    check_refused(&["nemotron_h"], json!({"mlp_hidden_act": "silu"}));
    check_refused(&["nemotron_h"], json!({"attention_bias": true}));
    check_refused(&["nemotron_h"], json!({"mtp_loss_weight": 0.1}));
}

#[test]
fn harmless_values_are_accepted() {
    let harmless = [
        json!({"sliding_window": null, "use_sliding_window": false, "max_window_layers": 28}),
        json!({"attention_bias": false, "attention_dropout": 0.0}),
        json!({"embedding_multiplier": 1.0, "residual_multiplier": 1, "logits_scaling": 1.0}),
        json!({"qkv_bias": false, "clip_qkv": null, "embd_pdrop": 0.0, "no_rope_layers": []}),
        json!({"rope_interleaved": false, "use_mrope": false, "quantization_config": null}),
        json!({"pruned_heads": {}, "is_encoder_decoder": false, "torchscript": false, "tie_encoder_decoder": false}),
        json!({"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": -1, "pretraining_tp": 2, "use_cache": true}),
        json!({"unsloth_version": "2024.9", "_name_or_path": "x", "torch_dtype": "bfloat16", "max_length": 20}),
        json!({"num_sinks": 0, "logit_cap": 0.0, "dilation": null, "sliding_size": false, "kv_lora_rank": 0, "causal": true}),
        json!({"use_flash_attention": true, "_attn_implementation": "sdpa", "attn_implementation": "eager"}),
        json!({"kv_cache_dtype": "fp8", "neftune_noise_alpha": 5.0, "position_embedding_type": "absolute"}),
        json!({"attention_dropout": false, "use_mla": 0, "num_mtp_layers": false, "tensor_parallel_degree": 2}),
        json!({"position_embedding_type": "rope", "attention_bias": null, "initializer_range": null}),
        json!({"rms_norm_eps": null, "tie_word_embeddings": null, "mlp_bias": null, "num_key_value_heads": null}),
        json!({"temperature": 0.6, "top_p": 0.9, "auto_map": {"AutoConfig": "c.C"}}),
    ];
    check_accepted(
        &["qwen3", "qwen3_moe"],
        json!({"use_qk_norm": true, "shared_expert_intermediate_size": 0}),
    );
    check_accepted(&["llama"], json!({"is_llama_config": true, "transformers.js_config": {"dtype": "q4"}}));
    // A window is accepted where nothing turns it on.
    check_accepted(&["llama"], json!({"sliding_window": 4096, "use_sliding_window": false}));
    check_accepted(&["qwen2", "qwen3", "qwen3_moe"], json!({"sliding_window": 4096}));
    harmless.into_iter().for_each(|change| check_accepted(&FAMILIES[..4], change));
    check_accepted(&["llama"], json!({"architectures": ["LlamaModel"], "mlp_bias": false}));
    check_accepted(
        &["nemotron_h"],
        json!({"expand": 2, "chunk_size": 128, "rope_theta": 1e4, "sliding_window": null, "residual_in_fp32": false,
            "time_step_rank": 256, "mtp_layer_norm": true, "mtp_num_layers": 2, "use_bias": null,
            "mamba_proj_bias": false, "use_mamba_kernels": true, "num_nextn_predict_layers": 0}),
    );
}

#[test]
fn several_keys_are_named_together() {
    let json = changed("llama", json!({"embedding_multiplier": 12.0, "residual_multiplier": 0.22}));
    let error = ModelConfig::from_json(json).expect_err("a Granite").to_string();
    assert_eq!(
        error,
        "2 keys are not supported: `embedding_multiplier = 12.0` (only 1 is), `residual_multiplier = 0.22` (only 1 is)"
    );
}

/// No advice turns a model of another family into one that computes something else.
#[test]
fn an_unknown_family_is_refused_with_the_keys_that_differ() {
    let check = |family: &str, change: Value, named: &[&str]| {
        let error = ModelConfig::from_json(changed(family, change)).expect_err(family).to_string();
        assert!(!error.contains("set `model_type`"), "{error}");
        named.iter().for_each(|key| assert!(error.contains(key), "{family}: {error}"));
    };
    check(
        "cohere",
        json!({"logit_scale": 0.0625, "use_qk_norm": true, "layer_norm_gain": 2}),
        &["logit_scale", "use_qk_norm", "layer_norm_gain"],
    );
    check("cohere2", json!({"sliding_window_pattern": 4}), &["`sliding_window_pattern = 4`"]);
    check("ernie4_5", json!({"use_bias": true}), &["use_bias"]);
    check("hunyuan_v1_dense", json!({"use_cla": true}), &["use_cla"]);
    check("phi9", json!({}), &["may compute other things even where the keys are the same"]);
}

#[test]
fn every_key_of_the_positions_counts_or_is_refused() {
    let decoders = &FAMILIES[..4];
    let llama3 = |change: Value| {
        let mut table = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64});
        table.as_object_mut().expect("a table").extend(change.as_object().expect("a table").clone());
        table
    };
    for table in [
        json!({"rope_typ": "llama3"}),
        json!({"rope_type": "default", "factor": 2.0}),
        json!({"rope_type": "default", "mrope_section": [1, 1, 2]}),
        json!({"rope_type": "default", "rope_theta": {"__float__": "NaN"}}),
        json!({"alpha": 1000.0}),
        json!({"__float__": "NaN"}),
        json!({"$__toml_private_datetime": "2025-01-01"}),
        json!(["default"]),
        json!(2.0),
        llama3(json!({"factor": {"__float__": "NaN"}})),
        llama3(json!({"attention_factor": 1.0})),
        llama3(json!({"original_max_position_embeddings": 8.5})),
    ] {
        check_refused(decoders, json!({"rope_scaling": table}));
        check_refused(decoders, json!({"rope_parameters": table}));
    }
    // As in transformers, the base in the table takes precedence over the one next to it.
    for name in ["rope_scaling", "rope_parameters"] {
        let json =
            changed("llama", json!({"rope_theta": 10.0, name: {"type": "default", "rope_theta": 777.0}}));
        assert_eq!(ModelConfig::from_json(json).expect("it is valid").to_json()["rope_theta"], 777.0);
    }
    let mut scaled = llama3(json!({}));
    scaled.as_object_mut().expect("a table").remove("original_max_position_embeddings");
    let json = changed("llama", json!({"max_position_embeddings": 128, "rope_scaling": scaled}));
    let read = ModelConfig::from_json(json).expect("the length of the model stands for it").to_json();
    assert_eq!(read["rope_parameters"]["original_max_position_embeddings"], 128);
}

/// Returns a table of the positions `longrope` for the heads of [`changed`], with some keys changed.
fn longrope(change: Value) -> Value {
    let mut table = json!({"type": "longrope", "short_factor": [1.0, 1.0, 1.0, 1.0], "long_factor": [2.0, 2.0, 2.0, 2.0],
        "original_max_position_embeddings": 64});
    table.as_object_mut().expect("a table").extend(change.as_object().expect("a table").clone());
    table
}

#[test]
fn positions_out_of_range_are_refused_with_their_key() {
    let check = |change: Value, expected: &str| {
        let error = ModelConfig::from_json(changed("llama", change.clone())).expect_err("it is refused");
        assert!(error.to_string().contains(expected), "{change}: {error}");
        assert!(error.keys().iter().any(|key| expected.contains(key)), "{change}: {error}");
    };
    let scaling = |table: Value| json!({"max_position_embeddings": 128, "rope_scaling": table});
    check(
        json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
        "`max_position_embeddings` is missing or is not a number",
    );
    check(
        json!({"max_position_embeddings": 8, "head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}}),
        "`head_dim = 2` is out of range: it must be larger",
    );
    check(
        json!({"rope_scaling": longrope(json!({}))}),
        "`max_position_embeddings` is missing or is not a number",
    );
    for short in [json!([0.0, 1.0, 1.0, 1.0]), json!("1 1 1 1"), Value::Null] {
        check(
            scaling(longrope(json!({"short_factor": short}))),
            "`rope_scaling.short_factor` is missing or is not a list of positive numbers",
        );
    }
    check(
        scaling(longrope(json!({"long_factor": [1.0]}))),
        "`rope_scaling.long_factor` has 1 number: it must have 4, one for each pair",
    );
    check(
        scaling(longrope(json!({"original_max_position_embeddings": 1}))),
        "`original_max_position_embeddings = 1` is out of range: it must be above 1",
    );
    check(
        json!({"rope_theta": 1.0, "max_position_embeddings": 8, "rope_scaling": {"type": "yarn", "factor": 2.0}}),
        "`rope_theta = 1` is out of range",
    );
    check(
        scaling(json!({"type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": -7.2})),
        "`rope_scaling.mscale_all_dim = -7.2` is out of range: it must be zero or positive",
    );
    check(
        scaling(json!({"type": "yarn", "factor": 4.0, "truncate": 1})),
        "`rope_scaling.truncate = 1` is not supported: only true or false is",
    );
    // The name of Phi 3 alone.
    check(scaling(longrope(json!({"type": "su"}))), "`rope_scaling.rope_type = su` is not supported");
    let tables = |outer: f64, inner: f64| {
        let table = |share: f64| json!({"rope_type": "default", "partial_rotary_factor": share});
        changed("phi3", json!({"rope_parameters": table(outer), "rope_scaling": table(inner)}))
    };
    assert!(ModelConfig::from_json(tables(0.5, 0.5)).is_ok());
    let error = ModelConfig::from_json(tables(0.5, 1.0)).expect_err("two shares").to_string();
    assert!(error.contains("only the same as in `rope_parameters` is"), "{error}");
}

#[test]
fn phi3_has_the_positions_that_transformers_has_for_it() {
    let read = |table: Value| {
        let change = json!({"max_position_embeddings": 128, "rope_scaling": table});
        ModelConfig::from_json(changed("phi3", change)).map(|model| model.to_json())
    };
    let expected = read(longrope(json!({}))).expect("it is valid");
    for name in ["su", "yarn"] {
        assert_eq!(read(longrope(json!({"type": name}))).expect("an older name"), expected);
    }
    // The length next to the table counts more than the one in it.
    let outer = json!({"max_position_embeddings": 128, "original_max_position_embeddings": 32,
        "rope_scaling": longrope(json!({}))});
    let outer = ModelConfig::from_json(changed("phi3", outer)).expect("it is valid").to_json();
    assert_eq!(outer["rope_parameters"]["original_max_position_embeddings"], 32);
    for table in [
        json!({"type": "linear", "factor": 2.0}),
        json!({"type": "dynamic", "factor": 2.0}),
        json!({"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
    ] {
        let error = read(table).expect_err("transformers refuses it").to_string();
        assert!(error.contains("only default or longrope is"), "{error}");
    }
    let error = read(json!({"type": "yarn", "factor": 4.0})).expect_err("no divisors").to_string();
    assert!(error.contains("`rope_scaling.short_factor` is missing"), "{error}");
}

#[test]
fn the_further_families_refuse_what_they_do_not_compute() {
    check_refused(&FURTHER, json!({"attention_dropout": 0.1}));
    check_refused(&FURTHER, json!({"attention_temperature": 2.0}));
    check_refused(&FURTHER, json!({"rope_scaling": {"type": "default", "factor": 2.0}}));
    check_refused(
        &[
            "mistral",
            "ministral3",
            "mixtral",
            "phi3",
            "olmo3",
            "gemma2",
            "gemma3_text",
            "starcoder2",
            "gpt_oss",
        ],
        json!({"sliding_window": 0}),
    );
    let with_windows = ["smollm3", "qwen2_moe", "qwen3_moe"];
    check_refused(&with_windows, json!({"sliding_window": 0, "use_sliding_window": true}));
    check_refused(&["qwen3_moe"], json!({"layer_types": ["full_attention", "sliding_attention"]}));
    check_refused(&["gpt_oss"], json!({"experts_per_token": 3}));
    check_refused(&["gpt_oss"], json!({"swiglu_limit": 0.0}));
    check_refused(&["gpt_oss"], json!({"layer_types": ["full_attention"]}));
    check_refused(&["gpt_oss"], json!({"router_jitter_noise": 0.1}));
    check_refused(&["granite", "olmo2"], json!({"sliding_window": 4096}));
    check_refused(&["smollm3"], json!({"no_rope_layers": [1]}));
    check_refused(&["smollm3"], json!({"no_rope_layer_interval": 0}));
    for key in ["embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"] {
        check_refused(&["granite"], json!({key: 0.0}));
    }
    for key in ["resid_pdrop", "embd_pdrop"] {
        check_refused(&["phi3"], json!({key: 0.1}));
    }
    for key in ["attention_bias", "mlp_bias", "lm_head_bias"] {
        check_refused(&["phi3"], json!({key: true}));
    }
    check_refused(&["phi3"], json!({"partial_rotary_factor": 0.1}));
    check_refused(&["mistral", "granite"], json!({"partial_rotary_factor": 0.5}));
    check_refused(&["gemma2", "gemma3_text"], json!({"layer_types": ["full_attention"]}));
    check_refused(&["gemma3_text"], json!({"attn_logit_softcapping": 50.0}));
    check_refused(&["gemma3_text"], json!({"sliding_window_pattern": 0}));
    check_refused(&["gemma3_text"], json!({"rope_local_base_freq": 0}));
    for table in [json!({"rope_type": "linear", "factor": 2.0}), json!({"partial_rotary_factor": 0.5})] {
        check_refused(&["gemma3_text", "olmo3"], json!({"rope_parameters": {"sliding_attention": table}}));
    }
    let tables = json!({"full_attention": {"rope_type": "default"}, "chunked_attention": {}});
    check_refused(&["gemma3_text", "olmo3"], json!({"rope_parameters": tables}));
    check_refused(&["olmo3"], json!({"layer_types": ["full_attention"]}));
    check_refused(&["olmo3"], json!({"rope_local_base_freq": 10.0}));
    check_refused(&["ministral3"], json!({"layer_types": ["full_attention", "sliding_attention"]}));
    for growth in [json!(0.1), json!("fast")] {
        let table = json!({"rope_type": "default", "llama_4_scaling_beta": growth});
        check_refused(&["ministral3"], json!({"rope_parameters": table}));
    }
    let linear = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"];
    for keys in [
        json!({"layer_types": ["full_attention"]}),
        json!({"layer_types": ["full_attention", "sliding_attention"]}),
        json!({"linear_num_key_heads": 3}),
        json!({"linear_conv_kernel_dim": 0}),
        json!({"full_attention_interval": 0}),
        json!({"attn_output_gate": false}),
        json!({"output_gate_type": "sigmoid"}),
        json!({"use_sliding_window": true}),
    ] {
        check_refused(&linear, keys);
    }
    check_refused(&["qwen3_5_text"], json!({"num_experts": 4}));
    check_refused(&["qwen3_5_moe_text"], json!({"norm_topk_prob": false}));
    let images = json!({"rope_type": "default", "mrope_section": [1, 1, 0], "mrope_interleaved": true});
    check_accepted(&linear, json!({"rope_parameters": images, "mtp_num_hidden_layers": 1}));
    for keys in [json!({"n_group": 3}), json!({"num_experts_per_tok": 5}), json!({"moe_layer_freq": 2})] {
        check_refused(&["glm4_moe"], keys);
    }
    check_refused(&["gemma2"], json!({"attn_logit_softcapping": 0.0}));
    check_refused(&["gemma2"], json!({"sliding_window_size": 8, "sliding_window": 4}));
    check_refused(&["starcoder2"], json!({"residual_dropout": 0.1}));
    check_refused(&["starcoder2"], json!({"embedding_dropout": 0.1}));
    check_refused(&["starcoder2"], json!({"hidden_act": "silu"}));
    check_refused(&["starcoder2"], json!({"layer_norm_epsilon": 1e-3, "norm_epsilon": 1e-5}));
    check_refused(&["starcoder2"], json!({"norm_type": "rms_norm"}));
    check_refused(&["starcoder2"], json!({"scale_attn_weights": false}));
    check_refused(&["qwen2_moe", "mixtral"], json!({"num_experts_per_tok": 0}));
    check_refused(&["mixtral"], json!({"num_experts_per_tok": 5}));
    check_refused(&["mixtral"], json!({"num_experts": 8}));
    for (key, value) in
        [("router_jitter_noise", 0.1), ("moe_intermediate_size", 8.0), ("shared_expert_gate", 1.0)]
    {
        check_refused(&["mixtral"], json!({key: value}));
    }
}

#[test]
fn gpt_oss_reads_both_names_of_the_number_of_experts() {
    let read = |json: Value| ModelConfig::from_json(json).expect("it is valid");
    let mut other = changed("gpt_oss", json!({"num_experts": 4}));
    other.as_object_mut().expect("a table").remove("num_local_experts");
    assert_eq!(read(other.clone()), read(changed("gpt_oss", json!({}))));
    other.as_object_mut().expect("a table").remove("num_experts");
    assert_eq!(read(other).to_json()["num_local_experts"], 128);
}

#[test]
fn deepseek_refuses_what_it_does_not_compute() {
    let families = ["deepseek_v2", "deepseek_v3"];
    let refused = [
        json!({"head_dim": 8}),
        json!({"num_key_value_heads": 2}),
        json!({"moe_layer_freq": 2}),
        json!({"mlp_bias": true}),
        json!({"hidden_act": "gelu"}),
        json!({"scoring_func": "tanh"}),
        json!({"qk_nope_head_dim": 7}),
        json!({"kv_lora_rank": 0}),
        json!({"n_routed_experts": 0}),
        json!({"n_shared_experts": 0}),
        json!({"num_experts_per_tok": 5}),
        json!({"first_k_dense_replace": 99_999_999_999_u64}),
    ];
    refused.into_iter().for_each(|change| check_refused(&families, change));
    for family in families {
        let dynamic =
            json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 64});
        let error = ModelConfig::from_json(changed(family, dynamic)).expect_err(family).to_string();
        assert!(error.contains("only default, linear, yarn or llama3 is"), "{error}");
    }
    for change in [json!({"n_group": 3}), json!({"topk_group": 3}), json!({"n_group": 4})] {
        check_refused(&["deepseek_v3"], change.clone());
        let mut limited = changed("deepseek_v2", change);
        assert!(ModelConfig::from_json(limited.clone()).is_ok(), "groups have no effect");
        limited["topk_method"] = json!("group_limited_greedy");
        assert!(ModelConfig::from_json(limited).is_err());
    }
    check_refused(&["deepseek_v3"], json!({"topk_method": "greedy"}));
    check_refused(&["deepseek_v2"], json!({"topk_method": "noaux_tc"}));
    check_refused(&["deepseek_v2"], json!({"norm_topk_prob": true}));
    let ignored = json!({"aux_loss_alpha": 0.001, "seq_aux": true, "ep_size": 1, "qk_head_dim": 12, "moe_layer_freq": 1});
    check_accepted(&families, ignored);
    check_accepted(&["deepseek_v3"], json!({"num_nextn_predict_layers": 1, "scoring_func": "sigmoid"}));
    check_accepted(&families, json!({"q_lora_rank": null}));
}

/// The keys of google/gemma-2-9b.
#[test]
fn a_published_gemma2_is_read() {
    let json = json!({
        "architectures": ["Gemma2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
        "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 8192, "model_type": "gemma2",
        "num_attention_heads": 16, "num_hidden_layers": 42, "num_key_value_heads": 8, "pad_token_id": 0,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 4096,
        "sliding_window_size": 4096, "torch_dtype": "float32", "transformers_version": "4.42.0.dev0",
        "use_cache": true, "vocab_size": 256_000
    });
    assert!(ModelConfig::from_json(json).is_ok());
}

/// The keys of google/gemma-3-1b-it, and the same model as version 5 of transformers writes it.
#[test]
fn a_published_gemma3_is_read_in_both_spellings() {
    let json = json!({
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "attn_logit_softcapping": null, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
        "final_logit_softcapping": null, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152, "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768,
        "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
        "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000,
        "rope_scaling": null, "rope_theta": 1_000_000, "sliding_window": 512, "sliding_window_pattern": 6,
        "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
        "use_cache": true, "vocab_size": 262_144
    });
    let model = ModelConfig::from_json(json.clone()).expect("it is valid");
    let described = model.describe(1024);
    // The published number of parameters.
    assert_eq!(described.layers.iter().map(|layer| layer.parameters).sum::<u64>(), 999_885_952);
    // Every sixth layer sees all tokens.
    let work: Vec<u64> = described.layers[1..27].iter().map(|layer| layer.mixing).collect();
    let whole: Vec<usize> = (0..26).filter(|&index| work[index] > work[0]).collect();
    assert_eq!(whole, [5, 11, 17, 23]);
    let written = model.to_json();
    let tables = json!({
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}
    });
    assert_eq!(written["rope_parameters"], tables);
    let mut newer = json;
    for key in ["rope_scaling", "rope_theta", "rope_local_base_freq"] {
        newer.as_object_mut().expect("a table").remove(key);
    }
    newer["rope_parameters"] = tables;
    assert_eq!(
        ModelConfig::from_json(newer).expect("it is valid"),
        ModelConfig::from_json(written).expect("it is valid")
    );
}

/// The keys of allenai/Olmo-3-7B-Instruct, mistralai/Ministral-3-3B-Instruct-2512 (its text part), zai-org/GLM-4.5-Air
/// and Qwen/Qwen3-Next-80B-A3B-Instruct, with their published numbers of parameters.
#[test]
fn the_published_models_of_newer_families_are_read() {
    let types = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"].repeat(8);
    let olmo = json!({
        "architectures": ["Olmo3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "eos_token_id": 100_257,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
        "layer_types": types, "max_position_embeddings": 65536, "model_type": "olmo3", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 100_277, "rms_norm_eps": 1e-6,
        "rope_scaling": {"attention_factor": 1.207_944_154_167_983_6, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
            "original_max_position_embeddings": 8192, "rope_type": "yarn"},
        "rope_theta": 500_000, "sliding_window": 4096, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "transformers_version": "4.57.0", "use_cache": false, "vocab_size": 100_278
    });
    let ministral = json!({
        "model_type": "ministral3", "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072,
        "initializer_range": 0.02, "intermediate_size": 9216, "max_position_embeddings": 262_144,
        "num_attention_heads": 32, "num_hidden_layers": 26, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "rope_parameters": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1_000_000.0,
            "rope_type": "yarn", "type": "yarn", "max_position_embeddings": 262_144},
        "sliding_window": null, "tie_word_embeddings": true, "use_cache": true, "vocab_size": 131_072
    });
    let glm = json!({
        "architectures": ["Glm4MoeForCausalLM"], "attention_bias": true, "attention_dropout": 0.0, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 4096, "partial_rotary_factor": 0.5, "initializer_range": 0.02,
        "intermediate_size": 10944, "max_position_embeddings": 131_072, "model_type": "glm4_moe",
        "moe_intermediate_size": 1408, "norm_topk_prob": true, "num_attention_heads": 96, "n_group": 1, "topk_group": 1,
        "n_routed_experts": 128, "n_shared_experts": 1, "routed_scaling_factor": 1.0, "num_experts_per_tok": 8,
        "first_k_dense_replace": 1, "num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-5, "rope_scaling": null, "rope_theta": 1_000_000, "tie_word_embeddings": false,
        "torch_dtype": "bfloat16", "transformers_version": "4.54.0", "use_cache": true, "use_qk_norm": false,
        "vocab_size": 151_552
    });
    let next = json!({
        "architectures": ["Qwen3NextForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "decoder_sparse_step": 1, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "max_position_embeddings": 262_144, "mlp_only_layers": [], "model_type": "qwen3_next",
        "moe_intermediate_size": 512, "norm_topk_prob": true, "num_attention_heads": 16, "num_experts": 512,
        "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2, "output_router_logits": false,
        "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6, "rope_scaling": null, "rope_theta": 10_000_000,
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512, "tie_word_embeddings": false,
        "torch_dtype": "bfloat16", "transformers_version": "4.57.0.dev0", "use_cache": true, "use_sliding_window": false,
        "vocab_size": 151_936
    });
    let models =
        [(olmo, 7_298_011_136), (ministral, 3_429_006_336), (glm, 106_852_245_504), (next, 79_674_391_296)];
    for (json, expected) in models {
        let model = ModelConfig::from_json(json).expect("it is valid");
        let parameters: u64 = model.describe(1).layers.iter().map(|layer| layer.parameters).sum();
        assert_eq!(parameters, expected, "{}", model.family().name());
        assert_eq!(ModelConfig::from_json(model.to_json()).ok(), Some(model));
    }
}

/// The keys of bigcode/starcoder2-3b without its dropout, with its published number of parameters.
#[test]
fn a_published_starcoder2_is_read() {
    let json = json!({
        "activation_function": "gelu", "architectures": ["Starcoder2ForCausalLM"], "attention_dropout": 0.0,
        "attention_softmax_in_fp32": true, "scale_attention_softmax_in_fp32": true, "scale_attn_weights": true,
        "use_sliding_window": true, "bos_token_id": 0, "embedding_dropout": 0.0, "eos_token_id": 0,
        "hidden_act": "gelu_pytorch_tanh", "hidden_size": 3072, "initializer_range": 0.018_042, "intermediate_size": 12288, "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 16384, "mlp_type": "default", "model_type": "starcoder2", "norm_epsilon": 1e-5,
        "norm_type": "layer_norm", "num_attention_heads": 24, "num_hidden_layers": 30, "num_key_value_heads": 2,
        "residual_dropout": 0.0, "rope_theta": 999_999.442_035_888_1, "sliding_window": 4096,
        "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.37.0.dev0",
        "use_bias": true, "use_cache": true, "vocab_size": 49152
    });
    let model = ModelConfig::from_json(json).expect("it is valid");
    let parameters: u64 = model.describe(1).layers.iter().map(|layer| layer.parameters).sum();
    assert_eq!(parameters, 3_030_371_328);
    let written = model.to_json();
    assert_eq!((&written["norm_epsilon"], written.get("rms_norm_eps")), (&json!(1e-5), None));
}

#[test]
fn models_of_more_than_text_are_refused_with_the_reason() {
    let text = changed("gemma3_text", json!({}));
    for (family, key) in [("gemma3", "vision_config"), ("qwen2_audio", "audio_config")] {
        let json = json!({"model_type": family, "text_config": text, key: {"hidden_size": 8}});
        let error = ModelConfig::from_json(json).expect_err(family);
        assert_eq!(error.keys(), [key]);
        let expected =
            format!("`{family}` is a model of text and other inputs (`{key}`), and only models of text");
        assert!(error.to_string().starts_with(&expected), "{error}");
    }
}

/// The keys of mistralai/Mixtral-8x7B-v0.1, with its published number of parameters.
#[test]
fn a_published_mixtral_is_read() {
    let json = json!({
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "output_router_logits": false, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "router_aux_loss_coef": 0.02,
        "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "transformers_version": "4.36.0.dev0", "use_cache": true, "vocab_size": 32_000
    });
    let model = ModelConfig::from_json(json).expect("it is valid");
    let parameters: u64 = model.describe(1).layers.iter().map(|layer| layer.parameters).sum();
    assert_eq!(parameters, 46_702_792_704);
    let expert = "model.layers.31.block_sparse_moe.experts.7.w2.weight";
    let parameters = model.parameters().expect("it has layers");
    let expert = parameters.iter().find(|spec| spec.path == expert).expect("the name in files");
    assert_eq!(expert.shape, [14336, 4096]);
}

#[test]
fn usual_values_are_those_of_the_family() {
    let usual = |family: &str, key: &str| {
        let keys = json!({"head_dim": 64}).as_object().expect("a table").clone();
        let model = ModelConfig::of_sizes(family, DecoderConfig::new(32, 4), keys).expect("it is valid");
        model.to_json()[key].clone()
    };
    assert_eq!(usual("qwen3_moe", "norm_topk_prob"), true);
    assert_eq!(usual("qwen2_moe", "norm_topk_prob"), false);
    // The hidden states are as wide as 4 heads of 16.
    assert_eq!(usual("granite", "attention_multiplier"), 0.125);
    assert_eq!(usual("gemma2", "query_pre_attn_scalar"), 64);
}

#[test]
fn older_names_of_nemotron_keys_are_read() {
    let read = |change| ModelConfig::from_json(changed("nemotron_h", change)).expect("it is valid");
    let older = json!({"mamba_dt_min": 0.01, "mamba_d_conv": 3, "mamba_n_groups": 2, "time_step_min": 0.5});
    assert_eq!(read(older), read(json!({"time_step_min": 0.01, "conv_kernel": 3, "n_groups": 2})));
    let error = ModelConfig::from_json(changed("nemotron_h", json!({"layers_block_type": ["mlp"]})));
    let error = error.expect_err("two lists of blocks").to_string();
    assert!(error.contains("the same as in `layers_block_type`"), "{error}");
}

/// Returns the operations of the scores of the three layers of a small model with these keys.
fn mixing_of_layers(family: &str, keys: &Value) -> Vec<u64> {
    let mut sizes = DecoderConfig::new(32, 4);
    (sizes.hidden_size, sizes.intermediate_size, sizes.num_hidden_layers) = (32, 48, 3);
    let keys = keys.as_object().expect("a table").clone();
    let model = ModelConfig::of_sizes(family, sizes, keys).expect("it is valid");
    let layers = model.describe(64).layers;
    // A window lowers the work of the scores.
    layers[1..4].iter().map(|layer| layer.mixing).collect()
}

#[test]
fn layers_have_the_windows_that_transformers_gives_them() {
    let window = |more: Value| {
        let mut keys = json!({"use_sliding_window": true, "sliding_window": 5});
        keys.as_object_mut().expect("a table").extend(more.as_object().expect("a table").clone());
        keys
    };
    let narrow = |family: &str, more: Value| {
        let whole = mixing_of_layers(family, &json!({}))[0];
        mixing_of_layers(family, &window(more)).iter().map(|&work| work < whole).collect::<Vec<_>>()
    };
    assert_eq!(narrow("qwen3_moe", json!({})), [true; 3]);
    assert_eq!(narrow("qwen2_moe", json!({})), [true, false, true]);
    assert_eq!(narrow("qwen2_moe", json!({"max_window_layers": 1})), [true, false, false]);
    assert_eq!(narrow("qwen2", json!({"max_window_layers": 1})), [false, true, true]);
    assert_eq!(narrow("smollm3", json!({"no_rope_layer_interval": 2})), [false, true, false]);
    let types = json!({"layer_types": ["full_attention", "sliding_attention", "full_attention"]});
    for family in ["qwen2_moe", "smollm3"] {
        assert_eq!(narrow(family, types.clone()), [false, true, false], "{family}");
    }
    let whole = mixing_of_layers("gpt_oss", &json!({"sliding_window": null}))[0];
    let narrow = mixing_of_layers("gpt_oss", &json!({"sliding_window": 5}));
    assert!(narrow[0] < whole && narrow[1] == whole && narrow[2] < whole, "{narrow:?}");
    let unused = |family: &str, keys: Value| {
        let keys = keys.as_object().expect("a table").clone();
        ModelConfig::of_sizes(family, DecoderConfig::new(32, 4), keys).expect("valid").has_unused_window()
    };
    assert!(unused("qwen3_moe", json!({"sliding_window": 5})) && !unused("qwen3_moe", json!({})));
    assert!(unused("qwen2", json!({"use_sliding_window": true, "sliding_window": 5})), "layers from 28 on");
    assert!(!unused("qwen2_moe", window(json!({}))) && !unused("mistral", json!({"sliding_window": 5})));
}

/// The keys of openai-community/gpt2 without its dropout, with its published number of parameters.
#[test]
fn the_published_gpt2_is_read() {
    let json = json!({
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.0, "bos_token_id": 50256,
        "embd_pdrop": 0.0, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-5,
        "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
        "resid_pdrop": 0.0, "summary_activation": null, "summary_first_dropout": 0.1, "summary_proj_to_labels": true,
        "summary_type": "cls_index", "summary_use_proj": true,
        "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}}, "vocab_size": 50257,
        "tie_word_embeddings": true
    });
    let model = ModelConfig::from_json(json.clone()).expect("it is read");
    let parameters: u64 = model.describe(1024).layers.iter().map(|layer| layer.parameters).sum();
    assert_eq!(parameters, 124_439_808);
    assert_eq!(model.longest(), Some(1024));
    let error = model.check_length(1025).expect_err("it has 1024 positions").to_string();
    assert!(error.contains("1025 tokens") && error.contains("at most 1024"), "{error}");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let read = |change: Value, absent: &[&str]| {
        let mut json = json.clone();
        let keys = json.as_object_mut().expect("a table");
        keys.extend(change.as_object().expect("a table").clone());
        absent.iter().for_each(|key| drop(keys.remove(*key)));
        let path = folder.path().join("config.json");
        std::fs::write(&path, json.to_string()).expect("it is written");
        ModelConfig::read(&path).map_err(|error| format!("{error}: {:?}", std::error::Error::source(&error)))
    };
    assert_eq!(read(json!({}), &["n_positions", "tie_word_embeddings", "n_ctx"]).ok().as_ref(), Some(&model));
    // transformers drops elements if a file does not say otherwise.
    for key in ["attn_pdrop", "embd_pdrop", "resid_pdrop"] {
        for found in [read(json!({}), &[key]), read(json!({key: 0.1}), &[])] {
            assert_eq!(found.ok().as_ref(), Some(&model), "{key}");
            let keys = ModelConfig::dropout_keys(&folder.path().join("config.json"));
            assert_eq!(keys.ok(), Some(vec![key.to_owned()]));
        }
        // Only a file is read without its dropout.
        let mut changed = json.clone();
        changed[key] = json!(0.1);
        let error = ModelConfig::from_json(changed).expect_err(key).to_string();
        assert!(error.contains(&format!("`{key} = 0.1` is not supported: only 0 is")), "{error}");
    }
    for (change, part) in [
        (json!({"add_cross_attention": true}), "add_cross_attention"),
        (json!({"activation_function": "relu"}), "activation_function"),
        (json!({"rope_theta": 1e4}), "rope_theta"),
        (json!({"head_dim": 32}), "head_dim"),
        (json!({"num_key_value_heads": 4}), "num_key_value_heads"),
        (json!({"n_head": 7}), "num_attention_heads"),
        (json!({"scale_attn_by_head": true}), "scale_attn_by_head"),
    ] {
        let error = read(change, &[]).expect_err(part);
        assert!(error.contains(part), "{error}");
    }
}

/// The keys of openai/gpt-oss-20b without its quantisation, with its published number of parameters (21B,
/// 3.6B active).
#[test]
fn the_published_gpt_oss_is_read() {
    let json = json!({
        "architectures": ["GptOssForCausalLM"], "attention_bias": true, "attention_dropout": 0.0, "eos_token_id": 200002,
        "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
        "initializer_range": 0.02, "intermediate_size": 2880, "max_position_embeddings": 131072, "model_type": "gpt_oss",
        "layer_types": (0..24).map(|layer| if layer % 2 == 0 { "sliding_attention" } else { "full_attention" })
            .collect::<Vec<_>>(),
        "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
        "num_local_experts": 32, "output_router_logits": false, "pad_token_id": 199999, "rms_norm_eps": 1e-5,
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": false},
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": false, "transformers_version": "4.55.0.dev0", "use_cache": true, "vocab_size": 201088
    });
    let model = ModelConfig::from_json(json.clone()).expect("it is read");
    let parameters: u64 = model.describe(64).layers.iter().map(|layer| layer.parameters).sum();
    assert_eq!(parameters, 20_914_757_184);
    // transformers assumes these values for a file without the keys.
    let folder = tempfile::tempdir().expect("a scratch folder");
    let read = |json: &Value| {
        let path = folder.path().join("config.json");
        std::fs::write(&path, json.to_string()).expect("it is written");
        ModelConfig::read(&path).map_err(|error| error.to_string())
    };
    let mut short = json.clone();
    let keys = short.as_object_mut().expect("a table");
    let assumed = [
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "swiglu_limit",
        "attention_bias",
        "head_dim",
        "num_key_value_heads",
        "rms_norm_eps",
        "num_experts_per_tok",
        "experts_per_token",
    ];
    assumed.iter().for_each(|key| drop(keys.remove(*key)));
    assert_eq!(read(&short).as_ref(), Ok(&model));
    short["rope_parameters"] = json!({"rope_type": "default", "rope_theta": 150000});
    assert!(read(&short).is_ok_and(|plain| plain != model), "positions that are given count");
    let mut quantised = json;
    quantised["quantization_config"] =
        json!({"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"});
    assert!(read(&quantised).is_ok_and(|quantised| quantised == model), "its experts are read");
}
