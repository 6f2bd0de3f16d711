//! The `[model]` section: the sizes of a model with random parameters, or a Hugging Face folder.
//!
//! The keys have the same names and meaning as in Hugging Face's `config.json`.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::path::PathBuf;

use pipewright_models::decoder::DecoderConfig;
use pipewright_models::{KeyUse, ModelConfig, ShapeError, hf};
use serde::Serialize;
use serde_json::{Map, json};
use toml::Value;

use crate::settings::document::Document;
use crate::settings::paths::Surroundings;
use crate::settings::section::Section;

/// Which model to train.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum ModelSettings {
    /// The model in a folder with `config.json` and `*.safetensors`.
    From {
        /// The folder.
        from: PathBuf,
        /// Special tokens that are added to the tokenizer and to the model.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        add_tokens: Vec<String>,
        /// How the frozen base of adapters is held.
        #[serde(flatten)]
        streaming: Streaming,
    },
    /// A model of these sizes with random parameters.
    Fresh(FreshModel),
}

/// How the frozen base of adapters is held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Streaming {
    /// Whether its matrices stay in their files, and each stage reads them before it computes; `None` if they do so when
    /// memory is too small for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stream: Option<bool>,
    /// The number of stages of a rank that are in memory at once; `None` for [`STREAM_WINDOW`].
    #[serde(rename = "stream_window", skip_serializing_if = "Option::is_none")]
    pub window: Option<NonZeroU32>,
}

/// The stages of a rank that are in memory at once: one computes while the next one is read.
pub const STREAM_WINDOW: NonZeroU32 = NonZeroU32::new(2).expect("2 is not 0");

impl ModelSettings {
    /// Returns the special tokens that are added to the tokenizer and to the model.
    pub fn added_tokens(&self) -> &[String] {
        match self {
            Self::From { add_tokens, .. } => add_tokens,
            Self::Fresh(_) => &[],
        }
    }

    /// Returns how the frozen base of adapters is held.
    pub fn streaming(&self) -> Streaming {
        match self {
            Self::From { streaming, .. } => *streaming,
            Self::Fresh(_) => Streaming::default(),
        }
    }
}

/// The sizes of a model with random parameters.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FreshModel {
    /// The model family, one of [`ModelConfig::MODEL_TYPES`].
    pub architecture: &'static str,
    /// The number of token ids.
    pub vocab_size: u32,
    /// The number of channels between layers.
    pub hidden_size: u32,
    /// The number of channels inside a feed-forward block.
    pub intermediate_size: u32,
    /// The number of decoder layers.
    pub num_hidden_layers: u32,
    /// The number of query heads.
    pub num_attention_heads: u32,
    /// The number of key and value heads. Each serves a group of query heads.
    pub num_key_value_heads: u32,
    /// The number that RMSNorm adds to the mean square.
    pub rms_norm_eps: f64,
    /// The base of the rotary embeddings' wavelengths.
    pub rope_theta: f64,
    /// Whether the output head uses the weight of the embedding.
    pub tie_word_embeddings: bool,
    /// The other keys that are written. The family has defaults for keys that are not written.
    #[serde(flatten)]
    pub others: BTreeMap<String, Value>,
}

impl FreshModel {
    /// Returns the model's configuration.
    pub fn config(&self) -> ModelConfig {
        self.checked_config().expect("the settings were checked when they were read")
    }

    fn checked_config(&self) -> Result<ModelConfig, ShapeError> {
        let decoder = self.decoder();
        decoder.validate()?;
        let others = self.others.iter().map(|(key, value)| (key.clone(), json_of(value)));
        ModelConfig::of_sizes(self.architecture, decoder, others.collect())
    }

    fn decoder(&self) -> DecoderConfig {
        DecoderConfig {
            hidden_size: self.hidden_size as usize,
            intermediate_size: self.intermediate_size as usize,
            num_hidden_layers: self.num_hidden_layers as usize,
            num_key_value_heads: self.num_key_value_heads as usize,
            rms_norm_eps: self.rms_norm_eps,
            rope_theta: self.rope_theta,
            tie_word_embeddings: self.tie_word_embeddings,
            ..DecoderConfig::new(self.vocab_size as usize, self.num_attention_heads as usize)
        }
    }
}

