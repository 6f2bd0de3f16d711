//! The description that identifies a run in its checkpoints: the model and the data. Everything else may change when
//! the run is resumed.

use std::collections::BTreeSet;

use pipewright::checkpoint::Checkpoint;
use serde_json::{Map, Value, json};

use crate::failure::Failure;
use crate::training::prepare::Prepared;

/// The key of the description that holds the content of the model's `config.json`.
pub(crate) const MODEL: &str = "model";
const DATA: &str = "data";
/// The key of the description that holds the last step's loss.
pub(crate) const LOSS: &str = "loss";

/// Returns the description of a run. Reads all data once.
pub(crate) fn describe(prepared: &Prepared) -> Map<String, Value> {
    let (model, data) = (prepared.model.model().to_json(), json!(prepared.rows.identity()));
    Map::from_iter([(MODEL.to_owned(), model), (DATA.to_owned(), data)])
}

/// Refuses a checkpoint whose model or data differs from those that `run` describes.
pub(crate) fn require_same(run: &Map<String, Value>, checkpoint: &Checkpoint) -> Result<(), Failure> {
    let stored = &checkpoint.manifest().description;
    let differences: Vec<String> =
        [MODEL, DATA].iter().flat_map(|part| differences(part, run.get(*part), stored.get(*part))).collect();
    if differences.is_empty() {
        return Ok(());
    }
    let place = checkpoint.path().display();
    Err(Failure::input(format!(
        "{place}: the checkpoint is of another model or of other data, so the run cannot resume from it: {}; resume \
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
mod tests {
    use super::*;

    #[test]
    fn only_what_differs_is_named() {
        let (run, stored) = (json!({"a": 1, "b": 2}), json!({"a": 1, "b": 3, "c": null}));
        let found = differences("model", Some(&run), Some(&stored));
        assert_eq!(found, ["model.b was 3 and is 2", "model.c was null and is absent"]);
        assert!(differences("model", Some(&run), Some(&run)).is_empty());
    }
}
