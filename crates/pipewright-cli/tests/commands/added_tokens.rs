//! `add-tokens`, and the training of the rows that it adds.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::command_line::reference;
use crate::run::Run;

const TOKENS: [&str; 4] = ["--token", "<x>", "--token", "<y>"];

/// Copies a reference model with so many tokens, which are words, into the folder `base`.
fn folder(model: &str, words: usize) -> Run {
    let folder = Run::empty();
    fs::create_dir(folder.path("base")).expect("the scratch folder takes folders");
    for name in ["config.json", "model.safetensors"] {
        fs::copy(Path::new(&reference(model)).join(name), folder.path("base").join(name)).expect("a copy");
    }
    let vocabulary: serde_json::Map<String, Value> =
        (0..words).map(|id| (format!("w{id}"), id.into())).collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": { "type": "WhitespaceSplit" }, "post_processor": null, "decoder": null,
        "model": { "type": "WordLevel", "vocab": vocabulary, "unk_token": "w0" },
    });
    folder.write("base/tokenizer.json", tokenizer.to_string());
    folder.write("base/tokenizer_config.json", json!({ "added_tokens_decoder": {} }).to_string());
    folder
}

/// Returns the rows of a tensor in single precision.
fn rows(folder: &Run, model: &str, tensor: &str) -> Vec<Vec<f32>> {
    let bytes = fs::read(folder.path(model).join("model.safetensors")).expect("the weights");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("a sound file");
    let tensor = file.tensor(tensor).expect("the tensor");
    let numbers: Vec<f32> =
        tensor.data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    numbers.chunks(tensor.shape()[1]).map(<[f32]>::to_vec).collect()
}

#[test]
fn new_rows_are_the_means_of_the_others() {
    for (model, tensors) in [
        ("llama-tiny", &["model.embed_tokens.weight", "lm_head.weight"][..]),
        ("llama-tied-tiny", &["model.embed_tokens.weight"]),
    ] {
        let folder = folder(model, 256);
        let said = "2 tokens from the id 256 on to grown: 258 ids in the vocabulary, 2 of them new";
        folder.says(&[&["add-tokens", "base", "grown"], &TOKENS[..]].concat(), &[], said);
        assert_eq!(folder.read_json("grown/config.json")["vocab_size"], 258);
        let decoder = folder.read_json("grown/tokenizer_config.json")["added_tokens_decoder"].clone();
        assert_eq!(
            (&decoder["256"]["content"], &decoder["257"]["normalized"]),
            (&json!("<x>"), &json!(true))
        );
        for tensor in tensors {
            let (before, after) = (rows(&folder, "base", tensor), rows(&folder, "grown", tensor));
            assert_eq!((after.len(), &after[..256]), (258, &before[..]));
            for row in &after[256..] {
                for (column, element) in row.iter().enumerate() {
                    let sum: f64 = before.iter().map(|row| f64::from(row[column])).sum();
                    assert!((f64::from(*element) - sum / 256.0).abs() < 1e-7, "{tensor}");
                }
            }
        }
    }
}

#[test]
fn rows_without_tokens_are_taken_first() {
    let folder = folder("llama-tiny", 255);
    let said = "2 tokens from the id 255 on to grown: 257 ids in the vocabulary, 1 of them new";
    folder.write("tokens.txt", "<x>\n<y>\n");
    folder.says(&["add-tokens", "base", "grown", "--file", "tokens.txt", "--special"], &[], said);
    let added = folder.read_json("grown/tokenizer.json")["added_tokens"].clone();
    assert_eq!((&added[1]["id"], &added[1]["special"]), (&json!(256), &json!(true)));
}

#[test]
fn what_cannot_be_added_is_refused() {
    let folder = folder("llama-tiny", 256);
    let refused = |arguments: &[&str], expected: &str| {
        folder.refuse(&[&["add-tokens", "base", "grown"], arguments].concat(), &[], expected);
        assert!(!folder.path("grown").exists());
    };
    refused(&["--token", "w7"], "`w7` is a token of the model already, with the id 7");
    refused(&["--token", "<x>", "--token", "<x>"], "`<x>` is a token of the model already, with the id 256");
    refused(&["--token", ""], "a token without a text");
    refused(&[], "--token <TEXT>");
    fs::remove_file(folder.path("base/tokenizer.json")).expect("it exists");
    refused(&TOKENS, "there is no tokenizer.json");
}

