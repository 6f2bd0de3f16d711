//! The files next to a `tokenizer.json`: its special tokens, and the class that reads it.

use std::path::Path;

use serde_json::{Value, json};

use super::has_error;
use crate::{DataConfig, SpecialTokens, TokenCodec, TokenRows, Tokenizer};

/// A tokenizer of words with two special tokens.
fn tokenizer() -> Value {
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    json!({"version": "1.0", "pre_tokenizer": {"type": "WhitespaceSplit"},
        "added_tokens": [special(1, "<s>"), special(2, "</s>"), special(3, "<|end|>")],
        "model": {"type": "WordLevel", "unk_token": "?",
            "vocab": {"?": 0, "<s>": 1, "</s>": 2, "<|end|>": 3, "to": 4, "be": 5, "<": 6}}})
}

/// Writes files into a folder, with a tokenizer if none is among them.
fn folder(files: &[(&str, Value)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let write = |name: &str, content: &Value| {
        std::fs::write(folder.path().join(name), content.to_string()).expect("a file");
    };
    write("tokenizer.json", &tokenizer());
    files.iter().for_each(|(name, content)| write(name, content));
    folder
}

/// Opens a completion whose tokenizer is in a folder.
fn completion(folder: &Path) -> TokenRows {
    let path = folder.join("a.jsonl");
    std::fs::write(&path, r#"{"prompt": "to ", "completion": "be"}"#).expect("a file");
    let config = DataConfig {
        path: vec![path.display().to_string()],
        tokenizer: Tokenizer::File(folder.join("tokenizer.json")),
        seq_len: 4,
        ..DataConfig::default()
    };
    config.open(8, 1).expect("good data")
}

/// Checks with which id a completion ends; without one, that this is reported.
fn check_end(files: &[(&str, Value)], expected: Result<i32, &str>) {
    let folder = folder(files);
    let mut rows = completion(folder.path());
    let targets = rows.next_batch(1).expect("it is in memory").targets;
    match expected {
        Ok(id) => {
            assert_eq!((targets, rows.missing_end()), (vec![5, id, -100, -100], None), "{files:?}");
        }
        Err(message) => {
            let missing = rows.missing_end().map(ToString::to_string).unwrap_or_default();
            assert!(missing.contains(message), "{files:?}: {missing}");
        }
    }
}

const SETTINGS: &str = "tokenizer_config.json";
const MAP: &str = "special_tokens_map.json";
const MODEL: &str = "config.json";
const GENERATION: &str = "generation_config.json";

#[test]
fn completions_end_with_the_token_that_a_file_names() {
    let (settings, map) = (json!({"eos_token": "</s>"}), json!({"eos_token": {"content": "<|end|>"}}));
    let (two, three) = (json!({"eos_token_id": 2}), json!({"eos_token_id": [9, 3, 2]}));
    check_end(&[(SETTINGS, settings.clone()), (MAP, map.clone())], Ok(2));
    check_end(&[(MAP, map.clone()), (MODEL, two.clone())], Ok(3));
    check_end(&[(SETTINGS, json!({"bos_token": "<s>"})), (MAP, map)], Ok(3));
    check_end(&[(SETTINGS, json!({"eos_token": null})), (MODEL, three.clone())], Ok(3));
    check_end(&[(MODEL, two.clone()), (GENERATION, three.clone())], Ok(2));
    check_end(&[(MODEL, json!({})), (GENERATION, three)], Ok(3));
}

#[test]
fn completions_without_an_end_are_reported() {
    let none = "the model does not learn to stop: no file names an `eos_token`; name one as `eos_token` in ";
    check_end(&[], Err(none));
    check_end(&[(MODEL, json!({"eos_token_id": 9}))], Err(none));
    check_end(
        &[(SETTINGS, json!({"eos_token": "be to"}))],
        Err("the `eos_token` \"be to\" is not one token"),
    );
    // The tokenizer adds the end itself.
    let mut adds = tokenizer();
    adds["post_processor"] = json!({"type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]}}});
    check_end(&[("tokenizer.json", adds)], Ok(2));
}

#[test]
fn other_special_tokens_are_found_in_the_same_files() {
    let check = |files: &[(&str, Value)], name: &str, text: Option<&str>, id: Option<u64>| {
        let folder = folder(files);
        let tokens = SpecialTokens::beside(&folder.path().join("tokenizer.json")).expect("good files");
        assert_eq!((tokens.text(name), tokens.id(name).expect("JSON")), (text, id), "{files:?}");
    };
    let model = json!({"bos_token_id": 1, "pad_token_id": 3});
    check(&[(MODEL, model.clone())], "bos_token", Some("<s>"), Some(1));
    check(&[(MODEL, model.clone())], "pad_token", Some("<|end|>"), Some(3));
    // A tokenizer without such a token says so.
    check(&[(SETTINGS, json!({"bos_token": null})), (MODEL, model)], "bos_token", None, None);
    check(&[(MAP, json!({"unk_token": "to"}))], "unk_token", Some("to"), Some(4));
    let unigram =
        json!({"added_tokens": [], "model": {"type": "Unigram", "vocab": [["?", 0.0], ["</s>", -1.0]]}});
    let files = [("tokenizer.json", unigram), (MODEL, json!({"eos_token_id": 1}))];
    check(&files, "eos_token", Some("</s>"), None);
    let broken = folder(&[]);
    std::fs::write(broken.path().join(MAP), "{").expect("a file");
    has_error(
        SpecialTokens::beside(&broken.path().join("tokenizer.json")),
        "special_tokens_map.json: not JSON",
    );
}

/// `tests/data/make_llama_ids.py` makes the ids.
#[test]
fn the_ids_of_a_llama_are_those_of_transformers() {
    let reference: Value =
        serde_json::from_str(include_str!("../../tests/data/llama_ids.json")).expect("JSON");
    for case in reference["cases"].as_array().expect("a list") {
        let mut tokenizer = reference["tokenizer"].clone();
        for part in ["normalizer", "pre_tokenizer"] {
            tokenizer[part] = case["part"][part].clone();
        }
        let files = [
            ("tokenizer.json", tokenizer),
            (SETTINGS, case["settings"].clone()),
            (MODEL, case["model"].clone()),
        ];
        let folder = folder(&files);
        let codec =
            TokenCodec::open(&Tokenizer::File(folder.path().join("tokenizer.json"))).expect("good files");
        for (text, ids) in std::iter::zip(
            reference["texts"].as_array().expect("texts"),
            case["ids"].as_array().expect("ids"),
        ) {
            let found = codec.encode(text.as_str().expect("a text"), 100, false).expect("good text");
            assert_eq!(
                json!(found),
                *ids,
                "{text}, {}, {}, {}",
                case["part"],
                case["settings"],
                case["model"]
            );
        }
    }
}
