//! The list of model families, and the configuration of a model of any of them.
//!
//! A further family is one module with a type that implements [`ModelFamily`], its `pub mod` line in `lib.rs`, a `use` line
//! and a line in the list here, and a line in `tests/layers.rs`.

use std::ops::Range;
use std::path::{Path, PathBuf};

use burn::tensor::Device;
use pipewright::checkpoint::Checkpoint;
use pipewright::nn::TensorParallel;
use pipewright::stage::{Stage, StageModule};
use pipewright::train::data::{SideError, SideRows};
use pipewright_schedule::ModelDesc;
use serde_json::{Map, Value};

use crate::config_key::{KeyTable, KeyUse};
use crate::cut_stage::{self, build_training_stage};
use crate::decoder::DecoderConfig;
use crate::error::ConfigError;
use crate::family::ModelFamily;
use crate::head_form::HeadForm;
use crate::hf::{self, ExportOptions, HfError, WeightType};
use crate::hybrid::HybridConfig;
use crate::llama::LlamaConfig;
use crate::nemotron_h::NemotronHConfig;
use crate::next_token::NextToken;
use crate::parameter::{Outline, ParameterSpec};
use crate::parameter_group::{self, ParameterGroup};
use crate::qwen2::Qwen2Config;
use crate::qwen3::Qwen3Config;
use crate::qwen3_moe::Qwen3MoeConfig;

/// The source of the parameters with which training starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InitialParameters {
    /// Random parameters that depend on a seed.
    Seed(u64),
    /// The parameters in a Hugging Face directory.
    Directory(PathBuf),
}

/// The source of the parameters of a trained model.
#[derive(Clone, Copy, Debug)]
pub enum ModelSource<'a> {
    /// A Hugging Face directory.
    Directory(&'a Path),
    /// A checkpoint.
    Checkpoint(&'a Checkpoint),
}

/// Builds the stage of `config` with `parts` parts of its head that holds `layers`. The last stage computes the loss.
fn training_stage<F: ModelFamily>(
    config: &F,
    parts: u32,
    layers: Range<usize>,
    initial: &InitialParameters,
    place: (&Device, &TensorParallel),
) -> Result<Stage, HfError> {
    match initial {
        InitialParameters::Seed(seed) => {
            Ok(build_training_stage(config, parts, layers, &mut config.initial(*seed), place)?)
        }
        InitialParameters::Directory(directory) => {
            build_training_stage(config, parts, layers, &mut hf::open_weights(directory, config)?, place)
        }
    }
}

/// Returns the parameters of a stage of `config` with `parts` parts of its head.
fn outline<F: ModelFamily>(
    config: &F,
    parts: u32,
    layers: Range<usize>,
    tensor: &TensorParallel,
) -> Result<Vec<ParameterSpec>, ConfigError> {
    let Some(form) = config.head().filter(|_| parts > 1) else { return config.split_outline(layers, tensor) };
    let mut outline = Outline::default();
    cut_stage::build(config, (form, parts), layers, &mut outline, (&Device::flex(), tensor))?;
    Ok(outline.specs)
}

/// Returns the global paths of the parameters of these groups.
fn group_paths<F: ModelFamily>(config: &F, groups: &[ParameterGroup]) -> Result<Vec<String>, ConfigError> {
    Ok(parameter_group::group_paths(&outline_of(config)?, groups))
}

/// Returns the module of the whole model, without the values of its parameters.
fn outline_of<F: ModelFamily>(config: &F) -> Result<F::Stage, ConfigError> {
    // The sequence length affects only costs.
    let layers = config.describe(1).layers.len();
    config.build_stage(0..layers, &mut Outline::default(), &Device::flex())
}

/// Builds the whole of `config`'s model for generation.
fn whole<F: ModelFamily + 'static>(
    config: &F,
    source: ModelSource<'_>,
    device: &Device,
) -> Result<Box<dyn NextToken>, HfError> {
    let config = config.for_generation();
    let layers = 0..config.describe(1).layers.len();
    Ok(Box::new(match source {
        ModelSource::Directory(directory) => hf::load_stage(directory, &config, layers, device)?,
        ModelSource::Checkpoint(checkpoint) => hf::restore_stage(checkpoint, &config, layers, device)?,
    }))
}

