//! The `tokenizer.json` and `tokenizer_config.json` of the tokenizer in a GGUF file.
//!
//! ```text
//! tokenizer.ggml.model "gpt2"    merges of bytes, which are written as letters; `tokenizer.ggml.pre` names how texts are divided
//! tokenizer.ggml.model "llama"   merges of letters in the order of the scores of their results, and bytes for other letters
//! ```

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use crate::container::Gguf;
use crate::error::GgufError;
use crate::pre_tokenizers::PreTokenizer;

/// The character that stands for a space in texts of SentencePiece.
pub(crate) const SPACE: &str = "\u{2581}";
/// The key of the tokens.
pub(crate) const TOKENS: &str = "tokenizer.ggml.tokens";
/// The numbers of the types of tokens.
pub(crate) const UNKNOWN: u64 = 2;
pub(crate) const CONTROL: u64 = 3;
pub(crate) const USER_DEFINED: u64 = 4;
/// The names of special tokens in `tokenizer_config.json`, with their keys in the metadata.
pub(crate) const SPECIAL: [(&str, &str); 4] = [
    ("bos_token", "bos_token_id"),
    ("eos_token", "eos_token_id"),
    ("unk_token", "unknown_token_id"),
    ("pad_token", "padding_token_id"),
];

/// The tokenizer of a file.
struct Tokenizer<'a> {
    gguf: &'a Gguf,
    tokens: Vec<&'a str>,
    kinds: Vec<u64>,
}

impl<'a> Tokenizer<'a> {
    /// Returns the tokenizer; `None` if the file has no tokenizer.
    fn of(gguf: &'a Gguf) -> Result<Option<Self>, GgufError> {
        let Some(tokens) = gguf.metadata.get(TOKENS) else { return Ok(None) };
        let texts =
            tokens.as_array().map(|tokens| tokens.iter().map(Value::as_str).collect::<Option<Vec<_>>>());
        let Some(Some(tokens)) = texts else {
            return Err(GgufError::at(&gguf.path, "`tokenizer.ggml.tokens` is not a list of texts"));
        };
        let kinds = gguf.metadata.get("tokenizer.ggml.token_type").and_then(Value::as_array);
        let kinds = kinds
            .map_or_else(Vec::new, |kinds| kinds.iter().map(|kind| kind.as_u64().unwrap_or(1)).collect());
        Ok(Some(Self { gguf, tokens, kinds }))
    }

