//! The `[model]` section: the sizes of a model with random parameters, or a Hugging Face folder.
//!
//! The keys have the same names and meaning as in Hugging Face's `config.json`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use pipewright_models::decoder::DecoderConfig;
use pipewright_models::llama::LlamaConfig;
use pipewright_models::{ConfigError, KeyUse, ModelConfig, ModelFamily, hf};
use serde::Serialize;
use serde_json::{Map, json};
use toml::Value;

use crate::settings::document::Document;
use crate::settings::paths::Surroundings;
use crate::settings::place::Place;
use crate::settings::problem::ProblemKind;
use crate::settings::section::{Bound, Section};

/// Which model to train.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum ModelSettings {
    /// The model in a folder with `config.json` and `*.safetensors`.
    From {
        /// The folder.
        from: PathBuf,
    },
    /// A model of these sizes with random parameters.
    Fresh(FreshModel),
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

    fn checked_config(&self) -> Result<ModelConfig, ConfigError> {
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
    let from_argument =
        document.entry("model", "from").is_some_and(|entry| matches!(entry.place, Place::Set { .. }));
    if from_argument {
        remove_file_keys(document);
    }
    let others: Vec<String> =
        document.written("model").map(|(key, _)| key.to_owned()).filter(|key| key != "from").collect();
    let mut section = Section::new(document, surroundings, "model");
    // A cache folder without a clear snapshot is reported when the model is read.
    let from = section.path("from").map(|from| hf::resolve(&from).unwrap_or(from));
    if section.is_written("from") {
        for key in others {
            section.report(&key, ProblemKind::BesideFrom { key: key.clone() });
        }
    }
    let written = written_keys(&section);
    let model = read_sizes(&mut section, &written);
    match from {
        Some(from) => ModelSettings::From { from },
        None => ModelSettings::Fresh(model),
    }
}

/// Removes the section's keys that are written in the file. `--set model.from=DIR` needs this, because the
/// sizes in the file belong to another model.
fn remove_file_keys(document: &mut Document) {
    let in_file = |(key, place): (&str, &Place)| matches!(place, Place::File { .. }).then(|| key.to_owned());
    let keys: Vec<String> = document.written("model").filter_map(in_file).collect();
    for key in keys {
        document.remove("model", &key);
    }
}

/// Larger sizes are mistakes, and products of several of them could overflow.
const LARGEST_WIDTH: u32 = 1 << 20;
const MOST_LAYERS: u32 = 1 << 16;

/// Returns the keys of the section that are not read as sizes, with their values.
fn written_keys(section: &Section<'_>) -> BTreeMap<String, Value> {
    section
        .written()
        .filter(|(key, _)| !OWN.contains(key))
        .map(|(key, value)| (key.to_owned(), value.clone()))
        .collect()
}

fn read_sizes(section: &mut Section<'_>, written: &BTreeMap<String, Value>) -> FreshModel {
    let num_attention_heads = section.count_to("num_attention_heads", 8, LARGEST_WIDTH);
    let mut model = FreshModel {
        architecture: read_family(section, written),
        vocab_size: section.count("vocab_size", 256),
        hidden_size: section.count_to("hidden_size", 512, LARGEST_WIDTH),
        intermediate_size: section.count_to("intermediate_size", 1376, LARGEST_WIDTH),
        num_hidden_layers: section.count_to("num_hidden_layers", 8, MOST_LAYERS),
        num_attention_heads,
        num_key_value_heads: section.count_to("num_key_value_heads", num_attention_heads, LARGEST_WIDTH),
        rms_norm_eps: section.number("rms_norm_eps", 1e-5, &Bound::Positive),
        rope_theta: section.number("rope_theta", 10_000.0, &Bound::Positive),
        tie_word_embeddings: section.flag("tie_word_embeddings", false),
        others: written.clone(),
    };
    for (key, value) in written.iter().filter(|(_, value)| has_date(value)) {
        let (key, message) = (key.clone(), format!("no value of a model is a date, and this is {value}"));
        section.report(&key.clone(), ProblemKind::Unrepresentable { key, message });
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
                section.report_at_first_of(&culprits, error.into());
            }
        }
    }
    drop_ignored(section, &mut model);
    model
}

/// Reads the family: `architecture`, or a key of a `config.json` that says it.
fn read_family(section: &mut Section<'_>, written: &BTreeMap<String, Value>) -> &'static str {
    let families: Vec<_> = ModelConfig::MODEL_TYPES.iter().map(|family| (*family, *family)).collect();
    let model_type = written.get("model_type").and_then(Value::as_str);
    let class = written.get("architectures").and_then(|classes| classes.get(0)?.as_str());
    let Some(name) = model_type.or(class) else {
        return section.choice("architecture", LlamaConfig::MODEL_TYPE, &families);
    };
    let place = if model_type.is_some() { "model_type" } else { "architectures" };
    let family = ModelConfig::family_of(name).unwrap_or_else(|| {
        let keys: Map<_, _> = written.iter().map(|(key, value)| (key.clone(), json_of(value))).collect();
        if let Err(error) = ModelConfig::from_json(keys.into()) {
            section.report(place, error.into());
        }
        LlamaConfig::MODEL_TYPE
    });
    if section.is_written("architecture") && section.choice("architecture", family, &families) != family {
        section.report(
            place,
            ProblemKind::Twice { what: "the family, differently", key: "architecture", other: "model_type" },
        );
    }
    family
}

/// Keys that are written with an exported model even if they do not affect training.
pub const EXPORTED: [&str; 4] = ["bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings"];

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

/// The keys that are read here. The model family reads the others: keys that only some families have, and
/// keys without a default.
const OWN: [&str; 11] = [
    "from",
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
fn culprits(error: &ConfigError) -> Vec<String> {
    // A key of a table, such as `rope_scaling.factor`, is at the place of the table.
    let mut keys: Vec<&str> = error.keys().iter().filter_map(|key| key.split('.').next()).collect();
    // The positions may be in a table of the other name.
    if keys.contains(&"rope_scaling") {
        keys.push("rope_parameters");
    }
    keys.push("architecture");
    keys.into_iter().map(str::to_owned).collect()
}
