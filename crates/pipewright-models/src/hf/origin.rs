//! The files of a model's original directory that belong to the model but not to its training: the tokenizer,
//! the settings of generation, and the keys of `config.json` that do not affect the results.
//!
//! [`keep_origin`] copies them when a run starts, because the original directory may be gone when the run's
//! model is exported; [`super::export`] puts them into the exported directory.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use pipewright::bounded_file::{refuse_special, require_regular, write_regular};
use pipewright::train::data::{SpecialTokens, Tokenizer, TokenizerFile};
use pipewright_gguf::files;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::directory::{is_config_alone, is_gguf, resolve};
use super::json_file::read_json;
use super::layout::CONFIG;
use super::weight_type::WeightType;
use super::weights::{Weights, file_names_of};
use crate::error::ModelError;
use crate::parameter::ParameterSpec;
use pipewright_shapes::key_table::is_dropout;

/// The file name of a tokenizer.
pub const TOKENIZER: &str = "tokenizer.json";

/// The settings of generation.
const GENERATION: &str = "generation_config.json";

/// The files that are copied unchanged if the directory has them.
const COPIED: [&str; 11] = [
    GENERATION,
    TOKENIZER,
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
];

/// Returns whether the folder of [`keep_origin`] may have a file of this name.
pub fn is_origin_file(name: &str) -> bool {
    COPIED.contains(&name) || [CONFIG, WEIGHT_TYPES].contains(&name)
}

/// Keys of `config.json` that would be wrong with other weights: the element type under its old name, the
/// compression of the original weights, code of the original directory, that directory's name, and the number of labels, which
/// `id2label` says, with their kind.
const DROPPED: [&str; 7] = [
    "torch_dtype",
    "quantization_config",
    "compression_config",
    "auto_map",
    "_name_or_path",
    "num_labels",
    "problem_type",
];

/// Copies the files that an export needs from the model directory `from` into the folder `to`, which is
/// created.
///
/// # Errors
/// When the system reports an error.
pub fn keep_origin(from: &Path, to: &Path) -> Result<(), ModelError> {
    fs::create_dir_all(to).map_err(ModelError::io("create", to))?;
    let from = &resolve(from)?;
    if from.is_file() && !is_gguf(from) {
        let target = to.join(CONFIG);
        return fs::copy(from, &target).map(drop).map_err(ModelError::io("copy", from));
    }
    copy(from, to, CONFIG)?;
    copy_files(from, to)?;
    if is_config_alone(from) {
        return Ok(());
    }
    WeightTypes::of_directory(from)?.write(to)
}

/// Writes keys of a model without an original directory, which its export adds to its `config.json`, into the
/// folder `to`.
///
/// # Errors
/// When the system reports an error.
pub fn keep_keys(keys: &Map<String, Value>, to: &Path) -> Result<(), ModelError> {
    fs::create_dir_all(to).map_err(ModelError::io("create", to))?;
    let path = to.join(CONFIG);
    fs::write(&path, json!(keys).to_string()).map_err(ModelError::io("write", &path))
}

/// The tokens that begin and end a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TextEnds {
    /// The id that begins a text.
    pub bos: Option<u64>,
    /// The id that ends a text.
    pub eos: Option<u64>,
}

/// Returns the tokens that begin and end a text according to the files next to a tokenizer. A token
/// that no file names, or whose id the tokenizer does not have, is not returned. Bytes have none.
pub fn text_ends(tokenizer: &Tokenizer) -> TextEnds {
    let Some(file) = tokenizer.file() else { return TextEnds::default() };
    let tokens = SpecialTokens::beside(file).unwrap_or_default();
    let added = if let Tokenizer::Extended(_, added) = tokenizer { &added[..] } else { &[] };
    let id = |name| match added.iter().position(|added| Some(&**added) == tokens.text(name)) {
        // Added tokens have the next ids.
        Some(index) => TokenizerFile::read(file).ok().map(|file| (file.size() + index) as u64),
        None => tokens.id(name).ok().flatten(),
    };
    TextEnds { bos: id("bos_token"), eos: id("eos_token") }
}

