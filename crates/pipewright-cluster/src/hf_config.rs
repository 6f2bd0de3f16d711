//! A model from its `config.json` alone.
//!
//! Families differ in the names of keys, less in their shapes, so a key is looked up under all names that are
//! in use. Whatever the file says and the cost model does not use is listed, so that nobody trusts a
//! prediction for a part that was ignored.

use std::collections::BTreeSet;

use serde_json::{Map, Value};
use thiserror::Error;

use crate::harmless_keys::HARMLESS;
use crate::model::{Attention, Block, Dense, Experts, FeedForward, Latent, Mamba2, Mixer, Model};

/// The largest file that is read, in bytes.
pub const MAX_FILE: usize = 1 << 20;
/// The most blocks of a model.
const MAX_BLOCKS: u64 = 10_000;
/// The largest size of a part. Published models have at most some ten thousand.
const MAX_SIZE: u64 = 1 << 20;
/// The largest vocabulary.
const MAX_VOCABULARY: u64 = 1 << 28;

/// The families with biases, norms with an offset, and a feed-forward part without a gate.
const GPT: [&str; 4] = ["gpt2", "gpt_neox", "gpt_bigcode", "starcoder2"];
/// The activations of feed-forward parts without a gate in other families.
const NOT_GATED: [&str; 4] = ["relu2", "gelu_new", "relu", "gelu_fast"];

/// A model and what was not understood.
#[derive(Debug, Clone, PartialEq)]
pub struct Described {
    /// The model.
    pub model: Model,
    /// The keys that the cost model does not use, although they may change costs.
    pub ignored: Vec<String>,
}

/// The errors of a configuration.
#[derive(Clone, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// The file is not a JSON object.
    #[error("the file is not a JSON object{at}")]
    NotAnObject {
        /// Where it ends to be one, if it is not JSON.
        at: String,
    },
    /// The file is too large.
    #[error("the file has more than {MAX_FILE} bytes; a configuration is smaller")]
    TooLarge,
    /// A size is missing.
    #[error("the configuration needs one of the keys {names}; add it")]
    Missing {
        /// The names of the key.
        names: String,
    },
    /// A size is not a number in its range.
    #[error("`{key}` is {value}; use a whole number from {least} to {most}")]
    Size {
        /// The key.
        key: String,
        /// Its value, shortened.
        value: String,
        /// The smallest value.
        least: u64,
        /// The largest value.
        most: u64,
    },
    /// A kind of block has no cost.
    #[error("`{key}` names the kind of block `{kind}`, whose costs are not known; known are {known}")]
    Block {
        /// The key.
        key: &'static str,
        /// The kind.
        kind: String,
        /// The known kinds.
        known: &'static str,
    },
    /// A list of blocks is empty or too long.
    #[error("`{key}` has {blocks} blocks; use from 1 to {MAX_BLOCKS}")]
    Blocks {
        /// The key.
        key: &'static str,
        /// The blocks.
        blocks: usize,
    },
    /// The width of a head would be 0.
    #[error("{heads} heads are more than the hidden size of {hidden}; use fewer heads, or give `head_dim`")]
    Heads {
        /// The heads.
        heads: u64,
        /// The width of the hidden states.
        hidden: u64,
    },
}

pipewright_schedule::message_as_debug!(ConfigError);

/// Reads the text of a `config.json`.
///
/// # Errors
/// When it is not JSON, a size is missing or out of range, or a kind of block has no cost.
pub fn read(text: &str) -> Result<Described, ConfigError> {
    if text.len() > MAX_FILE {
        return Err(ConfigError::TooLarge);
    }
    let not_an_object = |at| ConfigError::NotAnObject { at };
    let value: Value = serde_json::from_str(text).map_err(|error| not_an_object(format!(": {error}")))?;
    let object = value.as_object().ok_or_else(|| not_an_object(String::new()))?;
    // Models of text and images keep the decoder's keys in a part of their own.
    let inner = object.get("text_config").and_then(Value::as_object);
    let mut keys = Keys { object: inner.unwrap_or(object), used: BTreeSet::new() };
    let model = keys.model()?;
    let mut ignored = keys.ignored();
    if inner.is_some() {
        let outside = object.keys().filter(|key| *key != "text_config" && !HARMLESS.contains(&key.as_str()));
        ignored.extend(outside.cloned());
    }
    Ok(Described { model, ignored })
}

/// The keys of a configuration, and which of them are used.
struct Keys<'a> {
    object: &'a Map<String, Value>,
    used: BTreeSet<String>,
}

impl<'a> Keys<'a> {
    fn value(&mut self, names: &[&str]) -> Option<(String, &'a Value)> {
        self.used.extend(names.iter().map(|&name| name.to_owned()));
        let name = names.iter().find(|&&name| self.object.get(name).is_some_and(|value| !value.is_null()))?;
        Some(((*name).to_owned(), &self.object[*name]))
    }

