//! The keys of `config.json`: which of them a family computes with, which do not matter for training, and which it refuses
//! because it cannot compute what they ask for.
//!
//! Each family has one table. A key that no table lists is refused if its name is that of a part of a computation, such
//! as `attention_temperature`. Otherwise it is only reported ([`KeyTable::unknown_keys`]): published files contain keys of many tools.

use serde_json::{Map, Value};

use crate::error::{ConfigError, RefusedKey};

/// The keys that a family knows. Each field is a list of lists, so that families can share some of them.
#[derive(Debug)]
pub struct KeyTable {
    /// Keys whose values the family computes with.
    pub(crate) computes: &'static [&'static [&'static str]],
    /// Keys that do not change what training computes. `*` at the end of a name matches any letters.
    pub(crate) ignored: &'static [&'static [&'static str]],
    /// Keys that change the computation unless they have a harmless value.
    pub(crate) refused: &'static [&'static [Refused]],
}

/// A key that changes the computation unless it has a harmless value. `null` is always harmless.
#[derive(Debug)]
pub(crate) struct Refused {
    pub(crate) key: &'static str,
    pub(crate) harmless: Harmless,
}

/// The values other than `null` with which a key changes nothing.
#[derive(Debug)]
pub(crate) enum Harmless {
    /// None.
    Nothing,
    /// `false`.
    False,
    /// `true`.
    True,
    /// This number.
    Number(f64),
    /// This word.
    Word(&'static str),
    /// One of these words.
    OneOf(&'static [&'static str]),
    /// A list of this word only.
    AllOf(&'static str),
    /// A list or table without entries.
    Empty,
    /// Any value, if this key is `false`.
    Without(&'static str),
}

impl Harmless {
    fn holds(&self, key: &str, value: &Value, json: &Map<String, Value>) -> bool {
        match self {
            _ if value.is_null() => true,
            Self::Nothing | Self::False | Self::Empty if is_off(key, value) => true,
            Self::Number(number) if *number == 0.0 && is_off(key, value) => true,
            Self::Nothing => false,
            Self::False => value == &Value::Bool(false),
            Self::True => value == &Value::Bool(true),
            Self::Number(number) => value.as_f64() == Some(*number),
            Self::Word(word) => value.as_str() == Some(word),
            Self::OneOf(words) => value.as_str().is_some_and(|found| words.contains(&found)),
            Self::AllOf(word) => {
                value.as_array().is_some_and(|items| items.iter().all(|item| item.as_str() == Some(word)))
            }
            Self::Empty => is_empty(value),
            Self::Without(flag) => json.get(*flag) == Some(&Value::Bool(false)),
        }
    }

    /// Returns the part of a harmful value that is harmful.
    fn culprit<'v>(&self, value: &'v Value) -> &'v Value {
        let Self::AllOf(word) = self else { return value };
        let other = |item: &&Value| item.as_str() != Some(word);
        value.as_array().and_then(|items| items.iter().find(other)).unwrap_or(value)
    }

    /// Completes "only ... is supported".
    fn words(&self) -> String {
        match self {
            Self::Nothing | Self::Without(_) => "null".to_owned(),
            Self::False => "false".to_owned(),
            Self::True => "true".to_owned(),
            Self::Number(number) => number.to_string(),
            Self::Word(word) | Self::AllOf(word) => (*word).to_owned(),
            Self::OneOf(words) => words.join(" or "),
            Self::Empty => "an empty one".to_owned(),
        }
    }
}

/// What a key means for a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyUse {
    /// The family computes with it.
    Computes,
    /// It does not change what training computes.
    Ignored,
    /// It changes the computation unless it has a harmless value.
    Refused,
}

impl KeyTable {
    /// Returns whether the family computes with a key.
    pub(crate) fn computes(&self, key: &str) -> bool {
        self.computes.iter().any(|keys| keys.contains(&key))
    }

