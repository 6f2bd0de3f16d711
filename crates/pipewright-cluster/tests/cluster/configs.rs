//! Models from their `config.json`.

use pipewright_shapes::model::{Attention, Block, Dense, FeedForward, Mixer};
use pipewright_shapes::operations::AttentionCount;
use pipewright_shapes::reader::{Described, read};

use crate::data::cases;

fn described(text: &str) -> Described {
    read(text).expect("a model")
}

fn windows(blocks: &[Block]) -> Vec<Option<u64>> {
    let window = |block: &Block| match block.mixer {
        Mixer::Attention(attention) => attention.window,
        _ => None,
    };
    blocks.iter().map(window).collect()
}

const LLAMA: &str = r#"{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "hidden_act": "silu",
    "tie_word_embeddings": false, "rope_theta": 500000.0, "torch_dtype": "bfloat16"}"#;

#[test]
fn grouped_attention_and_gated_feed_forward() {
    let model = described(LLAMA).model;
    assert_eq!(model.parameters(), 8_030_261_248);
    let attention =
        Attention { heads: 32, key_value_heads: 8, head_size: 128, window: None, rotary_size: 128, gate: 0 };
    assert_eq!(model.blocks[0].mixer, Mixer::Attention(attention));
    assert_eq!(model.blocks[0].feed_forward, FeedForward::Dense(Dense { inner: 14_336, gated: true }));
}

#[test]
fn gpt_has_biases_and_a_tied_head() {
    let text = r#"{"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257,
        "activation_function": "gelu_new"}"#;
    // The published number, which includes a table of 1,024 positions.
    assert_eq!(described(text).model.parameters(), 124_439_808);
}

/// GPT-NeoX 20B (arXiv 2204.06745), StarCoder (arXiv 2305.06161) with 8,192 positions in a table, and
/// StarCoder 2 3B (arXiv 2402.19173), by the elements of their published tensors.
#[test]
fn families_of_gpt_have_no_gate() {
    let check = |text: &str, parameters: u128| {
        let model = described(text).model;
        assert_eq!(model.parameters(), parameters, "{}", model.name);
    };
    let neox = r#"{"model_type": "gpt_neox", "hidden_size": 6144, "intermediate_size": 24576,
        "num_hidden_layers": 44, "num_attention_heads": 64, "vocab_size": 50432, "hidden_act": "gelu",
        "tie_word_embeddings": false}"#;
    check(neox, 20_554_567_680);
    let bigcode = r#"{"model_type": "gpt_bigcode", "n_embd": 6144, "n_inner": 24576, "n_layer": 40,
        "n_head": 48, "vocab_size": 49152, "activation_function": "gelu_pytorch_tanh", "multi_query": true}"#;
    check(bigcode, 15_517_456_384 - 8_192 * 6_144);
    let starcoder2 = r#"{"model_type": "starcoder2", "hidden_size": 3072, "intermediate_size": 12288,
        "num_hidden_layers": 30, "num_attention_heads": 24, "num_key_value_heads": 2, "vocab_size": 49152,
        "hidden_act": "gelu_pytorch_tanh"}"#;
    check(starcoder2, 3_030_371_328);
    // The keys of the published file.
    let published = r#""activation_function": "gelu", "architectures": ["Starcoder2ForCausalLM"],
        "attention_dropout": 0.1, "attention_softmax_in_fp32": true, "bos_token_id": 0, "embedding_dropout": 0.1,
        "eos_token_id": 0, "initializer_range": 0.018042, "layer_norm_epsilon": 1e-05,
        "max_position_embeddings": 16384, "mlp_type": "default", "norm_epsilon": 1e-05, "norm_type": "layer_norm",
        "residual_dropout": 0.1, "rope_theta": 999999.4420358813, "scale_attention_softmax_in_fp32": true,
        "scale_attn_weights": true, "sliding_window": 4096, "torch_dtype": "bfloat16",
        "transformers_version": "4.37.0.dev0", "use_bias": true, "use_cache": true, "use_sliding_window": true}"#;
    let published = starcoder2.replace('}', &format!(", {published}"));
    check(&published, 3_030_371_328);
    let gated = read(&published.replace("default", "gated")).expect_err("an error");
    assert_eq!(gated.keys(), ["mlp_type"]);
    // Gemma has the same activation, with a gate.
    let gemma = described(&starcoder2.replace("starcoder2", "gemma")).model;
    assert_eq!(gemma.blocks[0].feed_forward, FeedForward::Dense(Dense { inner: 12_288, gated: true }));
}

