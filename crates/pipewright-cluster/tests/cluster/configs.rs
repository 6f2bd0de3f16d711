//! Models from their `config.json`.

use pipewright_cluster::hf_config::{Described, read};
use pipewright_cluster::model::{Attention, Block, Dense, FeedForward, Mixer};
use pipewright_cluster::operations::AttentionCount;

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
    let Described { model, ignored } = described(LLAMA);
    assert_eq!(model.parameters(), 8_030_261_248);
    assert_eq!(ignored, Vec::<String>::new());
    let attention = Attention { heads: 32, key_value_heads: 8, head_size: 128, window: None };
    assert_eq!(model.blocks[0].mixer, Mixer::Attention(attention));
    assert_eq!(model.blocks[0].feed_forward, FeedForward::Dense(Dense { inner: 14_336, gated: true }));
}

#[test]
fn gpt_has_biases_and_a_tied_head() {
    let text = r#"{"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257,
        "activation_function": "gelu_new"}"#;
    // The published number includes 1,024 x 768 parameters of positions.
    assert_eq!(described(text).model.parameters(), 124_439_808 - 1_024 * 768);
}

/// GPT-NeoX 20B (arXiv 2204.06745), StarCoder (arXiv 2305.06161) with 8,192 positions in a table, and
/// StarCoder 2 3B (arXiv 2402.19173), by the elements of their published tensors.
#[test]
fn families_of_gpt_have_no_gate() {
    let check = |text: &str, parameters: u128| {
        let Described { model, ignored } = described(text);
        assert_eq!((model.parameters(), ignored), (parameters, Vec::new()), "{}", model.name);
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
fn keys_that_the_cost_model_does_not_use_are_named() {
    let text = LLAMA.replace("\"rope_theta\"", "\"altup_num_inputs\": 4, \"rope_theta\"");
    assert_eq!(described(&text).ignored, ["altup_num_inputs"]);
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
