//! The identity of a run. In its checkpoints, it is the model, the adapters, the loss of preference training and the data, because everything else may
//! change when the run is resumed. Among the processes of a run, it is everything that must be equal.

use std::collections::BTreeSet;
use std::path::Path;

use pipewright::checkpoint::Checkpoint;
use pipewright::transport::Fields;
use pipewright_gguf::container::are_parts;
use pipewright_models::InitialParameters;
use serde_json::{Map, Value, json};

use crate::error::RunError;
use crate::settings::preference::PreferenceSettings;
use crate::settings::{Settings, may_differ};
use crate::training::exact;
use crate::training::prepare::Prepared;
use crate::training::run_adapter::ADAPTER;

/// The key of the description that holds the content of the model's `config.json`.
pub const MODEL: &str = "model";
const DATA: &str = "data";
const PREFERENCE: &str = "preference";
/// The key of the description that holds the last step's loss.
pub(crate) const LOSS: &str = "loss";

/// Returns the description of a run, and identifies its validation data. May read all data once.
pub(crate) fn describe(prepared: &Prepared) -> Result<Map<String, Value>, RunError> {
    prepared.identify_validation().map_err(RunError::input)?;
    let data = prepared.rows.identity().map_err(RunError::input)?;
    let (model, data) = (prepared.model.to_json(), json!(data));
    let adapter = prepared.adapter.clone().map(|adapter| (ADAPTER.to_owned(), adapter));
    let preference = prepared.settings.preference.clone().map(|preference| {
        // A file with the reference has no effect on the run.
        let description = json!(PreferenceSettings { reference: None, ..preference });
        (PREFERENCE.to_owned(), serde_json::from_str(&description.to_string()).unwrap_or(description))
    });
    let parts = [(MODEL.to_owned(), model), (DATA.to_owned(), data)];
    Ok(parts.into_iter().chain(adapter).chain(preference).collect())
}

/// Returns the fields that must be equal in all processes of a run with this `description`. Paths may differ,
/// because files may be in different folders on different machines.
pub(crate) fn identity(prepared: &Prepared, description: &Map<String, Value>) -> Fields {
    let mut fields = shared_settings(&prepared.settings);
    fields.extend(description.iter().map(|(part, content)| (part.clone(), content.to_string())));
    fields.extend(exact::order_of_products(&prepared.settings.run));
    let files = match &prepared.initial {
        InitialParameters::Directory { path: folder, .. } => weight_files(folder),
        _ => String::new(),
    };
    fields.insert("files of the weights".to_owned(), files);
    if let Some(adapter) = &prepared.start_of_adapter {
        fields.insert("values of the adapters".to_owned(), adapter.clone());
    }
    if let Some(identity) = prepared.validation_identity() {
        fields.insert("validation data".to_owned(), json!(identity).to_string());
    }
    fields
}

/// Returns the settings that must be equal in all processes.
pub fn shared_settings(settings: &Settings) -> Fields {
    let mut fields = settings.by_key();
    fields.retain(|key, _| !may_differ(key));
    fields
}

/// Returns the hashes of the files of a checkpoint.
pub fn checkpoint_files(checkpoint: &Checkpoint) -> String {
    let files = checkpoint.manifest().files.iter();
    files.map(|file| file.hash.as_str()).collect::<Vec<_>>().join(" ")
}

/// Returns the names and sizes of the files in a folder that contain parameters. Their content is not
/// compared, because that would mean reading gigabytes.
pub fn weight_files(folder: &Path) -> String {
    // A GGUF file is a model by itself.
    let (folder, own) =
        if folder.is_file() { (folder.parent().unwrap_or(folder), Some(folder)) } else { (folder, None) };
    let is_own = |file: &Path| match own {
        Some(own) => are_parts(own, file),
        None => file.extension().is_some_and(|ending| ending == "safetensors"),
    };
    let files = folder.read_dir().into_iter().flatten().flatten();
    let mut files: Vec<String> = files
        .filter(|file| is_own(&file.path()))
        .map(|file| {
            let bytes = file.metadata().map_or(0, |metadata| metadata.len());
            format!("{} ({bytes} bytes)", file.file_name().to_string_lossy())
        })
        .collect();
    files.sort_unstable();
    files.join(", ")
}

/// Refuses a checkpoint whose model, adapters or data differ from the description `run`.
pub(crate) fn require_same(run: &Map<String, Value>, checkpoint: &Checkpoint) -> Result<(), RunError> {
    let stored = &checkpoint.manifest().description;
    let differences: Vec<String> = [MODEL, ADAPTER, PREFERENCE, DATA]
        .iter()
        .flat_map(|part| differences(part, run.get(*part), stored.get(*part)))
        .collect();
    if differences.is_empty() {
        return Ok(());
    }
    let place = checkpoint.path().display();
    Err(RunError::input(format!(
        "{place}: the checkpoint is of another model, of other adapters or of other data, so the run cannot resume from it: {}; resume \
         without that change, or start a new run",
        differences.join(", ")
    )))
}

/// Returns one phrase for each key whose values differ.
fn differences(part: &str, run: Option<&Value>, stored: Option<&Value>) -> Vec<String> {
    let members = |value: Option<&Value>| value.and_then(Value::as_object).cloned().unwrap_or_default();
    let (run, stored) = (members(run), members(stored));
    let keys: BTreeSet<&String> = run.keys().chain(stored.keys()).collect();
    let differing = keys.into_iter().filter(|key| run.get(*key) != stored.get(*key));
    let shown = |value: Option<&Value>| value.map_or("absent".to_owned(), Value::to_string);
    differing
        .map(|key| format!("{part}.{key} was {} and is {}", shown(stored.get(key)), shown(run.get(key))))
        .collect()
}

#[cfg(test)]
mod tests;
