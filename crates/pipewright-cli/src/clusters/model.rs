//! The model of a plan for a cluster: a `config.json`, or the model of a configuration for `train`.

use std::path::Path;

use pipewright_cluster::hf_config::{self, Described};
use pipewright_models::hf;
use pipewright_system::bounded_file::read_text;

use crate::clusters::adapters::{self, PlannedAdapters};
use crate::clusters::toml_file::unreadable;
use crate::config::model::ModelSettings;
use crate::failure::Failure;
use crate::training::arguments::load_settings;

/// A model, and what its file says about the run.
#[derive(Debug)]
pub(crate) struct PlannedModel {
    /// The model, and what was not understood.
    pub(crate) described: Described,
    /// The tokens of a row, if the file is a configuration for `train`.
    pub(crate) sequence: Option<u32>,
    /// The rows of a step, if the file is a configuration for `train`.
    pub(crate) batch: Option<u32>,
    /// The adapters that a configuration trains in place of the model.
    pub(crate) adapters: Option<PlannedAdapters>,
}

/// Reads the model that a path means: a `config.json`, a folder with one, or a configuration for `train`,
/// which `set` overrides. `set` alone overrides the built-in sample.
///
/// # Errors
/// When a file cannot be read, or does not describe a model, the configuration has a mistake, or its
/// adapters do not fit the model.
pub(crate) fn read(path: Option<&Path>, set: &[String]) -> Result<PlannedModel, Failure> {
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
        (path, _) => of_configuration(path, set),
    }
}

fn is_configuration(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "toml")
}

/// Reads a `config.json`, or the `config.json` of a folder: the cache folder of a model has it in a snapshot.
/// `advice` is for a file that does not exist.
fn of_model(path: &Path, advice: &str) -> Result<Described, Failure> {
    let file = if path.is_dir() {
        hf::resolve(path).map_err(Failure::input)?.join("config.json")
    } else {
        path.to_owned()
    };
    let text = read_text(&file, hf_config::MAX_FILE as u64)
        .map_err(|error| unreadable(&file, "the model", &error, advice))?;
    hf_config::read(&text).map_err(|error| Failure::input(format!("{}: {error}", file.display())))
}

/// Reads the model, the rows and the batch of a configuration. A model of `model.from` may be of a family
/// that `train` does not know.
fn of_configuration(path: Option<&Path>, set: &[String]) -> Result<PlannedModel, Failure> {
    let settings = load_settings(path, set)?.settings;
    let described = match &settings.model {
        ModelSettings::From { from } => of_model(from, "correct model.from")?,
        ModelSettings::Fresh(model) => {
            let keys = model.config().to_json().to_string();
            hf_config::read(&keys).map_err(|error| Failure::input(format!("[model]: {error}")))?
        }
    };
    let rows = settings.pipeline.rows();
    let batch = u32::try_from(rows).map_err(|_| {
        Failure::input(format!("the step of the configuration has {rows} rows; use at most {}", u32::MAX))
    })?;
    let adapters = match (&settings.model, &settings.adapter) {
        (ModelSettings::From { from }, Some(adapter)) => {
            let folder = hf::resolve(from).map_err(Failure::input)?;
            Some(adapters::read(&folder, &settings, adapter)?)
        }
        _ => None,
    };
    Ok(PlannedModel { described, sequence: Some(settings.data.seq_len), batch: Some(batch), adapters })
}