    /// A size under the first of its names that is given.
    fn size(&mut self, names: &[&str], least: u64, most: u64) -> Result<Option<u64>, ConfigError> {
        let Some((key, value)) = self.value(names) else { return Ok(None) };
        match value.as_u64().filter(|size| (least..=most).contains(size)) {
            Some(size) => Ok(Some(size)),
            None => {
                let value = value.to_string().chars().take(64).collect();
                Err(ConfigError::Size { key, value, least, most })
            }
        }
    }

    fn needed(&mut self, names: &[&str]) -> Result<u64, ConfigError> {
        self.needed_up_to(names, MAX_SIZE)
    }

    fn needed_up_to(&mut self, names: &[&str], most: u64) -> Result<u64, ConfigError> {
        let missing = || ConfigError::Missing { names: names.join(", ") };
        self.size(names, 1, most)?.ok_or_else(missing)
    }

    fn flag(&mut self, name: &str) -> Option<bool> {
        self.value(&[name]).and_then(|(_, value)| value.as_bool())
    }

    fn text(&mut self, names: &[&str]) -> Option<&'a str> {
        self.value(names).and_then(|(_, value)| value.as_str())
    }

    fn ignored(&self) -> Vec<String> {
        let known = |key: &String| {
            self.used.contains(key) || key.starts_with('_') || HARMLESS.contains(&key.as_str())
        };
        self.object.keys().filter(|key| !known(key)).cloned().collect()
    }

    fn model(&mut self) -> Result<Model, ConfigError> {
        let family = self.text(&["model_type"]).unwrap_or("decoder").to_owned();
        let hidden = self.needed(&["hidden_size", "n_embd", "d_model"])?;
        let vocabulary = self.needed_up_to(&["vocab_size"], MAX_VOCABULARY)?;
        let layers = self.size(&["num_hidden_layers", "n_layer", "num_layers"], 1, MAX_BLOCKS)?;
        let gpt = GPT.contains(&family.as_str());
        let tied = self.flag("tie_word_embeddings").unwrap_or(gpt || family.starts_with("gemma"));
        let blocks = match self.value(&["hybrid_override_pattern"]) {
            Some((_, pattern)) => self.hybrid(hidden, pattern.as_str().unwrap_or_default())?,
            None => {
                let missing =
                    || ConfigError::Missing { names: "num_hidden_layers, n_layer, num_layers".into() };
                self.uniform(hidden, layers.ok_or_else(missing)?)?
            }
        };
        let predictors = self.size(&["num_nextn_predict_layers"], 0, 64)?.unwrap_or(0) as u32;
        Ok(Model { name: family, hidden, vocabulary, tied, blocks, predictors, gpt })
    }

    /// The blocks of a model whose blocks are all attention and feed-forward.
    fn uniform(&mut self, hidden: u64, layers: u64) -> Result<Vec<Block>, ConfigError> {
        let mixer = self.attention(hidden)?;
        let dense = self.dense(hidden)?;
        let experts = self.experts(dense)?;
        let first_dense = self.size(&["first_k_dense_replace"], 0, MAX_BLOCKS)?.unwrap_or(0);
        let every = self.size(&["moe_layer_freq", "decoder_sparse_step"], 1, MAX_BLOCKS)?.unwrap_or(1);
        let dense_only = self.list("mlp_only_layers");
        let kinds = self.value(&["layer_types"]).and_then(|(_, kinds)| kinds.as_array()).cloned();
        let pattern = self.size(&["sliding_window_pattern"], 1, MAX_BLOCKS)?;
        let uses_window = self.flag("use_sliding_window") != Some(false);
        // The first blocks have no window (Qwen 2).
        let whole_at_start = self.size(&["max_window_layers"], 0, MAX_SIZE)?.unwrap_or(0);
        let blocks = (0..layers).map(|layer| {
            let is_dense =
                layer < first_dense || dense_only.contains(&layer) || !(layer + 1).is_multiple_of(every);
            let kind = kinds.as_ref().and_then(|kinds| kinds.get(layer as usize)).and_then(Value::as_str);
            let is_whole = match (kind, pattern) {
                (Some(kind), _) => kind == "full_attention",
                (None, Some(pattern)) => (layer + 1).is_multiple_of(pattern),
                (None, None) => !uses_window || layer < whole_at_start,
            };
            if let Some(kind) = kind.filter(|kind| !ATTENTION_KINDS.contains(kind)) {
                let known = "full_attention, sliding_attention";
                return Err(ConfigError::Block { key: "layer_types", kind: kind.into(), known });
            }
            let mixer = if is_whole { without_window(mixer) } else { mixer };
            let feed_forward = match experts {
                Some(experts) if !is_dense => FeedForward::Experts(experts),
                _ => FeedForward::Dense(dense),
            };
            Ok(Block { mixer, feed_forward })
        });
        blocks.collect()
    }

    /// The blocks of a hybrid: one letter for each, `M` Mamba-2, `*` attention, `-` feed-forward, `E` experts.
    fn hybrid(&mut self, hidden: u64, pattern: &str) -> Result<Vec<Block>, ConfigError> {
        let blocks = pattern.chars().count();
        if !(1..=MAX_BLOCKS).contains(&(blocks as u64)) {
            return Err(ConfigError::Blocks { key: "hybrid_override_pattern", blocks });
        }
        let attention = self.attention(hidden)?;
        let dense = self.dense(hidden)?;
        let experts = self.experts(dense)?;
        let mamba = self.mamba()?;
        let of_letter = |letter: char| match letter {
            'M' => Ok(Block { mixer: Mixer::Mamba2(mamba), feed_forward: FeedForward::None }),
            '*' => Ok(Block { mixer: attention, feed_forward: FeedForward::None }),
            '-' => Ok(Block { mixer: Mixer::None, feed_forward: FeedForward::Dense(dense) }),
            'E' if experts.is_some() => Ok(Block {
                mixer: Mixer::None,
                feed_forward: experts.map_or(FeedForward::None, FeedForward::Experts),
            }),
            other => Err(ConfigError::Block {
                key: "hybrid_override_pattern",
                kind: other.to_string(),
                known: "M, *, -, and E if there are experts",
            }),
        };
        pattern.chars().map(of_letter).collect()
    }

    fn attention(&mut self, hidden: u64) -> Result<Mixer, ConfigError> {
        let heads = self.needed(&["num_attention_heads", "n_head"])?;
        let window = self.size(&["sliding_window"], 1, MAX_SIZE)?;
        if let Some(key_value_rank) = self.size(&["kv_lora_rank"], 1, MAX_SIZE)? {
            self.used.extend(["num_key_value_heads", "head_dim"].map(str::to_owned));
            return Ok(Mixer::Latent(Latent {
                heads,
                query_rank: self.size(&["q_lora_rank"], 1, MAX_SIZE)?,
                key_value_rank,
                plain_size: self.needed(&["qk_nope_head_dim"])?,
                rotary_size: self.needed(&["qk_rope_head_dim"])?,
                value_size: self.needed(&["v_head_dim"])?,
            }));
        }
        let key_value_heads = self.size(&["num_key_value_heads", "num_kv_heads"], 1, MAX_SIZE)?;
        let head_size = self.size(&["head_dim", "attention_head_dim"], 1, MAX_SIZE)?;
        if head_size.is_none() && heads > hidden {
            return Err(ConfigError::Heads { heads, hidden });
        }
        // In GPT-BigCode, all heads share the keys and values of one.
        let others = if self.flag("multi_query") == Some(true) { 1 } else { heads };
        Ok(Mixer::Attention(Attention {
            heads,
            key_value_heads: key_value_heads.unwrap_or(others),
            head_size: head_size.unwrap_or(hidden / heads),
            window,
        }))
    }

    fn dense(&mut self, hidden: u64) -> Result<Dense, ConfigError> {
        let inner = self.size(&["intermediate_size", "n_inner", "ffn_dim"], 1, MAX_SIZE)?;
        let activation =
            self.text(&["hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act"]);
        let is_gpt = self.text(&["model_type"]).is_some_and(|family| GPT.contains(&family));
        let gated = !is_gpt && !activation.is_some_and(|activation| NOT_GATED.contains(&activation));
        Ok(Dense { inner: inner.unwrap_or(4 * hidden), gated })
    }

    fn experts(&mut self, dense: Dense) -> Result<Option<Experts>, ConfigError> {
        let names = ["n_routed_experts", "num_experts", "num_local_experts"];
        let Some(count) = self.size(&names, 0, MAX_SIZE)?.filter(|&count| count > 0) else {
            return Ok(None);
        };
        let per_token = self.needed(&["num_experts_per_tok", "moe_topk"])?;
        let inner = self.size(&["moe_intermediate_size"], 1, MAX_SIZE)?.unwrap_or(dense.inner);
        let shared = self.size(&["n_shared_experts"], 0, MAX_SIZE)?;
        let shared_names = ["moe_shared_expert_intermediate_size", "shared_expert_intermediate_size"];
        let shared_inner = self.size(&shared_names, 0, MAX_SIZE)?;
        let shared_inner = shared_inner.map_or_else(
            || shared.unwrap_or(0).saturating_mul(inner),
            |inner| inner.saturating_mul(shared.unwrap_or(1)),
        );
        Ok(Some(Experts { count, per_token, expert: Dense { inner, ..dense }, shared_inner }))
    }

    fn mamba(&mut self) -> Result<Mamba2, ConfigError> {
        Ok(Mamba2 {
            heads: self.needed(&["mamba_num_heads"])?,
            head_size: self.needed(&["mamba_head_dim"])?,
            state: self.needed(&["ssm_state_size"])?,
            groups: self.needed(&["n_groups"])?,
            convolution: self.needed(&["conv_kernel"])?,
            chunk: self.needed(&["chunk_size"])?,
        })
    }

    fn list(&mut self, name: &str) -> Vec<u64> {
        let array = self.value(&[name]).and_then(|(_, value)| value.as_array());
        array.into_iter().flatten().filter_map(Value::as_u64).collect()
    }
}

const ATTENTION_KINDS: [&str; 2] = ["full_attention", "sliding_attention"];

fn without_window(mixer: Mixer) -> Mixer {
    match mixer {
        Mixer::Attention(attention) => Mixer::Attention(Attention { window: None, ..attention }),
        other => other,
    }
}