#[test]
fn the_largest_sizes_have_a_number_of_parameters() {
    let text = r#"{"hidden_size": 1048576, "intermediate_size": 1048576, "num_hidden_layers": 20,
        "num_attention_heads": 1048576, "head_dim": 1048576, "vocab_size": 268435456, "num_experts": 1048576,
        "num_experts_per_tok": 1048576, "moe_intermediate_size": 1048576}"#;
    let model = described(text).model;
    assert!(model.parameters() > 1 << 66, "{}", model.parameters());
    assert!(model.operations_per_token(4096, AttentionCount::Causal).is_finite());
}

#[test]
fn windows_of_some_layers() {
    let base = r#""hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
        "vocab_size": 100, "sliding_window": 16"#;
    let some = [Some(16), None, Some(16), None];
    let by_pattern = described(&format!("{{{base}, \"sliding_window_pattern\": 2}}"));
    assert_eq!(windows(&by_pattern.model.blocks), some);
    let kinds =
        r#""layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]"#;
    assert_eq!(windows(&described(&format!("{{{base}, {kinds}}}")).model.blocks), some);
    let unused = described(&format!("{{{base}, \"use_sliding_window\": false}}"));
    assert_eq!(windows(&unused.model.blocks), [None; 4]);
    let last = described(&format!("{{{base}, \"use_sliding_window\": true, \"max_window_layers\": 3}}"));
    assert_eq!(windows(&last.model.blocks), [None, None, None, Some(16)]);
}

