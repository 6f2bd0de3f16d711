//! Models from their `config.json`.

use pipewright_cluster::hf_config::{Described, read};
use pipewright_cluster::model::{Attention, Block, Dense, FeedForward, Mixer};

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
}