/// Reads the section.
pub(super) fn read(document: &mut Document, surroundings: &Surroundings) -> ModelSettings {
    // The sizes in the file belong to another model than the one after `--set model.from`.
    if document.value("model", "from").is_some_and(|from| from.place.is_argument()) {
        document.remove_of_file("model", |_| true);
    }
    let written: BTreeMap<String, Value> = document
        .sections
        .get("model")
        .into_iter()
        .flat_map(|table| &table.entries)
        .map(|(key, entry)| (key.clone(), entry.value.to_toml()))
        .collect();
    let mut section = Section::new(document, surroundings, "model");
    // A cache folder without a clear snapshot is reported when the model is read.
    let from = section.path("from").map(|from| hf::resolve(&from).unwrap_or(from));
    if section.is_written("from") {
        for key in written.keys().filter(|key| !OF_FOLDER.contains(&key.as_str())) {
            let sentence = format!(
                "`{key}` is written next to `from`, and with `from` the model follows from its config.json"
            );
            section.report(key, sentence, format!("remove `{key}`, or remove `from`"));
        }
    }
    let written = written.into_iter().filter(|(key, _)| !OWN.contains(&key.as_str())).collect();
    let streaming = Streaming {
        stream: section.given_flag("stream"),
        window: section.given_count("stream_window").and_then(NonZeroU32::new),
    };
    let add_tokens = read_tokens(&mut section);
    for key in ["add_tokens", "stream", "stream_window"] {
        if from.is_none() && section.is_written(key) {
            section.report_without(key, "from", "name the folder of the model, or remove it");
        }
    }
    if from.is_some() && streaming.stream == Some(false) && streaming.window.is_some() {
        let sentence =
            "`stream_window` has no effect, because `stream` is false and the whole base is in memory";
        section.report("stream_window", sentence, "remove it, or set stream = true");
    }
    let model = read_sizes(&mut section, &written);
    match from {
        Some(from) => ModelSettings::From { from, add_tokens, streaming },
        None => ModelSettings::Fresh(model),
    }
}

/// Reads the special tokens that are added.
fn read_tokens(section: &mut Section<'_>) -> Vec<String> {
    let tokens = section.texts("add_tokens").unwrap_or_default();
    let is_repeated = |(index, token): &(usize, &String)| tokens[..*index].contains(token);
    if let Some((_, token)) = tokens.iter().enumerate().find(is_repeated) {
        section.report("add_tokens", format!("`add_tokens` has {token:?} twice"), "remove one of them");
    }
    tokens
}

fn read_sizes(section: &mut Section<'_>, written: &BTreeMap<String, Value>) -> FreshModel {
    let num_attention_heads = section.count("num_attention_heads");
    let mut model = FreshModel {
        architecture: read_family(section, written),
        vocab_size: section.count("vocab_size"),
        hidden_size: section.count("hidden_size"),
        intermediate_size: section.count("intermediate_size"),
        num_hidden_layers: section.count("num_hidden_layers"),
        num_attention_heads,
        num_key_value_heads: section.given_count("num_key_value_heads").unwrap_or(num_attention_heads),
        rms_norm_eps: section.number("rms_norm_eps"),
        rope_theta: section.number("rope_theta"),
        tie_word_embeddings: section.flag("tie_word_embeddings"),
        others: written.clone(),
    };
    for (key, value) in written.iter().filter(|(_, value)| has_date(value)) {
        let sentence = format!(
            "the value of `{key}` cannot be held: no value of a model is a date, and this is {value}"
        );
        section.report(key, sentence, "write the value that the key has in config.json");
    }
    if section.is_sound() {
        match model.checked_config() {
            Ok(config) if config.has_unused_window() => section.note(
                "[model]: `sliding_window` has no effect, because no layer has it: set `use_sliding_window = true`, and \
                 `max_window_layers` (28 if it is absent) below the number of layers"
                    .to_owned(),
            ),
            Ok(_) => {}
            Err(error) => {
                let culprits = culprits(&error);
                let culprits: Vec<&str> = culprits.iter().map(String::as_str).collect();
                section.report_error_of(&culprits, error);
            }
        }
    }
    drop_ignored(section, &mut model);
    model
}

