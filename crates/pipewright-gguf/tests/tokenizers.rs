//! Tokenizers in GGUF against the files from which `make_tokenizers.py` has made them, and written and read again.

use std::fs;
use std::path::{Path, PathBuf};

use pipewright_gguf::write::{Entry, header};
use pipewright_gguf::{files, tokenizer_metadata};
use serde_json::{Value, json};
use tempfile::TempDir;

const NAMES: [&str; 4] = ["qwen2", "llama3", "gpt2", "pieces"];

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn original(name: &str) -> Value {
    serde_json::from_slice(&fs::read(data(&format!("{name}.json"))).expect("a file")).expect("JSON")
}

fn read(gguf: &Path, name: &str) -> Result<Value, String> {
    let content = files::read(&gguf.join(name), u64::MAX).map_err(|error| error.to_string())?;
    Ok(serde_json::from_slice(&content).expect("JSON"))
}

#[test]
fn tokenizers_have_the_tokens_and_merges_of_their_files() {
    for name in NAMES {
        let gguf = data(&format!("{name}.gguf"));
        assert!(
            files::exists(&gguf.join("tokenizer.json"))
                && !files::exists(&gguf.join("special_tokens_map.json"))
        );
        let (found, original) = (read(&gguf, "tokenizer.json").expect("a tokenizer"), original(name));
        for key in ["vocab", "ignore_merges", "byte_fallback", "fuse_unk", "merges", "unk_token"] {
            // The vocabulary of the file has no tokens that were added to it.
            let mut expected = original["model"][key].clone();
            if key == "vocab" {
                let added = original["added_tokens"].as_array().expect("a list").iter();
                added.for_each(|token| {
                    expected[token["content"].as_str().expect("a text")] = token["id"].clone();
                });
            }
            assert_eq!(found["model"][key], expected, "{name} {key}");
        }
        assert_eq!(found["added_tokens"], original["added_tokens"], "{name}");
        let settings = read(&gguf, "tokenizer_config.json").expect("settings");
        let ends = if name == "pieces" { ["<s>", "</s>"] } else { ["<|endoftext|>", "<|im_end|>"] };
        assert_eq!([&settings["bos_token"], &settings["eos_token"]], ends.map(|end| json!(end)).each_ref());
        assert!(settings["chat_template"].as_str().is_some_and(|template| template.contains("im_start")));
    }
}

/// Writes a tokenizer into a file and returns it as it is read.
fn written(file: &Value, vocabulary: usize) -> Result<Value, String> {
    let added = file["added_tokens"].as_array().cloned().unwrap_or_default();
    let id = |name: &str| {
        let texts: &[&str] = if name == "bos_token" { &["<s>", "<|endoftext|>"] } else { &["<unk>"] };
        let token = added
            .iter()
            .find(|token| texts.iter().any(|text| token["content"] == *text) && name != "pad_token");
        token?["id"].as_u64()
    };
    let mut entries = tokenizer_metadata(file, &Value::Null, Some("{{ x }}".to_owned()), vocabulary, id)?;
    entries.push(("general.architecture".to_owned(), Entry::Text("llama".to_owned())));
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join("m.gguf");
    fs::write(&path, header(&entries, &[])).expect("it is writable");
    assert_eq!(read(&path, "tokenizer_config.json").expect("settings")["chat_template"], "{{ x }}");
    read(&path, "tokenizer.json")
}

#[test]
fn tokenizers_are_written_and_read_again() {
    for name in NAMES {
        let expected = read(&data(&format!("{name}.gguf")), "tokenizer.json").expect("a tokenizer");
        let vocabulary = expected["model"]["vocab"].as_object().expect("a table").len();
        let mut found = written(&original(name), vocabulary).expect("it is written");
        if name == "gpt2" || name == "qwen2" {
            // The file does not say that a text begins with a token.
            assert_eq!(found["post_processor"]["type"], "ByteLevel");
        }
        assert_eq!(found, expected, "{name}");
        // Ids without a token have a name.
        found = written(&original(name), vocabulary + 2).expect("it is written");
        assert_eq!(found["model"]["vocab"][format!("[PAD{vocabulary}]")], vocabulary);
        let error = written(&original(name), vocabulary - 1).expect_err("it has more tokens");
        assert!(error.contains("the model has"), "{error}");
    }
}

/// The tokenizer of Gemma marks spaces and puts none before a text.
#[test]
fn a_tokenizer_without_a_first_space_is_written_and_read_again() {
    let (mut file, space) = (original("pieces"), json!({"String": " "}));
    let replace = json!({"type": "Replace", "pattern": space, "content": "\u{2581}"});
    file["normalizer"] = replace.clone();
    file["pre_tokenizer"] =
        json!({"type": "Split", "pattern": space, "behavior": "MergedWithPrevious", "invert": false});
    let expected = read(&data("pieces.gguf"), "tokenizer.json").expect("a tokenizer");
    let vocabulary = expected["model"]["vocab"].as_object().expect("a table").len();
    let [found, other] = [&file, &original("pieces")].map(|file| written(file, vocabulary).expect("written"));
    assert_eq!(found["normalizer"]["normalizers"], json!([replace]));
    assert_eq!(found["model"], other["model"]);
    assert_ne!(found["decoder"], other["decoder"]);
}

#[test]
fn unknown_tokenizers_are_refused_with_a_sentence() {
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join("m.gguf");
    let check = |name: &str, from: &str, to: &str, part: &str| {
        let mut bytes = fs::read(data(name)).expect("a file");
        let place =
            bytes.windows(from.len()).position(|window| window == from.as_bytes()).expect("the file has it");
        bytes[place..place + to.len()].copy_from_slice(to.as_bytes());
        fs::write(&path, bytes).expect("it is writable");
        let error = read(&path, "tokenizer.json").expect_err("it is refused");
        assert!(error.contains(part), "{error}");
    };
    check("qwen2.gguf", "qwen2", "qwenx", "divides texts as `qwenx`");
    check("llama3.gguf", "gpt2", "bert", "model is `bert`");
    check("gpt2.gguf", "tokenizer.ggml.merges", "tokenizer.ggml.mergex", "has no `tokenizer.ggml.merges`");
    check("pieces.gguf", "tokenizer.ggml.scores", "tokenizer.ggml.scorex", "has no `tokenizer.ggml.scores`");
    let mut other = original("qwen2");
    other["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!("x");
    assert!(written(&other, 430).expect_err("it is refused").contains("in a way of its own"));
}
