//! Models and data as they are found in practice, on the command line.

use std::fs;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::command_line::{folder, run_in, succeed, text};

/// Writes a small trained model to the folder `m` and returns its configuration.
fn exported() -> (TempDir, Value) {
    let folder = folder();
    succeed(&folder, &["train", "small.toml"]);
    succeed(&folder, &["export", "out", "m"]);
    let config = fs::read(folder.path().join("m/config.json")).expect("a configuration");
    (folder, serde_json::from_slice(&config).expect("JSON"))
}

fn write(folder: &TempDir, name: &str, content: impl AsRef<[u8]>) {
    fs::write(folder.path().join(name), content).expect("the scratch folder takes files");
}

/// Runs a command on `small.toml` with overrides. Returns its exit code and standard error.
fn told(folder: &TempDir, command: &str, set: &[&str]) -> (Option<i32>, String) {
    let set = set.iter().flat_map(|set| ["--set", set]);
    let output = run_in(folder.path(), &[command, "small.toml"].into_iter().chain(set).collect::<Vec<_>>());
    (output.status.code(), text(&output.stderr))
}

fn check_refused(folder: &TempDir, set: &[&str], part: &str) {
    let (code, words) = told(folder, "check", set);
    assert_eq!(code, Some(2), "{words}");
    assert!(words.contains(part), "{words}\nhas not: {part}");
}

fn check_accepted(folder: &TempDir, command: &str, set: &[&str], part: &str) {
    let (code, words) = told(folder, command, set);
    assert_eq!(code, Some(0), "{words}");
    assert!(words.contains(part), "{words}\nhas not: {part}");
}

const FROM: &str = "model.from=m";

#[test]
fn a_configuration_alone_starts_from_random_weights() {
    let (folder, _) = exported();
    let note = "there are no weights: training starts from random ones";
    let (code, words) = told(&folder, "check", &["model.from=m/config.json", "run.out=other"]);
    assert!(code == Some(0) && !words.contains(note), "the weights next to it are used: {words}");
    fs::remove_file(folder.path().join("m/model.safetensors")).expect("it is there");
    for command in ["check", "plan", "train"] {
        check_accepted(&folder, command, &[FROM, "run.out=other"], note);
    }
    check_accepted(&folder, "check", &["model.from=m/config.json", "run.out=other"], note);
}

#[test]
fn a_pasted_configuration_is_taken_and_what_has_no_effect_is_named() {
    let folder = folder();
    let paste = |lines: &str| {
        let config = format!(
            "[model]\n{lines}\n[data]\npath = \"text.txt\"\nseq_len = 8\n[run]\nsteps = 1\nout = \"out\"\n"
        );
        write(&folder, "small.toml", config);
    };
    let sizes = "vocab_size = 128\nhidden_size = 16\nintermediate_size = 24\nnum_hidden_layers = 2\nnum_attention_heads = 2\n\
                 num_key_value_heads = 1\nhead_dim = 8\nrms_norm_eps = 1e-6\ntie_word_embeddings = true\n";
    let rest = "architectures = [\"Qwen3ForCausalLM\"]\nmodel_type = \"qwen3\"\ntorch_dtype = \"bfloat16\"\nuse_cache = true\n\
                hidden_act = \"silu\"\nqkv_bias = false\nattention_bias = false\nattention_dropout = 0.0\nuse_sliding_window = false\n\
                max_window_layers = 2\nmax_position_embeddings = 4096\ninitializer_range = 0.02\ntransformers_version = \"4.51.0\"\n\
                bos_token_id = 3\neos_token_id = 5\nrope_theta = 1000000\n";
    paste(&format!("{sizes}{rest}"));
    let (code, words) = told(&folder, "train", &[]);
    assert_eq!(code, Some(0), "{words}");
    let note = "`hidden_act`, `qkv_bias`, `torch_dtype`, `transformers_version`, `use_cache`";
    assert!(words.contains(note), "{words}");
    succeed(&folder, &["export", "out", "m"]);
    let config = fs::read(folder.path().join("m/config.json")).expect("a configuration");
    let config: Value = serde_json::from_slice(&config).expect("JSON");
    assert_eq!(config["model_type"], "qwen3");
    let found = ["eos_token_id", "bos_token_id", "max_position_embeddings"].map(|key| config[key].clone());
    assert_eq!(found, [json!(5), json!(3), json!(4096)]);
    paste(&format!("{sizes}{rest}sliding_window = 512\n"));
    let (code, words) = told(&folder, "check", &[]);
    assert!(code == Some(0) && words.contains("`sliding_window` has no effect"), "{words}");

    for (line, part) in [
        ("model_type = \"cohere\"\nlogit_scale = 8.0", "which cannot compute `logit_scale = 8.0`"),
        ("hidden_act = \"gelu\"", "`hidden_act = gelu` is not supported"),
        (
            "sliding_window = 4096",
            "`sliding_window` is not a key of `llama`: only qwen2, qwen3, qwen3_moe, qwen2_moe, mistral, mixtral, smollm3, phi3, gemma2, gemma3_text, starcoder2, gpt_oss have it",
        ),
        ("rope_scaling = { rope_typ = \"llama3\" }", "`rope_scaling.rope_typ` is not a key"),
        ("rope_scaling = nan", "rope_scaling"),
        ("rope_scaling = 2025-01-01", "no value of a model is a date"),
        ("rope_scaling = { factor = 2025-01-01 }", "no value of a model is a date"),
        ("hidden_siez = 3", "unknown key `hidden_siez`"),
    ] {
        paste(&format!("{sizes}{line}\n"));
        check_refused(&folder, &[], part);
    }
}

