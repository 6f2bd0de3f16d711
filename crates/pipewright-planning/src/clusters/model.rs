//! The model of a plan for a cluster: a `config.json`, or the model of a configuration for `train`.

use std::path::Path;

use pipewright_gguf::container::locate;
use pipewright_gguf::files;
use pipewright_shapes::reader::{self, Described};
use pipewright_system::bounded_file::read_text;
use pipewright_system::model_folder::snapshot;

use crate::clusters::machine::unreadable;
use crate::configurations::{Configurations, PlannedModel};
use crate::failure::Failure;

/// Reads the model that a path means: a `config.json`, a folder with one, or a configuration for `train`,
/// which `set` overrides. `set` alone overrides the built-in sample.
///
/// # Errors
/// When a file cannot be read, or does not describe a model, the configuration has a mistake, or its
/// adapters do not fit the model.
pub(crate) fn read(
    path: Option<&Path>,
    set: &[String],
    configurations: &dyn Configurations,
) -> Result<PlannedModel, Failure> {
    match (path, set.first()) {
        (None, None) => {
            Err(Failure::input("--cluster needs a model; name a config.json, its folder, or a configuration"))
        }
        (Some(path), Some(key)) if !is_configuration(path) => Err(Failure::input(format!(
            "--set {key}: {} is a model, and has no keys of a configuration; leave --set out, or name a configuration",
            path.display()
        ))),
        (Some(path), None) if !is_configuration(path) => {
            let advice = "name a config.json, its folder, or a configuration";
            Ok(PlannedModel {
                described: of_model(path, advice)?,
                sequence: None,
                batch: None,
                adapters: None,
            })
        }
        (path, _) => configurations.model(path, set),
    }
}

fn is_configuration(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "toml")
}

/// Reads a `config.json`, or the `config.json` of a folder: the cache folder of a model has it in a snapshot.
/// `advice` is for a file that does not exist.
///
/// # Errors
/// When the file cannot be read, or does not describe a model.
pub fn of_model(path: &Path, advice: &str) -> Result<Described, Failure> {
    let file = if path.is_dir() {
        snapshot(path).map_err(Failure::input)?.join("config.json")
    } else {
        path.to_owned()
    };
    let folder = if path.is_dir() { file.parent().unwrap_or(path) } else { path };
    let (file, text) = match locate(folder) {
        Some(gguf) => {
            let file = gguf.join("config.json");
            let text = files::read(&file, reader::MAX_FILE as u64);
            (file, text.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()))
        }
        None => {
            let text = read_text(&file, reader::MAX_FILE as u64);
            (file, text)
        }
    };
    let text = text.map_err(|error| unreadable(&file, "the model", &error, advice))?;
    reader::read(&text).map_err(|error| Failure::input(format!("{}: {error}", file.display())))
}
