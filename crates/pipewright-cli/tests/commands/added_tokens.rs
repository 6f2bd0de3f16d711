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
