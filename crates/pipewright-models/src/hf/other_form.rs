//! Models in a form that cannot be read: how they are recognised, and what a user can do.

use std::fmt;
use std::fs;
use std::path::Path;

use pipewright::bounded_file::{SMALL_TEXT, read_regular, without_mark};
use serde_json::Value;

use super::layout::CONFIG;

/// The file of an adapter that describes it.
pub(super) const ADAPTER: &str = "adapter_config.json";
/// The beginnings of the names of files in which trainers store other things than a model.
const TRAINER_FILES: [&str; 5] = ["training_args", "optimizer", "scheduler", "scaler", "rng_state"];

/// A model in a form that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OtherForm {
    /// The path does not exist, and its last two parts may be the name of a model on the Hugging Face hub.
    OnHub {
        /// That name.
        name: String,
    },
    /// Several models in GGUF.
    Gguf,
    /// An adapter of PEFT, which has only differences from another model.
    Adapter {
        /// The other model, if the adapter names it.
        base: Option<String>,
    },
    /// Weights in the form of their authors, with other names of the tensors.
    Consolidated,
    /// Weights as a Python pickle.
    Pickled {
        /// The file.
        file: String,
    },
    /// Weights of another library.
    OtherLibrary {
        /// The file.
        file: String,
    },
    /// A file with weights instead of its folder.
    File,
    /// A folder without a `config.json`.
    NoConfig,
}

impl fmt::Display for OtherForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const CONVERT: &str =
            "load the model with transformers, and write it with `model.save_pretrained(DIR)`";
        match self {
            Self::OnHub { name } => write!(
                f,
                "there is no such folder; if `{name}` is a model on the Hugging Face hub, download it (`hf download {name} --local-dir \
                 DIR`) and name that folder"
            ),
            Self::Gguf => write!(
                f,
                "the folder has GGUF files of several models, or a part of one: name the file of a model, or the first of its \
                 files"
            ),
            Self::Adapter { base } => write!(
                f,
                "this is a PEFT adapter, which has only differences from {}: to train it on, name that model as `model.from` and \
                 this folder as `adapter.path`; otherwise merge them (`model.merge_and_unload()` of PEFT, then `save_pretrained`) and \
                 name the merged model",
                base.as_ref().map_or_else(|| "another model".to_owned(), |base| format!("`{base}`"))
            ),
            Self::Consolidated => write!(
                f,
                "the weights are in the form of their authors (consolidated), whose tensors have other names: use the files named \
                 `model*.safetensors` of the same model, or convert the weights with the script of its family in transformers"
            ),
            Self::Pickled { file } => write!(
                f,
                "the weights are a Python pickle (`{file}`), which is not read, because it can run any program: {CONVERT}"
            ),
            Self::OtherLibrary { file } => {
                write!(f, "the weights belong to another library (`{file}`): {CONVERT}")
            }
            Self::File => {
                write!(f, "this is a file with weights: name its folder, which also has the `{CONFIG}`")
            }
            Self::NoConfig => write!(f, "the folder has no `{CONFIG}`; name the folder of a model"),
        }
    }
}

/// Returns whether a trainer stores other things than a model in a file of this name.
pub(super) fn is_of_trainer(name: &str) -> bool {
    !name.ends_with(".safetensors") && TRAINER_FILES.iter().any(|start| name.starts_with(start))
}

/// Returns the names of the files in the folder that converters to ONNX write in the folder of a model.
pub(super) fn onnx_names(dir: &Path) -> Vec<String> {
    names(&dir.join("onnx"))
}

/// Returns the names of the files in a folder, in order.
pub(super) fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_unstable();
    names
}

/// Returns the form of a model that is not a directory of transformers with safetensors, if it is known.
pub(super) fn other_form(path: &Path) -> Option<OtherForm> {
    if !path.exists() {
        return hub_name(path).map(|name| OtherForm::OnHub { name });
    }
    let ends = |name: &str, ending: &str| Path::new(name).extension().is_some_and(|found| found == ending);
    if path.is_file() {
        let name = path.file_name()?.to_string_lossy();
        return if ends(&name, "safetensors") { Some(OtherForm::File) } else { pickled(&name) };
    }
    let names = names(path);
    if names.iter().any(|name| name == ADAPTER) {
        return Some(OtherForm::Adapter { base: base_of(path) });
    }
    if names.iter().any(|name| name.starts_with("consolidated")) {
        return Some(OtherForm::Consolidated);
    }
    if names.iter().any(|name| ends(name, "gguf")) {
        return Some(OtherForm::Gguf);
    }
    names.iter().chain(&onnx_names(path)).find_map(|name| pickled(name))
}

/// Returns the form of a file of weights in a format that is not read.
fn pickled(file: &str) -> Option<OtherForm> {
    let ending = Path::new(file).extension()?.to_str()?;
    let is_pickled = matches!(ending, "bin" | "pt" | "pth" | "ckpt") && !is_of_trainer(file);
    let file = file.to_owned();
    match ending {
        _ if is_pickled => Some(OtherForm::Pickled { file }),
        "h5" | "msgpack" | "onnx" => Some(OtherForm::OtherLibrary { file }),
        _ => None,
    }
}

/// Returns the model from which an adapter differs.
fn base_of(dir: &Path) -> Option<String> {
    let text = read_regular(&dir.join(ADAPTER), SMALL_TEXT).ok()?;
    let settings: Value = serde_json::from_slice(without_mark(&text)).ok()?;
    Some(settings["base_model_name_or_path"].as_str()?.to_owned())
}

/// Returns the last parts of a path that does not exist if they may be the name of a model on the hub, such
/// as `meta-llama/Llama-3.2-1B`. In a folder that exists, a missing model is a mistake in the path.
fn hub_name(path: &Path) -> Option<String> {
    let parent = path.parent().filter(|parent| !parent.is_dir())?;
    let (name, owner) = (path.file_name()?.to_str()?, parent.file_name()?.to_str()?);
    let is_name = |part: &str| part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
    (is_name(name) && is_name(owner)).then(|| format!("{owner}/{name}"))
}