/// DeepSeek V2 chooses a token's experts among all of them with the method `greedy`.
#[test]
fn groups_limit_the_experts_of_a_token() {
    let check = |keys: &str, expected: (u64, u64)| {
        let keys = format!("\"num_experts\": 8, \"num_experts_per_tok\": 2, {keys}\"rope_theta\"");
        let model = described(&LLAMA.replace("\"rope_theta\"", &keys)).model;
        let experts = model.blocks[0].feed_forward.experts().expect("experts");
        assert_eq!((experts.groups, experts.groups_per_token), expected, "{keys}");
    };
    check("", (1, 1));
    check(r#""n_group": 4, "topk_group": 2, "#, (4, 2));
    check(r#""n_group": 4, "topk_group": null, "#, (4, 4));
    check(r#""n_group": null, "topk_group": null, "topk_method": "greedy", "#, (1, 1));
    check(r#""n_group": 4, "topk_group": 2, "topk_method": "greedy", "#, (1, 1));
}

#[test]
fn hybrids_have_one_letter_per_block() {
    let text = r#"{"model_type": "nemotron_h", "hybrid_override_pattern": "M-*M", "hidden_size": 64,
        "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 100, "mamba_num_heads": 8,
        "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4, "chunk_size": 32,
        "mlp_hidden_act": "relu2"}"#;
    let blocks = described(text).model.blocks;
    assert_eq!(blocks.len(), 4);
    assert!(matches!(blocks[0].mixer, Mixer::Mamba2(_)));
    assert_eq!(blocks[1].feed_forward, FeedForward::Dense(Dense { inner: 128, gated: false }));
    let error = read(&text.replace("M-*M", "M-X")).expect_err("an error").to_string();
    assert!(error.contains("the kind of block `X`"), "{error}");
    for (pattern, blocks) in [("M".repeat(10_001), 10_001), (String::new(), 0)] {
        let error = read(&text.replace("M-*M", &pattern)).expect_err("an error").to_string();
        let expected = format!("`hybrid_override_pattern` has {blocks} blocks; use from 1 to 10000");
        assert_eq!(error, expected);
    }
}

#[test]
fn bad_sizes_are_refused() {
    let check = |old: &str, new: &str, message: &str| {
        let error = read(&LLAMA.replace(old, new)).expect_err("an error").to_string();
        assert!(error.contains(message), "{error}");
    };
    check("\"hidden_size\": 4096", "\"hidden_size\": 0", "`hidden_size` is 0; use a whole number from 1");
    check("\"hidden_size\": 4096,", "", "needs one of the keys hidden_size, n_embd, d_model");
    check("\"num_hidden_layers\": 32", "\"num_hidden_layers\": 1e9", "`num_hidden_layers` is 1000000000.0");
    check("{", "[", "not a JSON object");
    check("\"hidden_size\": 4096", "\"hidden_size\": 16", "32 heads are more than the hidden size of 16");
    let inner = "\"intermediate_size\": 14336";
    check(inner, "\"intermediate_size\": 1048577", "use a whole number from 1 to 1048576");
}

/// Checks that `LLAMA` with the further keys of each case, which replace its own, fails with a message.
fn check_refused(table: &str) {
    for (keys, message) in cases(table) {
        let (mut object, keys) = (json(LLAMA), json(&format!("{{{keys}}}")));
        object.as_object_mut().expect("an object").extend(keys.as_object().expect("an object").clone());
        let error = read(&object.to_string()).expect_err("an error").to_string();
        assert!(error.contains(&message), "{error}");
    }
}

fn json(text: &str) -> serde_json::Value {
    serde_json::from_str(text).expect("JSON")
}

#[test]
fn contradictions_are_refused() {
    check_refused(
        r#"
"num_key_value_heads": 7 => `num_key_value_heads` is 7; use a number that divides the 32 heads
"hidden_size": 4100 => `hidden_size` is 4100; use a multiple of the 32 heads, or give `head_dim`
"num_experts": 8, "num_experts_per_tok": 9 => `num_experts_per_tok` is 9; use at most the 8 experts
"num_experts": 8 => needs one of the keys num_experts_per_tok
"num_experts": 8, "num_experts_per_tok": 2, "n_group": 3 => `n_group` is 3; use a number that divides the 8 experts
"num_experts": 1024, "num_experts_per_tok": 2, "n_group": 1024 => `n_group` is 1024; use a whole number from 1 to 512
"num_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 5 => `topk_group` is 5; use at most the 4 groups
"num_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 1 => `num_experts_per_tok` is 3; use at most the 2
"layer_types": ["full_attention"] => the number of kinds in layer_types` is 1; use as many
"first_k_dense_replace": 10001 => `first_k_dense_replace` is 10001; use a whole number from 0 to 10000
"mlp_only_layers": [10000] => `mlp_only_layers` is [10000]; use a list of numbers from 0 to 9999
"moe_layers": [32] => `moe_layers` is [32]; use a list of numbers from 0 to 31
"#,
    );
}

#[test]
fn values_of_another_kind_are_refused() {
    check_refused(
        r#"
"tie_word_embeddings": 1 => `tie_word_embeddings` is 1; use true or false
"hidden_act": 3 => `hidden_act` is 3; use text in quotes
"num_hidden_layers": "32" => `num_hidden_layers` is "32"; use a whole number from 1
"layer_types": "full" => `layer_types` is "full"; use a list of one word for each block
"#,
    );
}

#[test]
fn families_without_costs_are_refused() {
    let kinds = vec!["\"linear_attention\""; 32].join(", ");
    check_refused(&format!(
        "
\"model_type\": \"jamba\" => `model_type` is jamba: the costs of Mamba-1 blocks are not known
\"model_type\": \"t5\" => it has an encoder, and only decoders have costs
\"layer_types\": [{kinds}] => the kind of block `linear_attention`, whose costs are not
"
    ));
}

#[test]
fn families_that_are_not_known_are_named() {
    let described = described(&LLAMA.replace("\"llama\"", "\"newllama\""));
    assert_eq!(described.model.parameters(), 8_030_261_248);
    let expected = "`model_type` newllama is not known: its norms, biases and gates are read as Llama's";
    assert_eq!(described.assumed, [expected]);
}

#[test]
fn a_file_without_a_family_is_named() {
    let described = described(&LLAMA.replace(r#""model_type": "llama", "#, ""));
    assert_eq!(described.model.name, "decoder");
    let expected = "`model_type` is missing: the norms, biases and gates are read as Llama's";
    assert_eq!(described.assumed, [expected]);
}

/// Gemma 3's files leave out sizes that all models of the family share.
#[test]
fn sizes_of_the_family_are_named() {
    let text = LLAMA.replace("\"llama\"", "\"gemma3_text\"").replace("\"num_key_value_heads\": 8,", "");
    let expected = [
        "`head_dim` is missing: it is 256, as in other models of the family gemma3_text",
        "`num_key_value_heads` is missing: it is 4, as in other models of the family gemma3_text",
    ];
    assert_eq!(described(&text).assumed, expected);
}

/// Only GPT's and Falcon's families have a usual width.
#[test]
fn the_width_of_feed_forward_parts_is_needed() {
    let width = "\"intermediate_size\": 14336, ";
    let check = |text: String, keys: &str| {
        let error = read(&text).expect_err("an error").to_string();
        assert!(error.contains(&format!("needs one of the keys {keys}")), "{error}");
    };
    let dense = "intermediate_size, n_inner";
    check(LLAMA.replace(width, ""), dense);
    let no_width = "\"num_experts\": 8, \"num_experts_per_tok\": 2, ";
    check(LLAMA.replace(width, no_width), "moe_intermediate_size, intermediate_size, n_inner");
    let experts = "\"num_experts\": 8, \"num_experts_per_tok\": 2, \"moe_intermediate_size\": 64, ";
    check(LLAMA.replace(width, &format!("{experts}\"mlp_only_layers\": [3], ")), dense);
    let all = described(&LLAMA.replace(width, experts)).model;
    assert!(all.blocks.iter().all(|block| matches!(block.feed_forward, FeedForward::Experts(_))));
    let falcon = described(&LLAMA.replace(width, "").replace("\"llama\"", "\"falcon\""));
    let usual = FeedForward::Dense(Dense { inner: 16_384, gated: false });
    assert_eq!(falcon.model.blocks[0].feed_forward, usual);
    let assumed = "`intermediate_size` is missing: it is 16384, as in other models of the family falcon";
    assert_eq!(falcon.assumed, [assumed]);
}

/// Words in quotes stay as they are, also behind escaped quotes.
#[test]
fn only_bare_infinity_is_replaced() {
    let keys = r#""_said \\\" Infinity": "-Infinity \\", "time_step_limit": [0.0, Infinity, -Infinity, NaN], "rope_theta""#;
    let described = described(&LLAMA.replace("\"rope_theta\"", keys));
    assert_eq!(described.model.parameters(), 8_030_261_248);
    let tail = r#""NaN_key": "Infinity \" NaN", "rope_theta""#;
    let error = read(&LLAMA.replace("\"rope_theta\"", tail)).expect_err("an error");
    assert_eq!(error.keys(), ["NaN_key"]);
}

#[test]
fn a_window_of_0_is_no_window() {
    let text = LLAMA.replace("\"rope_theta\"", "\"sliding_window\": 0, \"rope_theta\"");
    assert_eq!(windows(&described(&text).model.blocks), [None; 32]);
}

#[test]
fn dropout_of_gpt_is_predicted() {
    let text = r#"{"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257,
        "resid_pdrop": 0.1, "attn_pdrop": 0.1, "is_encoder_decoder": false}"#;
    let assumed = described(text).assumed;
    assert!(assumed.iter().all(|sentence| sentence.contains("is missing: it is")), "{assumed:?}");
}

/// Nemotron-H's files have a bare `Infinity`, which is not JSON, and in transformers 5 a list of kinds.
#[test]
fn files_of_nemotron_h_in_both_forms() {
    let sizes = r#""model_type": "nemotron_h", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
        "vocab_size": 100, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2,
        "conv_kernel": 4, "chunk_size": 32, "mlp_hidden_act": "relu2", "time_step_limit": [0.0, Infinity]"#;
    let old = described(&format!("{{{sizes}, \"hybrid_override_pattern\": \"M*-\"}}"));
    let kinds = r#""layers_block_type": ["linear_attention", "full_attention", "mlp"]"#;
    assert_eq!(described(&format!("{{{sizes}, {kinds}}}")), old);
    assert_eq!(old.model.blocks.len(), 3);
}

/// A hybrid of Mamba-2 and attention whose blocks all have a feed-forward part (Bamba).
#[test]
fn hybrids_with_feed_forward_parts() {
    let mamba = r#""mamba_n_heads": 64, "mamba_d_head": "auto", "mamba_expand": 1, "mamba_d_state": 16,
        "mamba_n_groups": 2, "mamba_d_conv": 4, "mamba_chunk_size": 32, "attn_layer_indices": [1]"#;
    let model = described(&LLAMA.replace("\"rope_theta\"", &format!("{mamba}, \"rope_theta\""))).model;
    let is_mamba = |block: &Block| matches!(block.mixer, Mixer::Mamba2(mamba) if mamba.head_size == 64);
    let found: Vec<usize> = (0..32).filter(|&layer| !is_mamba(&model.blocks[layer])).collect();
    assert_eq!(found, [1]);
}

#[test]
fn windows_of_families_that_do_not_say_which_blocks_have_them() {
    let gemma = LLAMA
        .replace("\"llama\"", "\"gemma2\"")
        .replace("\"rope_theta\"", "\"sliding_window\": 16, \"rope_theta\"");
    let [first, second, ..] = windows(&described(&gemma).model.blocks)[..] else { panic!("blocks") };
    assert_eq!((first, second), (Some(16), None));
}

/// A hybrid of this project. Sizes of 0 belong to parts that it does not have.
const HYBRID: &str = r#"{"model_type": "hybrid", "pattern": "AM|ED", "hidden_size": 64, "vocab_size": 100,
    "num_attention_heads": 4, "num_key_value_heads": 2, "window_sizes": [8, 0, 0, null], "mamba_num_heads": 8,
    "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "intermediate_size": 128, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
    "tie_word_embeddings": true, "conv_kernel": 4, "mtp_loss_weight": 0.0, "moe_aux_loss_weight": 0.01}"#;

/// The parameters of Mamba-2, attention, experts and a dense part of [`HYBRID`] follow from its tensors.
#[test]
fn hybrids_of_this_project_have_a_pattern() {
    let Described { model, assumed } = described(HYBRID);
    assert_eq!(assumed, Vec::<String>::new());
    assert_eq!(windows(&model.blocks[..1]), [Some(8)]);
    let parameters: Vec<u128> = model.blocks.iter().map(|block| block.parameters(&model)).collect();
    let [attention, mamba, experts, dense] = [
        2 * 64 * (64 + 32),
        64 * (2 * 128 + 64 + 8) + 128 * 64 + (128 + 64) * 5 + 3 * 8 + 128,
        64 * 8 + 8 * 3 * 64 * 32 + 3 * 64 * 48,
        3 * 64 * 128,
    ];
    assert_eq!(parameters, [attention, mamba, experts, dense].map(|part| part + 64));
    assert_eq!(model.own_parameters(), parameters.iter().sum::<u128>() + 100 * 64 + 64);
    // The scan has the costs of a state space, in chunks of 64 tokens.
    let Mixer::Mamba2(scan) = model.blocks[1].mixer else { panic!("Mamba-2") };
    let operations = model.blocks[1].attention_operations(1 << 20, AttentionCount::Causal);
    assert_eq!((scan.chunk, operations), (64, 3.0 * (2.0 * 32.0 * 32.0 + 2.0 * 128.0 * (32.0 + 32.0))));
    let error = read(&HYBRID.replace("AM|ED", "AM|EX")).expect_err("an error").to_string();
    assert!(
        error.contains("`pattern`: block 3 is `X`, counted from 0; the kinds of blocks are A (attention)"),
        "{error}"
    );
    let alone = HYBRID
        .replace("AM|ED", "M")
        .replace("[8, 0, 0, null]", "[]")
        .replace(": 4, \"num_key", ": 0, \"num_key");
    assert_eq!(described(&alone).model.blocks.len(), 1);
    let error = read(&HYBRID.replace("[8, 0, 0, null]", "[8]")).expect_err("an error").to_string();
    assert!(
        error.contains("`window_sizes = 1` is out of range: it must be empty, or one number for each block"),
        "{error}"
    );
}

#[test]
fn parts_of_hybrids_without_costs_are_named() {
    let count = |keys: &str| {
        let Described { model, assumed, .. } = described(&HYBRID.replace("\"mtp_loss_weight\": 0.0", keys));
        (model.own_parameters() - described(HYBRID).model.own_parameters(), assumed.len())
    };
    assert_eq!(count("\"mod_layers\": [1, 3]"), (2 * 64, 1));
    assert_eq!(count("\"num_relations\": 3"), (3 * 4, 1));
    assert_eq!(count("\"embed_norm\": \"dyt\""), (2 * 64 + 1, 0));
    let tables = "\"ngram_orders\": [2, 3], \"ngram_buckets\": 11, \"platform_vocab_size\": 5, \"structure_vocab_sizes\": {\"dep_levels\": 6}";
    assert_eq!(count(tables), ((2 * 11 + 5 + 6) * 64, 1));
    // A predictor has a block of its own, three norms and a product.
    let predictors = "\"mtp_loss_weight\": 0.3, \"mtp_depth\": 2, \"mtp_block\": \"D\"";
    assert_eq!(count(predictors), (2 * (3 * 64 * 128 + 64 + 3 * 64 + 2 * 64 * 64), 0));
}

/// A predictor of Nemotron-H has several blocks, which are not those of the model.
#[test]
fn predictors_have_blocks_of_their_own() {
    let text = r#"{"model_type": "nemotron_h", "hybrid_override_pattern": "M-*M", "hidden_size": 64,
        "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 100, "mamba_num_heads": 8,
        "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4, "chunk_size": 32,
        "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*-"}"#;
    let model = described(text).model;
    let blocks: u128 = [2, 1].map(|index| model.blocks[index].parameters(&model)).iter().sum();
    assert_eq!(model.predictor_parameters(), blocks + 2 * 64 * 64 + 3 * 64);
    assert_eq!(model.own_parameters(), model.parameters() - model.predictor_parameters());
}

#[test]
fn hybrids_are_read_as_by_training_with_what_is_filled_in() {
    let inside = format!("{{\"model_type\": \"hybrid\", \"text_config\": {HYBRID}}}");
    assert_eq!(described(&inside).model, described(HYBRID).model);
    let filled = described(&HYBRID.replace("\"conv_kernel\": 4, ", "")).assumed;
    assert!(filled.len() == 1 && filled[0].starts_with("`conv_kernel` is missing: it is 4"), "{filled:?}");
    let error = read(&HYBRID.replace("\"num_experts\": 8", "\"num_experts\": \"8\"")).expect_err("an error");
    assert_eq!(
        (error.keys(), error.to_string().contains("`num_experts`")),
        (&["num_experts".to_owned()][..], true)
    );
}

#[test]
fn predictors_have_several_names() {
    let check = |keys: &str, predictors: u32| {
        let model = described(&LLAMA.replacen('{', &format!("{{{keys}, "), 1)).model;
        assert_eq!(model.predictors, predictors, "{keys}");
    };
    check("\"mtp_num_hidden_layers\": 1, \"mtp_use_dedicated_embeddings\": false", 1);
    check("\"num_mtp_modules\": 3, \"use_mtp\": true, \"mtp_transformer_layers\": 1", 3);
    check("\"num_mtp_modules\": 3, \"use_mtp\": false", 0);
    check_refused("\"num_mtp_modules\": 3, \"mtp_transformer_layers\": 2 => a predictor has one block");
}