/// Without the key, a model of Gemma 3 has 262,208 rows, whatever its files have.
#[test]
fn a_size_of_the_vocabulary_that_is_not_written_is_asked_for() {
    let folder = folder("gemma3-tiny", 48);
    let mut config = folder.read_json("base/config.json");
    config.as_object_mut().expect("an object").remove("vocab_size");
    folder.write("base/config.json", config.to_string());
    let expected = "config.json: new tokens change `vocab_size`, which is null here";
    folder.refuse(&[&["add-tokens", "base", "grown"], &TOKENS[..]].concat(), &[], expected);
    write_run(&folder, "small", ADDED, "");
    folder.refuse_settings(&[], expected);
}

/// The new tokens are read as single ids, their rows are trained, and exports have them.
#[cfg(feature = "tokenizers")]
#[test]
fn new_tokens_are_trained_and_exported() {
    let folder = folder("llama-tiny", 256);
    folder.succeed(&[&["add-tokens", "base", "grown"], &TOKENS[..]].concat(), &[]);
    folder.write("text.txt", "<x> w1 w2 <y> w3 ".repeat(40));
    folder.write(
        "small.toml",
        "[model]\nfrom = \"grown\"\n[adapter]\nkind = \"lora\"\ntargets = [\"q_proj\"]\nmodules_to_save = [\"embed_tokens\", \
         \"lm_head\"]\n[data]\npath = \"text.txt\"\nseq_len = 8\n[pipeline]\nmicrobatches = 2\n[optimizer]\nlearning_rate = 0.02\n\
         [run]\nsteps = 3\nout = \"out\"\n",
    );
    folder.train(&[]);
    let losses = folder.losses();
    assert!(losses[2][0] < losses[0][0], "{losses:?}");
    folder.succeed(&["export", "out", "merged", "--merge"], &[]);
    assert_eq!(folder.read_json("merged/config.json")["vocab_size"], 258);
    assert_eq!(folder.read("merged/tokenizer.json"), folder.read("grown/tokenizer.json"));
    for tensor in ["model.embed_tokens.weight", "lm_head.weight"] {
        assert_ne!(rows(&folder, "merged", tensor)[256], rows(&folder, "grown", tensor)[256], "{tensor}");
    }
}

/// Writes the configuration `NAME.toml` of a run of three steps on token ids, of which the ids from 256 on are new.
fn write_run(folder: &Run, name: &str, model: &str, adapter: &str) {
    let row = |first: usize| json!((0..9).map(|index| (first + 37 * index) % 258).collect::<Vec<_>>());
    let rows: Vec<String> = (0..16).map(|first| row(first * 16 + 1).to_string()).collect();
    folder.write("ids.jsonl", rows.join("\n") + "\n");
    folder.write(
        &format!("{name}.toml"),
        format!(
            "[model]\n{model}\n{adapter}\n[data]\npath = \"ids.jsonl\"\nseq_len = 8\n[pipeline]\nranks = 2\nmicrobatches = 2\n\
             [optimizer]\nlearning_rate = 0.02\n[run]\nsteps = 3\ncheckpoint_every = 1\nout = \"{name}\"\n"
        ),
    );
}

/// The setting, as a line of a configuration.
const ADDED: &str = "from = \"base\"\nadd_tokens = [\"<x>\", \"<y>\"]";

/// Returns the loss and the gradient norm of each step of a run.
fn losses_of(folder: &Run, run: &str) -> Vec<[f64; 2]> {
    let lines = folder.read(&format!("{run}/metrics.jsonl"));
    let steps = lines.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    steps.map(|step| ["loss", "grad_norm"].map(|key| step[key].as_f64().expect("a number"))).collect()
}

/// Returns the bytes of the weights in a folder.
fn weights(folder: &Run, model: &str) -> Vec<u8> {
    fs::read(folder.path(model).join("model.safetensors")).expect("the weights")
}

#[test]
fn the_setting_trains_the_model_that_the_command_writes() {
    let of_adapter = |saved: &str| {
        format!("[adapter]\nkind = \"lora\"\ntargets = [\"q_proj\"]\nmodules_to_save = {saved}")
    };
    for (model, adapter) in [
        ("llama-tiny", of_adapter("[\"embed_tokens\", \"lm_head\"]")),
        ("llama-tied-tiny", of_adapter("[\"embed_tokens\"]")),
        ("llama-tied-tiny", String::new()),
    ] {
        let folder = folder(model, 256);
        folder.succeed(&[&["add-tokens", "base", "grown", "--special"], &TOKENS[..]].concat(), &[]);
        write_run(&folder, "written", "from = \"grown\"", &adapter);
        write_run(&folder, "set", ADDED, &adapter);
        for parts in ["pipeline.head_parts=1", "pipeline.head_parts=2"] {
            for run in ["written", "set"] {
                folder.succeed(&["train", &format!("{run}.toml")], &[parts]);
            }
            assert_eq!(losses_of(&folder, "set"), losses_of(&folder, "written"), "{model}");
        }
        // Nothing is added again.
        fs::remove_dir_all(folder.path("set/checkpoints/step-00000003")).expect("a checkpoint");
        folder.succeed(&["resume", "set"], &[]);
        assert_eq!(losses_of(&folder, "set"), losses_of(&folder, "written"), "{model}");
        for run in ["written", "set"] {
            let merge = if adapter.is_empty() { &[][..] } else { &["--merge"] };
            folder.succeed(&[&["export", run, &format!("{run}-model")], merge].concat(), &[]);
        }
        assert_eq!(folder.read_json("set-model/config.json")["vocab_size"], 258);
        assert_eq!(folder.read_json("set-model/tokenizer.json"), folder.read_json("grown/tokenizer.json"));
        assert_eq!(weights(&folder, "set-model"), weights(&folder, "written-model"), "{model}");
    }
}

