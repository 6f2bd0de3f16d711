//! The metadata in GGUF of a `tokenizer.json` and its settings.

use std::collections::HashMap;

use serde_json::Value;

use crate::pre_tokenizers::PreTokenizer;
use crate::tokenizer::{CONTROL, SPACE, SPECIAL, UNKNOWN, USER_DEFINED};
use crate::write::Entry;

/// Token types of ordinary tokens, of ids without a token, and of bytes.
const NORMAL: u64 = 1;
const UNUSED: u64 = 5;
const BYTE: u64 = 6;

/// Returns the metadata of a tokenizer for a model with `vocabulary` ids. `settings` is its `tokenizer_config.json`, and
/// `template` the chat template. `token_id` returns the id of a special token that the files next to it name.
///
/// # Errors
/// When GGUF has no such tokenizer, as a sentence.
pub fn tokenizer_metadata(
    file: &Value,
    settings: &Value,
    template: Option<String>,
    vocabulary: usize,
    token_id: impl Fn(&str) -> Option<u64>,
) -> Result<Vec<(String, Entry)>, String> {
    let refused = |what: &str| {
        format!(
            "tokenizer.json: {what}, for which GGUF has no name: remove the tokenizer from the folder to write the model without it"
        )
    };
    let model = &file["model"];
    let (Some(known), Some(merges)) = (model["vocab"].as_object(), model["merges"].as_array()) else {
        return Err(refused("the tokenizer does not merge"));
    };
    let mut tokens: Vec<(String, u64)> = (0..vocabulary).map(|id| (format!("[PAD{id}]"), UNUSED)).collect();
    let mut set = |id: u64, token: &str, kind: u64| {
        let slot = usize::try_from(id).ok().and_then(|id| tokens.get_mut(id));
        slot.map(|slot| *slot = (token.to_owned(), kind)).ok_or_else(|| {
            format!("tokenizer.json: the token {token:?} has the id {id}, and the model has {vocabulary} ids")
        })
    };
    let falls_back = model["byte_fallback"] == true;
    let is_byte = |token: &str| falls_back && token.len() == 6 && token.starts_with("<0x");
    for (token, id) in known {
        set(id.as_u64().unwrap_or(u64::MAX), token, if is_byte(token) { BYTE } else { NORMAL })?;
    }
    for added in file["added_tokens"].as_array().into_iter().flatten() {
        let token = added["content"].as_str().unwrap_or_default();
        let kind = match added["special"] == true {
            true if model["unk_token"] == token => UNKNOWN,
            true => CONTROL,
            false => USER_DEFINED,
        };
        set(added["id"].as_u64().unwrap_or(u64::MAX), token, kind)?;
    }
    let pairs = merges.iter().map(|merge| match merge {
        Value::String(pair) => pair.split_once(' '),
        pair => pair[0].as_str().zip(pair[1].as_str()),
    });
    let Some(pairs) = pairs.collect::<Option<Vec<(&str, &str)>>>() else {
        return Err(refused("a merge is not two tokens"));
    };
    let mut entries = Vec::new();
    let mut add = |key: &str, entry| entries.push((format!("tokenizer.ggml.{key}"), entry));
    if falls_back {
        let steps = [&file["normalizer"], &file["pre_tokenizer"]].map(Value::to_string).concat();
        if !steps.contains(SPACE) {
            return Err(refused("the tokenizer falls back to bytes and does not mark spaces"));
        }
        let has_space =
            steps.contains("\"Prepend\"") || steps.contains("\"first\"") || steps.contains("\"always\"");
        // A text is merged in the order of the scores of the results.
        let mut scores: HashMap<String, f32> = HashMap::new();
        for (rank, (first, second)) in pairs.iter().enumerate() {
            scores.entry(format!("{first}{second}")).or_insert(-(rank as f32));
        }
        let least = -(pairs.len() as f32);
        let score = |(token, kind): &(String, u64)| {
            if *kind == NORMAL { scores.get(token).copied().unwrap_or(least) } else { 0.0 }
        };
        add("model", Entry::Text("llama".to_owned()));
        add("pre", Entry::Text("default".to_owned()));
        add("scores", Entry::Floats(tokens.iter().map(score).collect()));
        add("add_space_prefix", Entry::Bool(has_space));
    } else {
        let Some(known) = PreTokenizer::of(file) else {
            return Err(refused("the tokenizer divides texts in a way of its own"));
        };
        add("model", Entry::Text("gpt2".to_owned()));
        add("pre", Entry::Text(known.names[0].to_owned()));
        add(
            "merges",
            Entry::Texts(pairs.iter().map(|(first, second)| format!("{first} {second}")).collect()),
        );
    }
    for (name, key) in SPECIAL {
        if let Some(id) = token_id(name).and_then(|id| u32::try_from(id).ok()) {
            add(key, Entry::U32(id));
        }
    }
    let begins = begins_with(file, settings, token_id("bos_token"), &tokens);
    add("add_bos_token", Entry::Bool(begins));
    add("token_type", Entry::Ints(tokens.iter().map(|(_, kind)| *kind as i32).collect()));
    add("tokens", Entry::Texts(tokens.into_iter().map(|(token, _)| token).collect()));
    entries.extend(template.map(|template| ("tokenizer.chat_template".to_owned(), Entry::Text(template))));
    Ok(entries)
}

/// Returns whether the tokenizer puts the token that begins a text before each text.
fn begins_with(file: &Value, settings: &Value, bos: Option<u64>, tokens: &[(String, u64)]) -> bool {
    let processor = &file["post_processor"];
    let processors =
        processor["processors"].as_array().map_or_else(|| vec![processor], |all| all.iter().collect());
    let bos = bos.and_then(|id| tokens.get(usize::try_from(id).ok()?)).map(|(token, _)| token.as_str());
    let first = processors.iter().find_map(|processor| processor["single"][0]["SpecialToken"]["id"].as_str());
    match (first, bos) {
        (Some(first), Some(bos)) => first == bos,
        _ => {
            bos.is_some()
                && settings["add_bos_token"] == true
                && settings["tokenizer_class"] == "LlamaTokenizer"
        }
    }
}