/// Returns the tokens that end a text: the tokens that `generation_config.json` and `config.json` name as
/// `eos_token_id`, one or a list, and the one that ends completions, which `tokenizer` names, or by default the tokenizer in
/// the directory. Files that do not exist name none.
///
/// # Errors
/// When a file cannot be read or is not JSON.
pub fn end_tokens(dir: &Path, tokenizer: Option<&Tokenizer>) -> Result<Vec<u32>, ModelError> {
    let dir = resolve(dir)?;
    let own = Tokenizer::File(dir.join(TOKENIZER));
    let mut ends: Vec<u64> = text_ends(tokenizer.unwrap_or(&own)).eos.into_iter().collect();
    for path in [GENERATION, CONFIG].map(|name| dir.join(name)).into_iter().filter(|path| files::exists(path))
    {
        let settings: Value = read_json(&path)?;
        match &settings["eos_token_id"] {
            Value::Array(ids) => ends.extend(ids.iter().filter_map(Value::as_u64)),
            id => ends.extend(id.as_u64()),
        }
    }
    ends.sort_unstable();
    ends.dedup();
    Ok(ends.into_iter().filter_map(|id| u32::try_from(id).ok()).collect())
}

/// Copies the files that are kept unchanged.
pub(super) fn copy_files(from: &Path, to: &Path) -> Result<(), ModelError> {
    COPIED.iter().try_for_each(|name| copy(from, to, name))
}

/// Copies a file if it exists.
fn copy(from: &Path, to: &Path, name: &str) -> Result<(), ModelError> {
    let (source, target) = (from.join(name), to.join(name));
    if is_gguf(from) {
        if !files::exists(&source) {
            return Ok(());
        }
        let content = files::read(&source, u64::MAX).map_err(ModelError::io("read", &source))?;
        return write_regular(&target, &content).map_err(ModelError::io("write", &target));
    }
    match require_regular(&source) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        result => result.map_err(ModelError::io("read", &source))?,
    };
    refuse_special(&target).map_err(ModelError::io("write", &target))?;
    fs::copy(&source, &target).map(drop).map_err(ModelError::io("copy", &source))
}

/// Returns `ours`, with the keys of the `config.json` in `origin` that `ours` does not have, and its dropout,
/// which does not change what the weights mean. A model whose file leaves dropout out keeps what other
/// programs then assume. `key_names` are other names of keys, each with the name that
/// it stands for.
pub(super) fn with_original_keys(
    mut ours: Value,
    origin: &Path,
    key_names: &[(&str, &str)],
) -> Result<Value, ModelError> {
    let path = origin.join(CONFIG);
    if !files::exists(&path) {
        return Ok(ours);
    }
    let original: Map<String, Value> = read_json(&path)?;
    if let Some(keys) = ours.as_object_mut() {
        // A file of [`keep_keys`] describes no model, and says nothing about dropout.
        if ["model_type", "architectures"].iter().any(|key| original.contains_key(*key)) {
            keys.retain(|key, _| !is_dropout(key) || original.contains_key(key));
        }
        for (key, value) in original {
            let has_other_name =
                key_names.iter().any(|(other, name)| *name == key && keys.contains_key(*other));
            if is_dropout(&key) {
                keys.insert(key, value);
            } else if !DROPPED.contains(&key.as_str()) && !has_other_name {
                keys.entry(key).or_insert(value);
            }
        }
    }
    Ok(ours)
}

/// The element types of a model's tensors.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WeightTypes {
    /// The type of most tensors, which `config.json` names.
    pub default: WeightType,
    /// The tensors with another type, under the names that the files have. Models with half precision may
    /// keep some of them in single precision.
    pub others: BTreeMap<String, WeightType>,
}