#[test]
fn a_written_number_of_positions_is_exported() {
    let folder = folder();
    let hybrid = [
        "model.architecture=hybrid",
        "model.pattern=AM",
        "model.mamba_num_heads=2",
        "model.mamba_head_dim=8",
        "model.ssm_state_size=8",
    ];
    let nemotron = ["model.architecture=nemotron_h", "model.hybrid_override_pattern=M*"];
    for (name, model) in [("nemotron", &nemotron[..]), ("hybrid", &hybrid)] {
        let run = format!("run.out={name}");
        let set = [model, &["model.max_position_embeddings=4096", "run.steps=1", &run]].concat();
        let (code, words) = told(&folder, "train", &set);
        assert_eq!(code, Some(0), "{words}");
        let target = format!("{name}-exported");
        succeed(&folder, &["export", name, &target]);
        let config = fs::read(folder.path().join(target).join("config.json")).expect("a configuration");
        let config: Value = serde_json::from_slice(&config).expect("JSON");
        assert_eq!(config["max_position_embeddings"], 4096, "{name}");
    }
}

#[test]
fn unused_tensors_and_unknown_keys_are_named() {
    let (folder, mut config) = exported();
    for key in ["my_note", "note_2", "note_3", "note_4"] {
        config[key] = json!("x");
    }
    config["model_type"] = json!("qwen2");
    config["architectures"] = json!(["Qwen2ForCausalLM"]);
    write(&folder, "m/config.json", config.to_string());
    check_refused(&folder, &[FROM], ".bias` is missing");
    config["model_type"] = json!("llama");
    config["architectures"] = json!(["LlamaForCausalLM"]);
    write(&folder, "m/config.json", config.to_string());
    check_accepted(&folder, "train", &[FROM], "not known: `my_note`, `note_2`, `note_3`, `note_4`;");
    config["logits_scaling"] = json!(8.0);
    write(&folder, "m/config.json", config.to_string());
    check_refused(&folder, &[FROM], "`logits_scaling = 8.0` is not supported: only 1 is");
}

#[test]
fn a_model_with_dropout_trains_without_it_and_says_so() {
    let (folder, mut config) = exported();
    check_accepted(&folder, "train", &[FROM, "run.out=plain"], "");
    config["attention_dropout"] = json!(0.1);
    write(&folder, "m/config.json", config.to_string());
    let note = "config.json asks for dropout in training (`attention_dropout`); the model trains without it";
    check_accepted(&folder, "train", &[FROM, "run.out=dropped"], note);
    let losses = |run: &str| -> Vec<Value> {
        let metrics = fs::read_to_string(folder.path().join(run).join("metrics.jsonl")).expect("metrics");
        let line =
            |line: &str| serde_json::from_str::<Value>(line).expect("a line is an object")["loss"].clone();
        metrics.lines().map(line).collect()
    };
    assert_eq!(losses("plain"), losses("dropped"));
    // The export can be trained further with it.
    succeed(&folder, &["export", "dropped", "again"]);
    let written = fs::read(folder.path().join("again/config.json")).expect("a configuration");
    let written: Value = serde_json::from_slice(&written).expect("JSON");
    assert_eq!(written["attention_dropout"], 0.1);
    // Nothing is dropped in generation, so there is nothing to say.
    let output = run_in(folder.path(), &["generate", "m", "--prompt", "a", "--tokens", "1"]);
    let words = text(&output.stderr);
    assert!(output.status.code() == Some(0) && !words.contains("dropout"), "{words}");
}

/// One warning of training names it, and generation says nothing.
#[test]
fn dropout_under_a_name_that_the_family_does_not_have_is_told_once() {
    let (folder, mut config) = exported();
    config["hidden_dropout_prob"] = json!(0.1);
    write(&folder, "m/config.json", config.to_string());
    let note =
        "config.json asks for dropout in training (`hidden_dropout_prob`); the model trains without it";
    let (code, words) = told(&folder, "train", &[FROM]);
    assert!(code == Some(0) && words.contains(note) && !words.contains("not known"), "{words}");
    let output = run_in(folder.path(), &["generate", "m", "--prompt", "a", "--tokens", "1"]);
    let words = text(&output.stderr);
    assert!(output.status.code() == Some(0) && !words.contains("hidden_dropout_prob"), "{words}");
}

/// A tokenizer that puts `<s>` before a text.
const TOKENIZER: &str = r#"{"version": "1.0", "pre_tokenizer": {"type": "Whitespace"},
    "added_tokens": [{"id": 1, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        "special": true}],
    "post_processor": {"type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
    "model": {"type": "WordLevel", "vocab": {"?": 0, "<s>": 1, "the": 2, "fox": 3}, "unk_token": "?"}}"#;