#[test]
fn rows_that_nothing_trains_are_named() {
    let folder = folder("llama-tiny", 256);
    let adapter = "[adapter]\nkind = \"lora\"\nmodules_to_save = [\"embed_tokens\"]";
    write_run(&folder, "set", ADDED, adapter);
    folder.says(
        &["check", "set.toml"],
        &[],
        "nothing trains the rows of the tokens in `model.add_tokens` in `lm_head`:",
    );
    let (_, said) = folder.succeed(&["check", "set.toml"], &["adapter.targets=[\"lm_head\"]"]);
    assert!(!said.contains("nothing trains"), "{said}");
}

#[test]
fn wrong_tokens_of_the_setting_are_refused() {
    let folder = folder("llama-tiny", 256);
    write_run(&folder, "small", ADDED, "");
    let refused = |tokens: &str, expected: &str| {
        folder.refuse_settings(&[&format!("model.add_tokens={tokens}")], expected);
    };
    refused("[\"<x>\", \"w7\"]", "`model.add_tokens`: `w7` is a token of the model already, with the id 7");
    refused("[\"<x>\", \"<x>\"]", "`add_tokens` has \"<x>\" twice");
    refused("[\"\"]", "`add_tokens` is empty");
    folder.refuse_settings(&["data.tokenizer=bytes"], "`add_tokens` has no effect without a tokenizer");
    fs::remove_file(folder.path("base/tokenizer.json")).expect("it exists");
    folder.refuse_settings(&[], "`add_tokens` has no effect without a tokenizer");
}

/// Texts have the new tokens as single ids, and generation knows them.
#[cfg(feature = "tokenizers")]
#[test]
fn texts_have_the_tokens_of_the_setting() {
    let folder = folder("llama-tiny", 256);
    write_run(&folder, "set", ADDED, "");
    folder.write("text.txt", "<x> w5 w6 <y> w7 ".repeat(40));
    let text = "data.path=text.txt";
    folder.prints(&["data", "show", "set.toml", "--rows", "1"], &[text], "<y>");
    let set = [
        "run.steps=80",
        "run.checkpoint_every=0",
        "pipeline.microbatches=8",
        "optimizer.learning_rate=0.005",
    ];
    folder.succeed(&["train", "set.toml"], &[&[text], &set[..]].concat());
    let losses = losses_of(&folder, "set");
    assert!(losses[79][0] < 0.3, "{losses:?}");
    // Special tokens are left out of the text.
    folder.prints(&["generate", "set", "--prompt", "<x> w5", "--tokens", "3"], &[], "w6 w7");
}

/// The token that ends texts is one of the new ones: the samples of a run and its texts end with it.
#[cfg(feature = "tokenizers")]
#[test]
fn a_new_token_ends_texts() {
    let folder = folder("llama-tiny", 256);
    folder.write("base/tokenizer_config.json", json!({ "eos_token": "<y>" }).to_string());
    write_run(&folder, "set", ADDED, "");
    folder.write("text.txt", "<x> w5 w6 <y> w7 ".repeat(80));
    let set = [
        "data.path=text.txt",
        "run.steps=80",
        "run.checkpoint_every=0",
        "pipeline.microbatches=8",
        "optimizer.learning_rate=0.005",
        "data.validation_share=0.4",
        "run.eval_every=80",
        "run.sample_prompts=[\"<x> w5\"]",
        "run.sample_tokens=4",
    ];
    folder.succeed(&["train", "set.toml"], &set);
    let lines = folder.read("set/metrics.jsonl");
    let last: Value = serde_json::from_str(lines.lines().last().expect("a step")).expect("JSON");
    assert_eq!(last["samples"], json!([{ "prompt": "<x> w5", "text": "w6" }]), "{last}");
    let text =
        folder.print(&["generate", "set", "--prompt", "<x> w5", "--tokens", "4", "--temperature", "0"]);
    assert!(text.ends_with("w6\n"), "{text}");
}
