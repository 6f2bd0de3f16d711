//! The model of a plan for a cluster: a `config.json`, or the model of a configuration for `train`.

use std::path::{Path, PathBuf};

use pipewright_cluster::hf_config::{self, Described};
use pipewright_system::bounded_file::{SMALL_TEXT, read_text};

use crate::failure::Failure;

/// A model, and what its file says about the run.
#[derive(Debug)]
pub(crate) struct PlannedModel {
    /// The model, and what was not understood.
    pub(crate) described: Described,
    /// The tokens of a row, if the file is a configuration for `train`.
    pub(crate) sequence: Option<u32>,
    /// The rows of a step, if the file is a configuration for `train`.
    pub(crate) batch: Option<u32>,
}

/// Reads the model that a path means: a `config.json`, a folder with one, or a configuration for `train`.
///
/// # Errors
/// When the file cannot be read, or does not describe a model.
pub(crate) fn read(path: &Path) -> Result<PlannedModel, Failure> {
    if path.extension().is_some_and(|extension| extension == "toml") {
        return of_configuration(path);
    }
    Ok(PlannedModel { described: of_json(&json_file(path))?, sequence: None, batch: None })
}

fn json_file(path: &Path) -> PathBuf {
    if path.is_dir() { path.join("config.json") } else { path.to_owned() }
}

fn of_json(path: &Path) -> Result<Described, Failure> {
    let shown = path.display();
    let text = read_text(path, hf_config::MAX_FILE as u64)
        .map_err(|error| Failure::input(format!("{shown}: cannot read the model: {error}")))?;
    hf_config::read(&text).map_err(|error| Failure::input(format!("{shown}: {error}")))
}

/// Reads the model of a configuration: the `config.json` of `model.from`, or the keys of `[model]`, which have
/// the same names.
fn of_configuration(path: &Path) -> Result<PlannedModel, Failure> {
    let shown = path.display();
    let failed = |error: &dyn std::fmt::Display| Failure::input(format!("{shown}: {error}"));
    let text = read_text(path, SMALL_TEXT).map_err(|error| failed(&error))?;
    let table: toml::Table = toml::from_str(&text).map_err(|error| failed(&error.message()))?;
    let section = |name: &str| table.get(name).and_then(toml::Value::as_table);
    let model = section("model")
        .ok_or_else(|| failed(&"there is no [model]; name a configuration for `train`, or a config.json"))?;
    let described = match model.get("from").and_then(toml::Value::as_str) {
        Some(from) => of_json(&json_file(&path.parent().unwrap_or(Path::new("")).join(from)))?,
        None => {
            let mut keys = model.clone();
            if let Some(architecture) = keys.remove("architecture") {
                keys.insert("model_type".to_owned(), architecture);
            }
            let keys = serde_json::to_string(&keys).map_err(|error| failed(&error))?;
            hf_config::read(&keys).map_err(|error| failed(&format!("[model]: {error}")))?
        }
    };
    let number = |name: &str, key: &str| {
        let value = section(name)?.get(key)?.as_integer()?;
        u32::try_from(value).ok()
    };
    let rows = number("pipeline", "microbatches")
        .and_then(|count| count.checked_mul(number("pipeline", "microbatch_size").unwrap_or(1)));
    Ok(PlannedModel { described, sequence: number("data", "seq_len"), batch: rows })
}