/// The family of a model whose settings do not name one.
const LLAMA: &str = "llama";

/// Reads the family: `architecture`, or a key of a `config.json` that says it.
fn read_family(section: &mut Section<'_>, written: &BTreeMap<String, Value>) -> &'static str {
    let families: Vec<_> = ModelConfig::MODEL_TYPES.iter().map(|family| (*family, *family)).collect();
    let model_type = written.get("model_type").and_then(Value::as_str);
    let class = written.get("architectures").and_then(|classes| classes.get(0)?.as_str());
    let Some(name) = model_type.or(class) else {
        return section.word("architecture", &families);
    };
    let place = if model_type.is_some() { "model_type" } else { "architectures" };
    let family = ModelConfig::family_of(name).unwrap_or_else(|| {
        let keys: Map<_, _> = written.iter().map(|(key, value)| (key.clone(), json_of(value))).collect();
        if let Err(error) = ModelConfig::from_json(keys.into()) {
            section.report_error(place, error);
        }
        LLAMA
    });
    if section.given_word("architecture", &families).is_some_and(|written| written != family) {
        let sentence = "`architecture` and `model_type` both choose the family, differently";
        section.report(place, sentence, "remove `architecture` or `model_type`");
    }
    family
}

/// Keys that are written with an exported model even if they do not affect training.
pub(crate) const EXPORTED: [&str; 4] =
    ["bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings"];

/// Removes the keys of a pasted `config.json` with which the family does not compute, and names them.
fn drop_ignored(section: &mut Section<'_>, model: &mut FreshModel) {
    let family = model.architecture;
    let is_kept = |key: &str| {
        EXPORTED.contains(&key)
            || ModelConfig::key_use(family, key).is_none_or(|usage| usage == KeyUse::Computes)
    };
    let ignored: Vec<String> = model.others.keys().filter(|key| !is_kept(key)).cloned().collect();
    model.others.retain(|key, _| is_kept(key));
    let ignored: Vec<String> = ignored
        .into_iter()
        .filter(|key| !["model_type", "architectures"].contains(&key.as_str()))
        .map(|key| format!("`{key}`"))
        .collect();
    if !ignored.is_empty() {
        section.note(format!(
            "[model]: {} of config.json do not change what `{family}` computes in training, and are ignored",
            ignored.join(", ")
        ));
    }
}

fn has_date(value: &Value) -> bool {
    match value {
        Value::Datetime(_) => true,
        Value::Array(items) => items.iter().any(has_date),
        Value::Table(keys) => keys.values().any(has_date),
        _ => false,
    }
}

/// Returns a value as JSON. Numbers that JSON does not have get the form that version 5 of transformers
/// writes.
fn json_of(value: &Value) -> serde_json::Value {
    let named = |name: &str| json!({"__float__": name});
    match value {
        Value::Float(number) if number.is_nan() => named("NaN"),
        Value::Float(number) if number.is_infinite() => {
            named(if *number > 0.0 { "Infinity" } else { "-Infinity" })
        }
        Value::Array(items) => items.iter().map(json_of).collect(),
        Value::Table(keys) => {
            serde_json::Value::Object(keys.iter().map(|(key, value)| (key.clone(), json_of(value))).collect())
        }
        plain => json!(plain),
    }
}

/// The keys that may be written next to `from`.
const OF_FOLDER: [&str; 4] = ["from", "add_tokens", "stream", "stream_window"];

/// The keys that are read here. The model family reads the others: keys that only some families have, and
/// keys without a default.
const OWN: [&str; 14] = [
    "from",
    "add_tokens",
    "stream",
    "stream_window",
    "architecture",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_theta",
    "tie_word_embeddings",
];

/// Returns the keys that an error of the model's configuration is about, the most probable cause first.
fn culprits(error: &ShapeError) -> Vec<String> {
    // A key of a table, such as `rope_scaling.factor`, is at the place of the table.
    let mut keys: Vec<&str> = error.keys().iter().filter_map(|key| key.split('.').next()).collect();
    // The positions may be in a table of the other name.
    if keys.contains(&"rope_scaling") {
        keys.push("rope_parameters");
    }
    keys.push("architecture");
    keys.into_iter().map(str::to_owned).collect()
}