macro_rules! families {
    ($($(#[$doc:meta])* $variant:ident($config:ty),)*) => {
        /// The configuration of a model of any family.
        #[expect(clippy::large_enum_variant, reason = "a run has one configuration")]
        #[derive(Debug, Clone, PartialEq)]
        #[non_exhaustive]
        pub enum ModelConfig {
            $($(#[$doc])* $variant($config),)*
        }

        impl ModelConfig {
            /// The names by which [`ModelConfig::from_json`] finds a family.
            pub const MODEL_TYPES: &'static [&'static str] = &[$(<$config>::MODEL_TYPE),*];

            /// The table of keys of each family, in the order of [`ModelConfig::MODEL_TYPES`].
            const TABLES: &'static [&'static KeyTable] = &[$(<$config>::TABLE),*];

            /// The values of keys that a file of each family leaves out.
            const ABSENT: &'static [&'static [(&'static str, u32)]] = &[$(<$config>::ABSENT),*];

            /// Reads the configuration in a parsed `config.json`. The family is that of its `model_type`, or of its
            /// first architecture if there is no `model_type`.
            ///
            /// # Errors
            /// When [`ModelConfig::MODEL_TYPES`] does not contain the family, or as [`ModelFamily::from_json`].
            pub fn from_json(json: Value) -> Result<Self, ConfigError> {
                let name = family_name(&json).unwrap_or_default();
                $(if name == <$config>::MODEL_TYPE || name == <$config>::ARCHITECTURE {
                    return <$config>::from_json(json).map(Self::$variant);
                })*
                Err(Self::unknown(name, json.as_object().unwrap_or(&Map::new())))
            }

            /// Reads the configuration of a Hugging Face directory, or of a file `config.json`. [`ModelConfig::unknown_keys`]
            /// returns the keys of that file that nobody knows.
            ///
            /// # Errors
            /// When `config.json` cannot be read, or as [`ModelConfig::from_json`].
            pub fn read(dir: &Path) -> Result<Self, HfError> {
                hf::read_config(dir, |json| Self::from_json(Self::with_absent_keys(json)))
            }

            /// Makes the configuration of the family `model_type`, one of [`ModelConfig::MODEL_TYPES`]: `sizes`, the
            /// family's usual values, and in place of them the values of `keys`, which are named as in `config.json`.
            ///
            /// # Errors
            /// When there is no such family, when a key belongs to other families only, or as
            /// [`ModelFamily::from_json`].
            pub fn of_sizes(
                model_type: &str,
                sizes: DecoderConfig,
                keys: Map<String, Value>,
            ) -> Result<Self, ConfigError> {
                $(if model_type == <$config>::MODEL_TYPE {
                    let table = <$config>::TABLE;
                    if let Some(key) = keys.keys().find(|key| Self::is_foreign(table, &keys, key)) {
                        return Err(Self::foreign(key, model_type));
                    }
                    let mut json = <$config>::of_sizes(sizes).to_json();
                    if let Some(table) = json.as_object_mut() {
                        // `rope_theta` is written next to it, and `keys` may have `rope_scaling`.
                        table.remove("rope_parameters");
                        let replaced = REPLACED.iter().filter(|(key, _)| keys.contains_key(*key));
                        replaced.for_each(|(_, other)| drop(table.remove(*other)));
                        table.extend(keys);
                    }
                    return <$config>::from_json(json).map(Self::$variant);
                })*
                Err(Self::unknown(model_type, &keys))
            }

            /// Returns the name of the family with this `model_type` or class.
            pub fn family_of(name: &str) -> Option<&'static str> {
                $(if name == <$config>::MODEL_TYPE || name == <$config>::ARCHITECTURE {
                    return Some(<$config>::MODEL_TYPE);
                })*
                None
            }

            /// Returns the error of a key that `family` does not have.
            fn foreign(key: &str, family: &str) -> ConfigError {
                let mut families = Vec::new();
                $(if <$config>::TABLE.computes(key) {
                    families.push(<$config>::MODEL_TYPE);
                })*
                ConfigError::ForeignKey { key: key.to_owned(), family: family.to_owned(), families }
            }

            /// Returns the content of `config.json`; see [`ModelFamily::to_json`].
            pub fn to_json(&self) -> Value {
                match self {
                    $(Self::$variant(config) => config.to_json(),)*
                }
            }

            /// Returns the size of the vocabulary: token ids are below it.
            pub fn vocab_size(&self) -> usize {
                match self {
                    $(Self::$variant(config) => config.vocab_size(),)*
                }
            }

            /// Returns the layers in order; see [`ModelFamily::describe`].
            pub fn describe(&self, sequence: usize) -> ModelDesc {
                match self {
                    $(Self::$variant(config) => config.describe(sequence),)*
                }
            }

            /// Checks that the model takes these side inputs; see [`ModelFamily::check_side`].
            ///
            /// # Errors
            /// As [`ModelFamily::check_side`].
            pub fn check_side(&self, side: &SideRows, sequence: usize) -> Result<(), SideError> {
                match self {
                    $(Self::$variant(config) => config.check_side(side, sequence),)*
                }
            }

            /// Returns the first layer of each stage except the first, if the model has a pattern that says it.
            pub fn cuts(&self) -> Option<Vec<usize>> {
                match self {
                    $(Self::$variant(config) => config.cuts(),)*
                }
            }

            /// Returns the parameters of a stage, without their values; see [`ModelFamily::outline`].
            ///
            /// # Errors
            /// As [`ModelFamily::outline`].
            pub fn outline(&self, layers: Range<usize>) -> Result<Vec<ParameterSpec>, ConfigError> {
                match self {
                    $(Self::$variant(config) => config.outline(layers),)*
                }
            }

            /// As [`ModelConfig::outline`], for a rank that computes the stage together with others: with the shapes of
            /// its shards.
            ///
            /// # Errors
            /// As [`ModelConfig::outline`], and when a layer cannot be split over these ranks.
            pub fn split_outline(
                &self,
                layers: Range<usize>,
                tensor: &TensorParallel,
            ) -> Result<Vec<ParameterSpec>, ConfigError> {
                match self {
                    $(Self::$variant(config) => config.split_outline(layers, tensor),)*
                }
            }

            /// Returns the global paths of the parameters of these groups.
            ///
            /// # Errors
            /// As [`ModelFamily::outline`].
            pub fn group_paths(&self, groups: &[ParameterGroup]) -> Result<Vec<String>, ConfigError> {
                match self {
                    $(Self::$variant(config) => group_paths(config, groups),)*
                }
            }

            /// Returns why stages of the model cannot run slices of microbatches; `None` if they can
            /// ([`StageModule::refuses_slices`]).
            ///
            /// # Errors
            /// As [`ModelFamily::outline`].
            pub fn refuses_slices(&self) -> Result<Option<String>, ConfigError> {
                match self {
                    $(Self::$variant(config) => Ok(outline_of(config)?.refuses_slices()),)*
                }
            }

            /// Builds the stage that holds `layers`, for training on `device`. The last stage computes the loss.
            ///
            /// # Errors
            /// As [`ModelFamily::init_stage`] and [`hf::load_stage`].
            pub fn training_stage(
                &self,
                layers: Range<usize>,
                initial: &InitialParameters,
                device: &Device,
            ) -> Result<Stage, HfError> {
                self.split_training_stage(layers, initial, device, &TensorParallel::default())
            }

            /// As [`ModelConfig::training_stage`], for a rank that computes the stage together with others.
            ///
            /// # Errors
            /// As [`ModelConfig::training_stage`], and when a layer cannot be split over these ranks.
            pub fn split_training_stage(
                &self,
                layers: Range<usize>,
                initial: &InitialParameters,
                device: &Device,
                tensor: &TensorParallel,
            ) -> Result<Stage, HfError> {
                self.cut_stage(1, layers, initial, (device, tensor))
            }

            /// Returns the last norm and the head, if the head can be cut.
            pub(crate) fn head(&self) -> Option<HeadForm> {
                match self {
                    $(Self::$variant(config) => config.head(),)*
                }
            }

            /// As [`ModelConfig::split_training_stage`], with the head in `parts` parts.
            pub(crate) fn cut_stage(
                &self,
                parts: u32,
                layers: Range<usize>,
                initial: &InitialParameters,
                place: (&Device, &TensorParallel),
            ) -> Result<Stage, HfError> {
                match self {
                    $(Self::$variant(config) => training_stage(config, parts, layers, initial, place),)*
                }
            }

            /// As [`ModelConfig::split_outline`], with the head in `parts` parts.
            pub(crate) fn cut_outline(
                &self,
                parts: u32,
                layers: Range<usize>,
                tensor: &TensorParallel,
            ) -> Result<Vec<ParameterSpec>, ConfigError> {
                match self {
                    $(Self::$variant(config) => outline(config, parts, layers, tensor),)*
                }
            }

            /// Builds the whole model for generation ([`crate::generation::generate`]), on `device`.
            ///
            /// # Errors
            /// As [`hf::load_stage`] and [`hf::restore_stage`].
            pub fn whole(&self, source: ModelSource<'_>, device: &Device) -> Result<Box<dyn NextToken>, HfError> {
                match self {
                    $(Self::$variant(config) => whole(config, source, device),)*
                }
            }

            /// Writes the model of a checkpoint as a Hugging Face directory; see [`hf::export`].
            ///
            /// # Errors
            /// As [`hf::export`].
            pub fn export(
                &self,
                checkpoint: &Checkpoint,
                options: &ExportOptions<'_>,
                dir: &Path,
            ) -> Result<WeightType, HfError> {
                match self {
                    $(Self::$variant(config) => hf::export(checkpoint, config, options, dir),)*
                }
            }
        }
    };
}

/// Keys that say the same as others, which have the usual values of a family and must not contradict them.
const REPLACED: [(&str, &str); 3] = [
    ("hybrid_override_pattern", "layers_block_type"),
    ("num_local_experts", "num_experts"),
    ("attention_head_dim", "head_dim"),
];

/// Words in the keys and the names of models with experts, and of models with state spaces.
const PARTS: [&[&str]; 2] = [&["expert", "moe"], &["mamba", "ssm"]];

/// Returns whether a model whose name and keys are `words` has each of [`PARTS`].
fn parts<W: AsRef<str>>(words: impl Iterator<Item = W>) -> [bool; 2] {
    let mut found = [false; 2];
    for word in words {
        for (found, names) in found.iter_mut().zip(PARTS) {
            *found |= names.iter().any(|name| word.as_ref().contains(name));
        }
    }
    found
}

impl ModelConfig {
    /// Returns the names of the families whose head can be cut into parts.
    pub(crate) fn families_with_parts() -> Vec<&'static str> {
        let model = |name: &str| Self::of_sizes(name, DecoderConfig::new(8, 2), Map::new());
        let has_parts = |name: &&str| model(name).is_ok_and(|model| model.head().is_some());
        Self::MODEL_TYPES.iter().copied().filter(has_parts).collect()
    }

    /// Returns the table of a family's keys.
    fn table(family: &str) -> Option<&'static KeyTable> {
        let place = Self::MODEL_TYPES.iter().position(|known| *known == family)?;
        Some(Self::TABLES[place])
    }

    /// Returns whether only other families compute with a key, and its value does not turn it off.
    fn is_foreign(table: &KeyTable, keys: &Map<String, Value>, key: &str) -> bool {
        let is_of_others = !table.computes(key) && Self::TABLES.iter().any(|other| other.computes(key));
        let is_refused = || table.refused(keys).iter().any(|refused| refused.key == key);
        is_of_others && (table.use_of(key).is_none() || is_refused())
    }

    /// Returns whether any family knows a key of `config.json`, even if the key has no effect or is refused.
    pub fn is_known_key(key: &str) -> bool {
        Self::TABLES.iter().any(|table| table.use_of(key).is_some())
    }

    /// Returns what a key of `config.json` means for the family `model_type`; `None` if the family does not know it.
    pub fn key_use(model_type: &str, key: &str) -> Option<KeyUse> {
        Self::table(model_type)?.use_of(key)
    }

    /// Returns the keys of the `config.json` of a directory that no table of keys lists, and whose effect is unknown. Keys with
    /// the names of parts of a computation are refused instead ([`ModelConfig::read`]).
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn unknown_keys(dir: &Path) -> Result<Vec<String>, HfError> {
        hf::read_config(dir, |json| {
            let family = family_name(&json).unwrap_or_default();
            Ok(Self::family_of(family)
                .and_then(Self::table)
                .map_or_else(Vec::new, |table| table.unknown_keys(&json)))
        })
    }

    /// Returns a file's keys with the values that transformers assumes for those that the file leaves out.
    fn with_absent_keys(mut json: Value) -> Value {
        let family = family_name(&json).and_then(Self::family_of);
        let place = family.and_then(|family| Self::MODEL_TYPES.iter().position(|known| *known == family));
        if let (Some(place), Some(keys)) = (place, json.as_object_mut()) {
            for (key, value) in Self::ABSENT[place] {
                keys.entry(*key).or_insert_with(|| (*value).into());
            }
        }
        json
    }

    /// Returns the error of a model of an unknown family, whose `config.json` has these keys. The nearest family has
    /// the parts of the model and the fewest others; among equals, its name is the most similar.
    fn unknown(found: &str, json: &Map<String, Value>) -> ConfigError {
        let name = found.strip_suffix("ForCausalLM").unwrap_or(found).to_lowercase();
        let wanted = parts(json.keys().cloned().chain([name.clone()]));
        let likeness = |(family, table): &(&'static str, &'static KeyTable)| {
            let own = parts(table.computed_keys());
            let points = own.iter().zip(&wanted).map(|pair| match pair {
                (true, true) => 3u8,
                (false, false) => 1,
                _ => 0,
            });
            f64::from(points.sum::<u8>()) + strsim::jaro_winkler(&name, family)
        };
        let families = Self::MODEL_TYPES.iter().copied().zip(Self::TABLES.iter().copied());
        let nearest = families.max_by(|one, other| likeness(one).total_cmp(&likeness(other)));
        ConfigError::UnknownFamily {
            found: found.into(),
            nearest: nearest.map_or("", |(family, _)| family),
            refused: nearest.map_or_else(Vec::new, |(_, table)| table.refused(json)),
            known: Self::MODEL_TYPES,
        }
    }
}

families! {
    /// Llama: rotary positions, grouped-query attention, RMSNorm, SwiGLU.
    Llama(LlamaConfig),
    /// Qwen2: Llama with biases on queries, keys and values.
    Qwen2(Qwen2Config),
    /// Qwen3: Llama with a normalisation of each head's queries and keys.
    Qwen3(Qwen3Config),
    /// Qwen3-MoE: Qwen3 with a mixture of experts in some layers.
    Qwen3Moe(Qwen3MoeConfig),
    /// Nemotron-H: Mamba-2, attention, feed-forward layers and experts by a pattern.
    NemotronH(NemotronHConfig),
    /// Attention, Mamba-2, experts and feed-forward layers by a pattern, with documents, windows and further
    /// embeddings.
    Hybrid(HybridConfig),
}

fn family_name(json: &Value) -> Option<&str> {
    let model_type = json.get("model_type").and_then(Value::as_str);
    model_type.or_else(|| json.get("architectures")?.get(0)?.as_str())
}
