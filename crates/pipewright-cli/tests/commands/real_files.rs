//! Models and data as they are found in practice, on the command line.

use std::fs;

use serde_json::{Value, json};

use super::command_line::folder;
use crate::run::{Run, numbers};

/// Writes a small trained model to the folder `m` and returns its configuration.
fn exported() -> (Run, Value) {
    let folder = folder();
    folder.train(&[]);
    folder.print(&["export", "out", "m"]);
    let config = folder.read_json("m/config.json");
    (folder, config)
}

fn check_refused(folder: &Run, set: &[&str], part: &str) {
    folder.refuse(&["check", "small.toml"], set, part);
}

fn check_accepted(folder: &Run, command: &str, set: &[&str], part: &str) {
    folder.says(&[command, "small.toml"], set, part);
}

const FROM: &str = "model.from=m";

#[test]
fn a_configuration_alone_starts_from_random_weights() {
    let (folder, _) = exported();
    let note = "there are no weights: training starts from random ones";
    let (_, words) = folder.succeed(&["check", "small.toml"], &["model.from=m/config.json", "run.out=other"]);
    assert!(!words.contains(note), "the weights next to it are used: {words}");
    fs::remove_file(folder.path("m/model.safetensors")).expect("it is there");
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
        folder.write("small.toml", config);
    };
    let sizes = "vocab_size = 128\nhidden_size = 16\nintermediate_size = 24\nnum_hidden_layers = 2\nnum_attention_heads = 2\n\
                 num_key_value_heads = 1\nhead_dim = 8\nrms_norm_eps = 1e-6\ntie_word_embeddings = true\n";
    let rest = "architectures = [\"Qwen3ForCausalLM\"]\nmodel_type = \"qwen3\"\ntorch_dtype = \"bfloat16\"\nuse_cache = true\n\
                hidden_act = \"silu\"\nqkv_bias = false\nattention_bias = false\nattention_dropout = 0.0\nuse_sliding_window = false\n\
                max_window_layers = 2\nmax_position_embeddings = 4096\ninitializer_range = 0.02\ntransformers_version = \"4.51.0\"\n\
                bos_token_id = 3\neos_token_id = 5\nrope_theta = 1000000\n";
    paste(&format!("{sizes}{rest}"));
    let note = "`hidden_act`, `qkv_bias`, `torch_dtype`, `transformers_version`, `use_cache`";
    check_accepted(&folder, "train", &[], note);
    folder.print(&["export", "out", "m"]);
    let config = folder.read_json("m/config.json");
    assert_eq!(config["model_type"], "qwen3");
    let found = ["eos_token_id", "bos_token_id", "max_position_embeddings"].map(|key| config[key].clone());
    assert_eq!(found, [json!(5), json!(3), json!(4096)]);
    paste(&format!("{sizes}{rest}sliding_window = 512\n"));
    check_accepted(&folder, "check", &[], "`sliding_window` has no effect");

    for (line, part) in [
        ("model_type = \"cohere\"\nlogit_scale = 8.0", "which cannot compute `logit_scale = 8.0`"),
        ("hidden_act = \"gelu\"", "`hidden_act = gelu` is not supported"),
        (
            "sliding_window = 4096",
            "`sliding_window` is not a key of `llama`: only qwen2, qwen3, qwen3_moe, qwen2_moe, mistral, ministral3, mixtral, smollm3, phi3, olmo3, gemma2, gemma3_text, starcoder2, gpt_oss have it",
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
        folder.train(&set);
        let target = format!("{name}-exported");
        folder.print(&["export", name, &target]);
        let config = folder.read_json(&format!("{target}/config.json"));
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
    folder.write("m/config.json", config.to_string());
    check_refused(&folder, &[FROM], ".bias` is missing");
    config["model_type"] = json!("llama");
    config["architectures"] = json!(["LlamaForCausalLM"]);
    folder.write("m/config.json", config.to_string());
    check_accepted(&folder, "train", &[FROM], "not known: `my_note`, `note_2`, `note_3`, `note_4`;");
    config["logits_scaling"] = json!(8.0);
    folder.write("m/config.json", config.to_string());
    check_refused(&folder, &[FROM], "`logits_scaling = 8.0` is not supported: only 1 is");
}

#[test]
fn a_model_with_dropout_trains_without_it_and_says_so() {
    let (folder, mut config) = exported();
    check_accepted(&folder, "train", &[FROM, "run.out=plain"], "");
    config["attention_dropout"] = json!(0.1);
    folder.write("m/config.json", config.to_string());
    let note = "config.json asks for dropout in training (`attention_dropout`); the model trains without it";
    check_accepted(&folder, "train", &[FROM, "run.out=dropped"], note);
    assert_eq!(numbers(&folder.metrics_in("plain")), numbers(&folder.metrics_in("dropped")));
    // The export can be trained further with it.
    folder.print(&["export", "dropped", "again"]);
    assert_eq!(folder.read_json("again/config.json")["attention_dropout"], 0.1);
    // Nothing is dropped in generation, so there is nothing to say.
    let (_, words) = folder.succeed(&["generate", "m", "--prompt", "a", "--tokens", "1"], &[]);
    assert!(!words.contains("dropout"), "{words}");
}

/// One warning of training names it, and generation says nothing.
#[test]
fn dropout_under_a_name_that_the_family_does_not_have_is_told_once() {
    let (folder, mut config) = exported();
    config["hidden_dropout_prob"] = json!(0.1);
    folder.write("m/config.json", config.to_string());
    let note =
        "config.json asks for dropout in training (`hidden_dropout_prob`); the model trains without it";
    let (_, words) = folder.succeed(&["train", "small.toml"], &[FROM]);
    assert!(words.contains(note) && !words.contains("not known"), "{words}");
    let (_, words) = folder.succeed(&["generate", "m", "--prompt", "a", "--tokens", "1"], &[]);
    assert!(!words.contains("hidden_dropout_prob"), "{words}");
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
    folder.write("m/tokenizer.json", TOKENIZER);
    if cfg!(feature = "tokenizers") {
        // 14 words in each of four sentences, and the token that begins the text.
        folder.prints(&["check", "small.toml"], &[FROM], "57 tokens");
    } else {
        check_refused(&folder, &[FROM], "cargo build --release --features tokenizers");
    }
    folder.prints(&["check", "small.toml"], &[FROM, "data.tokenizer=bytes"], "264 tokens");
    fs::remove_file(folder.path("m/tokenizer.json")).expect("it is there");
    folder.write("m/tokenizer.model", "x");
    check_refused(&folder, &[FROM], "in a form that is not read (tokenizer.model)");
}

#[test]
fn an_export_keeps_the_element_type_of_the_weights() {
    let (folder, _) = exported();
    folder.print(&["export", "out", "half", "--dtype", "bfloat16"]);
    folder.train(&["model.from=half", "run.out=second"]);
    folder.print(&["export", "second", "again"]);
    folder.print(&["export", "second", "single", "--dtype", "float32"]);
    let length =
        |name: &str| fs::metadata(folder.path(name).join("model.safetensors")).expect("weights").len();
    assert_eq!(length("again"), length("half"));
    assert!(length("single") > length("half") * 3 / 2);
    assert_eq!(folder.read_json("again/config.json")["dtype"], "bfloat16");
}

#[test]
fn other_forms_of_models_and_data_are_named() {
    let folder = folder();
    check_refused(&folder, &["model.from=meta-llama/Llama-3.2-1B"], "hf download meta-llama/Llama-3.2-1B");
    folder.write("m.gguf", "GGUF");
    check_refused(&folder, &["model.from=m.gguf"], "m.gguf: the file has 4 bytes, and its header is longer");
    folder.write("a.pickle", b"\x80\x04\x95\x0f\0\0");
    check_refused(&folder, &["data.path=a.pickle"], "the file is a Python pickle, not text: export");
    folder.write("a.txt", b"\x1f\x8b\x08\0\0");
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
    folder.write("a.jsonl", &sentence);
    let keys = "data.keys={ text = \"body\" }";
    let set = ["data.path=a.jsonl", keys];
    folder.train(&set);
    folder.prints(&["check", "small.toml"], &set, "data      from 1 file of JSON lines with texts");
    // A resumed run knows the names of the keys.
    folder.resume(&["run.steps=3"]);
    let ids: Vec<u8> = (0..200u16).map(|id| id % 128).flat_map(u16::to_le_bytes).collect();
    folder.write("ids.bin", &ids);
    folder.write("b.txt", "to be or not to be");
    let both = "data.path=[\"ids.bin\", \"b.txt\"]";
    let summary = folder.json(&["check", "small.toml"], &[both]);
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
    folder.write("long.bin", [ids, 128u16.to_le_bytes().to_vec()].concat());
    check_refused(
        &folder,
        &["data.path=long.bin"],
        "long.bin: token 200: token id 128 lies beyond the vocabulary of 128",
    );
    if !cfg!(feature = "parquet") {
        folder.write("a.parquet", b"PAR1\x15\0\x15\0");
        check_refused(&folder, &["data.path=a.parquet"], "cargo build --release --features parquet");
    }
}