    /// Returns the keys that the family computes with.
    pub(crate) fn computed_keys(&self) -> impl Iterator<Item = &'static str> {
        self.computes.iter().flat_map(|keys| keys.iter().copied())
    }

    /// Returns what a key means; `None` if no table lists it.
    pub(crate) fn use_of(&self, key: &str) -> Option<KeyUse> {
        if self.refusal(key).is_some() {
            Some(KeyUse::Refused)
        } else if self.computes(key) {
            Some(KeyUse::Computes)
        } else if self.ignores(key) || IGNORED.contains(&key) {
            Some(KeyUse::Ignored)
        } else {
            OTHERS.iter().any(|refused| refused.key == key).then_some(KeyUse::Refused)
        }
    }

    fn ignores(&self, key: &str) -> bool {
        self.ignored.iter().flat_map(|keys| *keys).any(|ignored| match ignored.strip_suffix('*') {
            Some(start) => key.starts_with(start),
            None => key == *ignored,
        })
    }

    /// Returns the entry of a key that the family's own table refuses.
    fn refusal(&self, key: &str) -> Option<&'static Refused> {
        self.refused.iter().flat_map(|refused| *refused).find(|refused| refused.key == key)
    }

    /// Returns the keys of a file that the family cannot compute.
    pub(crate) fn refused(&self, json: &Map<String, Value>) -> Vec<RefusedKey> {
        json.iter().filter_map(|(key, value)| self.refuse(key, value, json)).collect()
    }

    fn refuse(&self, key: &str, value: &Value, json: &Map<String, Value>) -> Option<RefusedKey> {
        let refused = |shown: &Value, only: String| {
            let value = shown.as_str().map_or_else(|| shown.to_string(), str::to_owned);
            Some(RefusedKey { key: key.to_owned(), value: shortened(value), only })
        };
        match self.use_of(key) {
            Some(KeyUse::Computes | KeyUse::Ignored) => None,
            Some(KeyUse::Refused) => {
                let entry = self.refusal(key).or_else(|| OTHERS.iter().find(|other| other.key == key))?;
                let harmless = &entry.harmless;
                let holds = harmless.holds(key, value, json);
                if holds { None } else { refused(harmless.culprit(value), harmless.words()) }
            }
            None if changes_computation(key, value) => refused(value, "a model without this key".to_owned()),
            None => None,
        }
    }

    /// Returns an error if a file has keys that the family cannot compute.
    pub(crate) fn check(&self, json: &Value) -> Result<(), ConfigError> {
        let mut refused = json.as_object().map(|json| self.refused(json)).unwrap_or_default();
        match refused.len() {
            0 => Ok(()),
            1 => Err(ConfigError::Refused(Box::new(refused.remove(0)))),
            _ => Err(ConfigError::SeveralRefused { keys: refused }),
        }
    }

    /// Returns the keys of a file that no table lists and whose values may turn something on. Nobody knows what they mean.
    pub(crate) fn unknown_keys(&self, json: &Value) -> Vec<String> {
        let keys = json.as_object().into_iter().flatten();
        let unknown = keys.filter(|(key, value)| {
            // Names that begin with an underscore are internal to the library that wrote the file.
            !is_off(key, value) && !key.starts_with('_') && self.use_of(key).is_none()
        });
        unknown.map(|(key, _)| key.clone()).collect()
    }
}

/// Returns the beginning of a long value.
fn shortened(value: String) -> String {
    const LONGEST: usize = 60;
    match value.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}...", &value[..end]),
        None => value,
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Array(items) => items.is_empty(),
        Value::Object(keys) => keys.is_empty(),
        Value::String(text) => text.is_empty(),
        _ => false,
    }
}

/// Parts of the names of keys that change a computation.
const PARTS: [&str; 49] = [
    "_cap",
    "activation",
    "act_fn",
    "alibi",
    "alpha",
    "attention",
    "attn",
    "bias",
    "bidirectional",
    "block",
    "capping",
    "clip",
    "compress",
    "conv",
    "dilat",
    "drop",
    "embed",
    "expert",
    "ffn",
    "gate",
    "gating",
    "head",
    "jitter",
    "kv_",
    "layer",
    "ln_",
    "lora",
    "mlp",
    "moe",
    "multiplier",
    "mup",
    "norm",
    "parallel_",
    "position",
    "qk_",
    "qkv",
    "residual",
    "rope",
    "rotary",
    "router",
    "scal",
    "sink",
    "sliding",
    "soft_cap",
    "softcap",
    "softmax",
    "ssm",
    "swiglu",
    "window",
];

/// Returns whether an unlisted key has the name of a part of a computation, and a value that may turn it on.
fn changes_computation(key: &str, value: &Value) -> bool {
    let is_part = PARTS.iter().any(|part| key.contains(part));
    // A factor of 1 changes nothing.
    let is_neutral = value.as_f64() == Some(1.0) && (key.contains("scal") || key.contains("multiplier"));
    is_part && !is_off(key, value) && !is_neutral
}

/// Parts of the names of keys with which 0 is a value like any other.
const FACTORS: [&str; 9] =
    ["scal", "multiplier", "theta", "eps", "factor", "pct", "percent", "fraction", "temperature"];

/// Returns whether a value turns a key off.
fn is_off(key: &str, value: &Value) -> bool {
    let is_factor = || FACTORS.iter().any(|part| key.contains(part));
    value.is_null()
        || value == &Value::Bool(false)
        || is_empty(value)
        || (value.as_f64() == Some(0.0) && !is_factor())
}