/// The file in a run's folder that says which types the original model has.
const WEIGHT_TYPES: &str = "weight_types.json";

impl WeightTypes {
    /// Returns one type for all tensors.
    pub fn all(default: WeightType) -> Self {
        Self { default, others: BTreeMap::new() }
    }

    /// Returns the type of a parameter, in whatever tensor the original files have it.
    pub(super) fn of(&self, parameter: &ParameterSpec) -> WeightType {
        let names = parameter.tensors().flat_map(file_names_of);
        let other = names.into_iter().find_map(|name| self.others.get(&*name).copied());
        other.unwrap_or(self.default)
    }

    /// Returns the types of the tensors in a model directory, and as the default the type of most of them, or of most of the
    /// quantised matrices if there are some. Other types count as single precision.
    pub(super) fn of_directory(dir: &Path) -> Result<Self, ModelError> {
        let mut weights = Weights::open(dir)?;
        let types = weights.types()?;
        // A quantised matrix has many times as many elements as the vectors next to it.
        let has_quantised = !weights.parts_of_quantised().is_empty();
        let count = |kind: &WeightType| match (has_quantised, kind) {
            (true, WeightType::Bfloat16) => usize::MAX,
            _ => types.values().filter(|other| *other == kind).count(),
        };
        let default = WeightType::ALL.into_iter().max_by_key(count).unwrap_or_default();
        Ok(Self { default, others: types.into_iter().filter(|(_, kind)| *kind != default).collect() })
    }

    /// Reads the types that [`WeightTypes::write`] wrote; single precision if there is no such file.
    pub(super) fn read(folder: &Path) -> Result<Self, ModelError> {
        let path = folder.join(WEIGHT_TYPES);
        if path.is_file() { read_json(&path) } else { Ok(Self::default()) }
    }

    pub(super) fn write(&self, folder: &Path) -> Result<(), ModelError> {
        let path = folder.join(WEIGHT_TYPES);
        let text = serde_json::json!(self).to_string();
        fs::write(&path, text).map_err(ModelError::io("write", &path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parameter::ParameterKind;

    /// Other programs assume dropout for a GPT-2 whose file leaves it out.
    #[test]
    fn the_dropout_of_the_original_is_kept_also_where_it_is_left_out() {
        let folder = tempfile::tempdir().expect("a folder");
        let check = |original: Value, expected: Value| {
            fs::write(folder.path().join(CONFIG), original.to_string()).expect("it is writable");
            let ours = json!({"model_type": "gpt2", "embd_pdrop": 0.0, "attn_pdrop": 0.0});
            assert_eq!(with_original_keys(ours, folder.path(), &[]).expect("it is read"), expected);
        };
        let published = json!({"model_type": "gpt2", "attn_pdrop": 0.2});
        check(published.clone(), published);
        // The keys of a model that was not made from a file.
        let of_fresh = json!({"model_type": "gpt2", "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 3});
        check(json!({"bos_token_id": 3}), of_fresh);
    }

    #[test]
    fn a_type_is_found_under_every_name_of_files() {
        let check = |stored: &str, parameter: &str| {
            let others = BTreeMap::from([(stored.to_owned(), WeightType::Float32)]);
            let types = WeightTypes { default: WeightType::Bfloat16, others };
            let spec = |path: &str| ParameterSpec::new(path.to_owned(), vec![1], ParameterKind::Scale);
            assert_eq!(types.of(&spec(parameter)), WeightType::Float32, "{stored}");
            assert_eq!(types.of(&spec("model.other.weight")), WeightType::Bfloat16);
        };
        check("model.norm.weight", "model.norm.weight");
        check("norm.weight", "model.norm.weight");
        check("backbone.layers.0.mixer.A_log", "backbone.layers.0.mixer.A_log");
        check("model.layers.0.mixer.A_log", "backbone.layers.0.mixer.A_log");
        check("layers.0.mixer.A_log", "backbone.layers.0.mixer.A_log");
    }
}
