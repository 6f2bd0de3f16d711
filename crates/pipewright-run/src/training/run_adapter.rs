//! The adapters of a run in its checkpoints: what a checkpoint says about them, and the base that they change.

use std::path::{Path, PathBuf};

use pipewright::checkpoint::Checkpoint;
use pipewright_models::{Adapter, LoraConfig, hf};
use pipewright_schedule::error_text::with_causes as sentence;
use serde_json::{Value, json};

use crate::error::RunError;

/// The key of the description that holds the adapters.
pub(crate) const ADAPTER: &str = "adapter";
/// The key of the fingerprint of the base's weights.
const BASE: &str = "base_weights";

/// Returns what a checkpoint says about the adapters of a run. Reads the ends of all tensors of the base.
pub(crate) fn describe(adapter: &Adapter, base: &Path) -> Result<Value, RunError> {
    let mut description = json!(adapter.lora);
    description["kind"] = "lora".into();
    description[BASE] = hf::fingerprint(base).map_err(RunError::input)?.into();
    // The parser may change the last digit of a number, and the description is compared with one from a file.
    Ok(serde_json::from_str(&description.to_string()).unwrap_or(description))
}

/// The adapters that a checkpoint has.
pub struct StoredAdapter {
    /// Their settings.
    pub lora: LoraConfig,
    /// The fingerprint of the base's weights.
    fingerprint: String,
}

impl StoredAdapter {
    /// Returns the adapters of a checkpoint; `None` if it has a whole model.
    pub fn of(checkpoint: &Checkpoint) -> Result<Option<Self>, RunError> {
        let Some(description) = checkpoint.manifest().description.get(ADAPTER) else { return Ok(None) };
        let place = checkpoint.path().display();
        let lora: LoraConfig = serde_json::from_value(description.clone())
            .map_err(|error| RunError::input(format!("{place}: its adapters: {}", sentence(&error))))?;
        lora.check()
            .map_err(|error| RunError::input(format!("{place}: its adapters: {}", sentence(&error))))?;
        let fingerprint = description[BASE].as_str().unwrap_or_default().to_owned();
        Ok(Some(Self { lora, fingerprint }))
    }

    /// Returns the folder of the base: the given one, or the one in the configuration of the run. The adapters
    /// must have been trained on its weights.
    pub fn base(&self, given: Option<&Path>, of_run: Option<PathBuf>) -> Result<PathBuf, RunError> {
        const ADVICE: &str = "name the folder of the model that the adapters were trained on with --base DIR";
        let Some(base) = given.map(Path::to_owned).or(of_run) else {
            return Err(RunError::input(format!(
                "the run does not say which model its adapters change: {ADVICE}"
            )));
        };
        let found = hf::fingerprint(&base).map_err(|error| {
            RunError::input(format!("the base of the adapters: {}: {ADVICE}", sentence(&error)))
        })?;
        if found != self.fingerprint {
            return Err(RunError::input(format!(
                "{}: the adapters were trained on other weights: {ADVICE}",
                base.display()
            )));
        }
        Ok(base)
    }
}