#[test]
fn the_tokenizer_of_the_model_is_the_default() {
    let (folder, _) = exported();
    write(&folder, "m/tokenizer.json", TOKENIZER);
    if cfg!(feature = "tokenizers") {
        let output = succeed(&folder, &["check", "small.toml", "--set", FROM]);
        // 14 words in each of four sentences, and the token that begins the text.
        assert!(output.contains("57 tokens"), "{output}");
    } else {
        check_refused(&folder, &[FROM], "cargo build --release --features tokenizers");
    }
    let output = succeed(&folder, &["check", "small.toml", "--set", FROM, "--set", "data.tokenizer=bytes"]);
    assert!(output.contains("264 tokens"), "{output}");
    fs::remove_file(folder.path().join("m/tokenizer.json")).expect("it is there");
    write(&folder, "m/tokenizer.model", "x");
    check_refused(&folder, &[FROM], "in a form that is not read (tokenizer.model)");
}

#[test]
fn an_export_keeps_the_element_type_of_the_weights() {
    let (folder, _) = exported();
    succeed(&folder, &["export", "out", "half", "--dtype", "bfloat16"]);
    succeed(&folder, &["train", "small.toml", "--set", "model.from=half", "--set", "run.out=second"]);
    succeed(&folder, &["export", "second", "again"]);
    succeed(&folder, &["export", "second", "single", "--dtype", "float32"]);
    let length =
        |name: &str| fs::metadata(folder.path().join(name).join("model.safetensors")).expect("weights").len();
    assert_eq!(length("again"), length("half"));
    assert!(length("single") > length("half") * 3 / 2);
    let config = fs::read_to_string(folder.path().join("again/config.json")).expect("a configuration");
    assert!(config.contains("\"dtype\": \"bfloat16\""), "{config}");
}

#[test]
fn other_forms_of_models_and_data_are_named() {
    let folder = folder();
    check_refused(&folder, &["model.from=meta-llama/Llama-3.2-1B"], "hf download meta-llama/Llama-3.2-1B");
    write(&folder, "m.gguf", "GGUF");
    check_refused(&folder, &["model.from=m.gguf"], "this is a GGUF file");
    write(&folder, "a.pickle", b"\x80\x04\x95\x0f\0\0");
    check_refused(&folder, &["data.path=a.pickle"], "the file is a Python pickle, not text: export");
    write(&folder, "a.txt", b"\x1f\x8b\x08\0\0");
    check_refused(
        &folder,
        &["data.path=a.txt"],
        "the file is a gzip archive, not text: let its name end in `.gz`",
    );
}

#[test]
fn data_of_every_format_is_recognised_and_said() {
    let folder = folder();
    let sentence = "{\"body\": \"the quick fox jumps over the lazy dog\", \"id\": 1}\n".repeat(12);
    write(&folder, "a.jsonl", &sentence);
    let keys = "data.keys={ text = \"body\" }";
    let train = ["train", "small.toml", "--set", "data.path=a.jsonl", "--set", keys];
    succeed(&folder, &train);
    let output = succeed(&folder, &["check", "small.toml", "--set", "data.path=a.jsonl", "--set", keys]);
    assert!(output.contains("data      from 1 file of JSON lines with texts"), "{output}");
    // A resumed run knows the names of the keys.
    succeed(&folder, &["resume", "out", "--set", "run.steps=3"]);
    let ids: Vec<u8> = (0..200u16).map(|id| id % 128).flat_map(u16::to_le_bytes).collect();
    write(&folder, "ids.bin", &ids);
    write(&folder, "b.txt", "to be or not to be");
    let both = "data.path=[\"ids.bin\", \"b.txt\"]";
    let output = succeed(&folder, &["check", "small.toml", "--format", "json", "--set", both]);
    let summary: Value = serde_json::from_str(&output).expect("JSON");
    let text = json!({ "format": "text", "packing": "plain", "files": 1 });
    let short = json!({ "format": "token ids of 16 bits", "packing": "plain", "files": 1 });
    assert_eq!(summary["data"]["sources"], json!([text, short]));
    check_refused(
        &folder,
        &["data.path=a.jsonl"],
        "a.jsonl:1: the record has the keys `body`, `id`, and none of the keys",
    );
    check_refused(
        &folder,
        &["data.path=a.jsonl", "data.keys={ txt = \"body\" }"],
        "unknown key `txt` in data.keys",
    );
    check_refused(&folder, &["data.path=a.jsonl", "data.keys={ text = 3 }"], "a table of names");
    write(&folder, "long.bin", [ids, 128u16.to_le_bytes().to_vec()].concat());
    check_refused(
        &folder,
        &["data.path=long.bin"],
        "long.bin: token 200: token id 128 lies beyond the vocabulary of 128",
    );
    if !cfg!(feature = "parquet") {
        write(&folder, "a.parquet", b"PAR1\x15\0\x15\0");
        check_refused(&folder, &["data.path=a.parquet"], "cargo build --release --features parquet");
    }
}