/// Keys of any family's file that do not change what training computes.
const IGNORED: &[&str] = &[
    "model_type",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "name_or_path",
    "_name_or_path",
    "auto_map",
    "use_cache",
    "cache_implementation",
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_flash_attn_2_enabled",
    "use_flash_attention",
    "use_flash_attention_2",
    "use_flash_attn",
    "flash_attention",
    "use_sdpa",
    "experts_implementation",
    "kv_cache_dtype",
    "neftune_noise_alpha",
    "tensor_parallel_degree",
    "tensor_parallel_output",
    "tensor_parallel_rank",
    "tensor_parallel_size",
    "pipeline_parallel_degree",
    "pipeline_parallel_size",
    "pretraining_tp",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "sep_token_id",
    "cls_token_id",
    "mask_token_id",
    "unk_token_id",
    "decoder_start_token_id",
    "return_dict",
    "output_hidden_states",
    "output_attentions",
    "output_scores",
    "return_dict_in_generate",
    "id2label",
    "label2id",
    "num_labels",
    "problem_type",
    "finetuning_task",
    "task_specific_params",
    "classifier_dropout",
    "chunk_size_feed_forward",
    "is_decoder",
    "torchscript",
    "tokenizer_class",
    "tokenizer_file",
    "prefix",
    "tf_legacy_loss",
    "use_bfloat16",
    "max_length",
    "min_length",
    "max_new_tokens",
    "do_sample",
    "early_stopping",
    "num_beams",
    "num_beam_groups",
    "num_return_sequences",
    "diversity_penalty",
    "repetition_penalty",
    "length_penalty",
    "exponential_decay_length_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "bad_words_ids",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "suppress_tokens",
    "begin_suppress_tokens",
    "remove_invalid_values",
    "max_position_embeddings",
    "model_max_length",
    "max_sequence_length",
    "seq_length",
    "unsloth_version",
    "unsloth_fixed",
    "is_llama_config",
    "transformers.js_config",
];

/// Keys of other families, whose names or neutral values [`changes_computation`] cannot judge.
const OTHERS: &[Refused] = &[
    Refused { key: "quantization_config", harmless: Harmless::Empty },
    Refused { key: "is_encoder_decoder", harmless: Harmless::False },
    Refused { key: "add_cross_attention", harmless: Harmless::False },
    Refused { key: "cross_attention_hidden_size", harmless: Harmless::Nothing },
    Refused { key: "tie_encoder_decoder", harmless: Harmless::False },
    Refused { key: "pruned_heads", harmless: Harmless::Empty },
    Refused { key: "per_layer_config", harmless: Harmless::Empty },
    Refused { key: "attention_multiplier", harmless: Harmless::Nothing },
    Refused { key: "embedding_multiplier", harmless: Harmless::Number(1.0) },
    Refused { key: "residual_multiplier", harmless: Harmless::Number(1.0) },
    Refused { key: "logits_scaling", harmless: Harmless::Number(1.0) },
    Refused { key: "logit_scale", harmless: Harmless::Number(1.0) },
    Refused { key: "query_pre_attn_scalar", harmless: Harmless::Nothing },
    Refused { key: "partial_rotary_factor", harmless: Harmless::Number(1.0) },
    Refused { key: "rope_interleaved", harmless: Harmless::False },
    Refused { key: "rope_interleave", harmless: Harmless::False },
    Refused { key: "qkv_bias", harmless: Harmless::False },
    Refused { key: "position_embedding_type", harmless: Harmless::OneOf(&["rope", "rotary", "absolute"]) },
    Refused { key: "hidden_act", harmless: Harmless::Word("silu") },
    Refused { key: "hidden_activation", harmless: Harmless::Word("silu") },
    Refused { key: "_sliding_window_pattern", harmless: Harmless::Nothing },
    Refused { key: "_remove_final_layer_norm", harmless: Harmless::False },
    Refused { key: "use_cla", harmless: Harmless::False },
    Refused { key: "use_mla", harmless: Harmless::False },
    Refused { key: "use_mrope", harmless: Harmless::False },
    Refused { key: "use_mem_rope", harmless: Harmless::False },
    Refused { key: "causal", harmless: Harmless::True },
    Refused { key: "is_causal", harmless: Harmless::True },
    Refused { key: "prefix_lm", harmless: Harmless::False },
    Refused { key: "vision_config", harmless: Harmless::Empty },
    Refused { key: "audio_config", harmless: Harmless::Empty },
    Refused { key: "text_config", harmless: Harmless::Empty },
    Refused { key: "num_nextn_predict_layers", harmless: Harmless::Number(0.0) },
    Refused { key: "num_mtp_layers", harmless: Harmless::Number(0.0) },
    Refused { key: "n_shared_experts", harmless: Harmless::Number(0.0) },
    Refused { key: "num_shared_experts", harmless: Harmless::Number(0.0) },
    Refused { key: "shared_expert_intermediate_size", harmless: Harmless::Number(0.0) },
    Refused { key: "num_experts", harmless: Harmless::Number(0.0) },
    Refused { key: "num_local_experts", harmless: Harmless::Number(0.0) },
    Refused { key: "n_routed_experts", harmless: Harmless::Number(0.0) },
    Refused { key: "initial_context_length", harmless: Harmless::Nothing },
];
