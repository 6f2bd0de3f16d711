//! How byte-level tokenizers divide a text before they merge, by the name in GGUF (`tokenizer.ggml.pre`).
//!
//! The expressions come from the published `tokenizer.json` of the models after which llama.cpp names them.

use serde_json::{Value, json};

/// A division of texts.
pub(crate) struct PreTokenizer {
    /// The names in GGUF; the first one is written.
    pub(crate) names: &'static [&'static str],
    /// The expression that finds the parts; `None` for the expression of GPT-2.
    expression: Option<&'static str>,
    /// Whether each digit is a part.
    has_digits: bool,
    /// Whether letters are composed first (NFC).
    pub(crate) is_composed: bool,
    /// Whether a part that is a token is not divided into merges.
    pub(crate) ignores_merges: bool,
    /// Whether texts begin with a token unless the metadata says otherwise.
    pub(crate) adds_bos: bool,
}

const GPT2: PreTokenizer = PreTokenizer {
    names: &["gpt-2", "gpt2", "phi-2"],
    expression: None,
    has_digits: false,
    is_composed: false,
    ignores_merges: false,
    adds_bos: false,
};

pub(crate) const ALL: [PreTokenizer; 5] = [
    GPT2,
    PreTokenizer { names: &["smollm", "starcoder", "refact", "command-r"], has_digits: true, ..GPT2 },
    PreTokenizer {
        names: &["llama-bpe", "llama3", "llama-v3"],
        expression: Some(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        ignores_merges: true,
        adds_bos: true,
        ..GPT2
    },
    PreTokenizer {
        names: &["qwen2", "deepseek-r1-qwen"],
        expression: Some(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        is_composed: true,
        ..GPT2
    },
    PreTokenizer {
        names: &["tekken"],
        expression: Some(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        ignores_merges: true,
        adds_bos: true,
        ..GPT2
    },
];

impl PreTokenizer {
    /// Returns the division with a name in GGUF.
    pub(crate) fn named(name: &str) -> Option<&'static Self> {
        ALL.iter().find(|known| known.names.contains(&name))
    }

    /// Returns the division of a `tokenizer.json`.
    pub(crate) fn of(tokenizer: &Value) -> Option<&'static Self> {
        let step = &tokenizer["pre_tokenizer"];
        let steps =
            step["pretokenizers"].as_array().map_or_else(|| vec![step], |steps| steps.iter().collect());
        let normalizer = tokenizer["normalizer"]["type"].as_str();
        let is_known = |known: &&Self| {
            let (byte_level, others) = steps.split_last()?;
            let uses_own = byte_level["type"] == "ByteLevel"
                && byte_level["add_prefix_space"] != true
                && byte_level["use_regex"].as_bool().unwrap_or(true) == known.expression.is_none();
            let are_others = match (others, known.expression, known.has_digits) {
                ([], None, false) => true,
                ([digits], None, true) => digits["type"] == "Digits" && digits["individual_digits"] == true,
                ([split], Some(expression), false) => {
                    split["type"] == "Split"
                        && split["pattern"]["Regex"] == expression
                        && split["behavior"] == "Isolated"
                        && split["invert"] != true
                }
                _ => false,
            };
            let is_composed = normalizer == known.is_composed.then_some("NFC");
            (uses_own && are_others && is_composed).then_some(())
        };
        ALL.iter().find(|known| is_known(known).is_some())
    }

    /// Returns the step in `tokenizer.json`.
    pub(crate) fn json(&self) -> Value {
        let own = self.expression.is_none();
        let byte_level =
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": own});
        let first = match self.expression {
            Some(expression) => json!({
                "type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": false,
            }),
            None if self.has_digits => json!({"type": "Digits", "individual_digits": true}),
            None => return byte_level,
        };
        json!({"type": "Sequence", "pretokenizers": [first, byte_level]})
    }

    /// Returns the names that are read.
    pub(crate) fn all_names() -> String {
        ALL.iter().flat_map(|known| known.names).copied().collect::<Vec<_>>().join(", ")
    }
}