    fn key(&self, name: &str) -> Option<&'a Value> {
        self.gguf.metadata.get(&format!("tokenizer.ggml.{name}"))
    }

    fn flag(&self, name: &str) -> Option<bool> {
        self.key(name)?.as_bool()
    }

    fn fault(&self, fault: impl Into<String>) -> GgufError {
        GgufError::at(&self.gguf.path, fault)
    }

    /// Returns the id and the text of a special token.
    fn special(&self, key: &str) -> Option<(u64, &'a str)> {
        let id = self.key(key)?.as_u64()?;
        Some((id, self.tokens.get(usize::try_from(id).ok()?)?))
    }

    fn ids(&self) -> HashMap<&'a str, u64> {
        let mut ids = HashMap::with_capacity(self.tokens.len());
        for (id, token) in (0..).zip(&self.tokens) {
            ids.entry(*token).or_insert(id);
        }
        ids
    }

    fn json(&self) -> Result<Value, GgufError> {
        let model = self.key("model").and_then(Value::as_str).unwrap_or_default();
        let ids = self.ids();
        let (mut file, adds_bos) = match model {
            "gpt2" => self.byte_level(&ids)?,
            "llama" => self.sentence_pieces(&ids)?,
            other => {
                return Err(self.fault(format!(
                    "the tokenizer's model is `{other}`, which is not read from GGUF (gpt2 and llama are): name the tokenizer \
                     of the original model (`data.tokenizer`), or \"bytes\""
                )));
            }
        };
        let is_added = |id: usize| {
            self.kinds.get(id).is_some_and(|kind| [UNKNOWN, CONTROL, USER_DEFINED].contains(kind))
        };
        let added = self.tokens.iter().enumerate().filter(|(id, _)| is_added(*id)).map(|(id, token)| {
            json!({
                "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                "special": self.kinds[id] != USER_DEFINED,
            })
        });
        file["added_tokens"] = added.collect();
        file["model"]["vocab"] =
            ids.into_iter().map(|(token, id)| (token.to_owned(), id.into())).collect::<Map<_, _>>().into();
        let bos = self.special("bos_token_id").filter(|_| self.flag("add_bos_token").unwrap_or(adds_bos));
        let eos = self.special("eos_token_id").filter(|_| self.flag("add_eos_token").unwrap_or(false));
        if bos.is_some() || eos.is_some() {
            let text = json!({"Sequence": {"id": "A", "type_id": 0}});
            let token = |(_, token): (u64, &str)| json!({"SpecialToken": {"id": token, "type_id": 0}});
            let single: Vec<Value> = bos.map(token).into_iter().chain([text]).chain(eos.map(token)).collect();
            let known = bos
                .into_iter()
                .chain(eos)
                .map(|(id, token)| (token.to_owned(), json!({"id": token, "ids": [id], "tokens": [token]})));
            let known: Map<String, Value> = known.collect();
            // Texts come one by one, but a template has a form for two.
            let pair = [single.clone(), vec![json!({"Sequence": {"id": "B", "type_id": 1}})]].concat();
            file["post_processor"] = json!({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": known});
        }
        Ok(file)
    }

    /// Returns the file of a tokenizer of bytes, without its tokens, and whether it begins a text with a token.
    fn byte_level(&self, ids: &HashMap<&str, u64>) -> Result<(Value, bool), GgufError> {
        let name = self.key("pre").and_then(Value::as_str).unwrap_or("default");
        let Some(known) = PreTokenizer::named(name) else {
            return Err(self.fault(format!(
                "the tokenizer divides texts as `{name}`, which is not read from GGUF ({} are): name the tokenizer of the \
                 original model (`data.tokenizer`), or \"bytes\"",
                PreTokenizer::all_names()
            )));
        };
        let Some(merges) = self.key("merges").and_then(Value::as_array) else {
            return Err(self.fault("the tokenizer has no `tokenizer.ggml.merges`"));
        };
        let pairs = merges.iter().map(|merge| {
            let (first, second) = merge.as_str()?.split_once(' ')?;
            let is_known = ids.contains_key(&*format!("{first}{second}"));
            (is_known && ids.contains_key(first) && ids.contains_key(second)).then(|| json!([first, second]))
        });
        let Some(pairs) = pairs.collect::<Option<Vec<Value>>>() else {
            return Err(
                self.fault("a part of `tokenizer.ggml.merges` is not two tokens whose text is a token")
            );
        };
        let byte_level =
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
        let file = json!({
            "version": "1.0", "truncation": null, "padding": null,
            "normalizer": if known.is_composed { json!({"type": "NFC"}) } else { Value::Null },
            "pre_tokenizer": known.json(), "post_processor": byte_level.clone(), "decoder": byte_level,
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
                "fuse_unk": false, "byte_fallback": false, "ignore_merges": known.ignores_merges, "merges": pairs,
            },
        });
        Ok((file, known.adds_bos))
    }

    /// Returns the file of a tokenizer of SentencePiece, without its tokens, and whether it begins a text with a token.
    fn sentence_pieces(&self, ids: &HashMap<&str, u64>) -> Result<(Value, bool), GgufError> {
        let scores =
            self.key("scores").and_then(Value::as_array).filter(|scores| scores.len() == self.tokens.len());
        let Some(scores) = scores else {
            return Err(self.fault("the tokenizer has no `tokenizer.ggml.scores`, one for each token"));
        };
        let mut merges = Vec::new();
        for (token, score) in self.tokens.iter().zip(scores) {
            let score = score.as_f64().unwrap_or(f64::NEG_INFINITY);
            let mut own: Vec<(u64, u64, &str, &str)> = Vec::new();
            // Longer tokens are texts that no letters were merged to.
            for (end, _) in token.char_indices().skip(1).take(128) {
                let (first, second) = token.split_at(end);
                if let (Some(one), Some(other)) = (ids.get(first), ids.get(second)) {
                    own.push((*one, *other, first, second));
                }
            }
            own.sort_unstable();
            merges.extend(own.into_iter().map(|(.., first, second)| (score, first, second)));
        }
        let length = |text: &str| text.chars().count();
        merges.sort_by(|(one, a, b), (other, c, d)| {
            other.total_cmp(one).then_with(|| (length(c), length(d)).cmp(&(length(a), length(b))))
        });
        let merges: Vec<Value> =
            merges.into_iter().map(|(_, first, second)| json!([first, second])).collect();
        let has_space = self.flag("add_space_prefix").unwrap_or(true);
        let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE});
        let normalizers = if has_space {
            vec![json!({"type": "Prepend", "prepend": SPACE}), replace]
        } else {
            vec![replace]
        };
        let mut decoders = vec![
            json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if has_space {
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        let unknown = self.special("unknown_token_id").map(|(_, token)| token);
        let file = json!({
            "version": "1.0", "truncation": null, "padding": null,
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "pre_tokenizer": null, "post_processor": null, "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {
                "type": "BPE", "dropout": null, "unk_token": unknown, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false, "merges": merges,
            },
        });
        Ok((file, true))
    }
}

/// Returns the `tokenizer.json`; `None` if the file has no tokenizer.
///
/// # Errors
/// When the tokenizer is of a kind that is not read, or its parts do not fit together.
pub(crate) fn tokenizer_json(gguf: &Gguf) -> Result<Option<Value>, GgufError> {
    Tokenizer::of(gguf)?.map(|tokenizer| tokenizer.json()).transpose()
}

/// Returns the `tokenizer_config.json`: the special tokens and the chat template; `None` if the file has no tokenizer.
///
/// # Errors
/// When the tokens are not texts.
pub(crate) fn settings_json(gguf: &Gguf) -> Result<Option<Value>, GgufError> {
    let Some(tokenizer) = Tokenizer::of(gguf)? else { return Ok(None) };
    let mut settings = Map::new();
    for (name, key) in SPECIAL {
        if let Some((_, token)) = tokenizer.special(key) {
            settings.insert(name.to_owned(), token.into());
        }
    }
    if let Some(template) = gguf.metadata.get("tokenizer.chat_template") {
        settings.insert("chat_template".to_owned(), template.clone());
    }
    Ok(Some(settings.into()))
}
