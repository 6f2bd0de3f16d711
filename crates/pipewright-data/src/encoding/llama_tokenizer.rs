//! How transformers 5 reads the `tokenizer.json` of a `LlamaTokenizer`, such as Llama 2's.
//!
//! Its class keeps the vocabulary and the special tokens of the file, and replaces how a text is prepared. Many
//! files put a space before each part of a text between special tokens, also where the text has one; the class
//! puts one only at the beginning of a text, and only if the text does not begin with one. With `legacy`, it
//! does so for each part. Sources: `LlamaTokenizer`, `CodeLlamaTokenizer` and `AutoTokenizer` of transformers
//! 5.23.

use std::path::Path;

use pipewright_system::bounded_file::{SMALL_TEXT, without_mark};
use serde_json::{Value, json};

use crate::chat::special_tokens::read_json;
use crate::error::DataError;

/// Types of models for which transformers keeps the file as it is, whatever class the settings name.
const AS_IN_THE_FILE: [&str; 33] = [
    "arctic",
    "flex_olmo",
    "fuyu",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt_bigcode",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "granitemoeshared",
    "internlm2",
    "internlm3",
    "jamba",
    "llava",
    "llava_next",
    "minicpm3",
    "ministral",
    "ministral3",
    "mistral",
    "mistral3",
    "mixtral",
    "nemotron",
    "olmo2",
    "olmo3",
    "persimmon",
    "phi3",
    "phi3_v",
    "phimoe",
    "pixtral",
    "stablelm",
    "vipllava",
    "voxtral",
];

/// A `tokenizer.json` as its class reads it.
pub(crate) struct Rewritten {
    #[cfg_attr(not(feature = "tokenizers"), expect(dead_code, reason = "only the fingerprint is needed"))]
    pub(crate) content: Vec<u8>,
    /// Which parts of a text begin with a space.
    pub(crate) scheme: &'static str,
}

/// Returns a `tokenizer.json` as the class that the files next to it name reads it; `None` if that changes
/// nothing.
///
/// # Errors
/// When one of these files exists, and cannot be read or is not JSON.
pub(crate) fn as_its_class_reads(path: &Path, content: &[u8]) -> Result<Option<Rewritten>, DataError> {
    let read = |name: &str| {
        Ok::<_, DataError>(read_json(&path.with_file_name(name), SMALL_TEXT)?.unwrap_or_default())
    };
    Ok(rewritten(content, &read("tokenizer_config.json")?, &read("config.json")?))
}

/// Returns the `tokenizer.json` with this content as the class reads it that the settings or else the model name.
fn rewritten(content: &[u8], settings: &Value, model: &Value) -> Option<Rewritten> {
    let class = settings["tokenizer_class"].as_str().or_else(|| model["tokenizer_class"].as_str())?;
    let class = class.strip_suffix("Fast").unwrap_or(class);
    let has_own_code = !settings["auto_map"].is_null();
    let keeps_file = model["model_type"].as_str().is_some_and(|kind| AS_IN_THE_FILE.contains(&kind));
    if has_own_code || keeps_file || !matches!(class, "LlamaTokenizer" | "CodeLlamaTokenizer") {
        return None;
    }
    let is_legacy = class == "LlamaTokenizer" && is_true(&settings["legacy"]);
    let has_space = settings["add_prefix_space"].is_null() || is_true(&settings["add_prefix_space"]);
    let scheme = match (has_space, is_legacy) {
        (false, _) => "never",
        (true, false) => "first",
        (true, true) => "always",
    };
    let mut file: Value = serde_json::from_slice(without_mark(content)).ok()?;
    rewrite(&mut file, scheme).then(|| Rewritten { content: file.to_string().into_bytes(), scheme })
}

/// Returns whether Python takes a value for true.
fn is_true(value: &Value) -> bool {
    match value {
        Value::Bool(value) => *value,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        _ => false,
    }
}

/// Replaces how texts are prepared and put together. Returns false if the file says the same, or its model is
/// not made of merges of characters.
fn rewrite(file: &mut Value, scheme: &str) -> bool {
    let metaspace =
        json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme, "split": false});
    let is_byte_level = |part: &Value| part.to_string().contains("\"ByteLevel\"");
    let is_other = !file["model"]["merges"].is_array()
        || ["pre_tokenizer", "decoder", "post_processor"].iter().any(|part| is_byte_level(&file[*part]));
    if is_other || (file["normalizer"].is_null() && file["pre_tokenizer"] == metaspace) {
        return false;
    }
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if scheme != "never" {
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    file["normalizer"] = Value::Null;
    file["pre_tokenizer"] = metaspace;
    file["decoder"] = json!({"type": "Sequence", "decoders": decoders});
    true
}
