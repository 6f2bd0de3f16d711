//! The settings that differ between runs.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use toml::{Table, Value};

/// The folder of a run, which always differs and which the name of the run says.
const FOLDER: &str = "run.out";

/// A key of the configuration that has another value in another run.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct SettingDifference {
    /// The key with its sections, such as `optimizer.groups.0.learning_rate`.
    pub(super) key: String,
    /// The value in each run; `None` in a run without the key.
    pub(super) values: Vec<Option<Value>>,
}

impl SettingDifference {
    /// Returns the value in a run as text; nothing in a run without the key.
    pub(super) fn text(&self, run: usize) -> String {
        match &self.values[run] {
            Some(Value::String(text)) => text.clone(),
            value => value.as_ref().map(Value::to_string).unwrap_or_default(),
        }
    }
}

/// Returns the keys whose values differ between the configurations of runs, in the order of their names.
pub(super) fn differences(settings: &[Table]) -> Vec<SettingDifference> {
    let all: Vec<BTreeMap<String, Value>> = settings.iter().map(keys).collect();
    let names: BTreeSet<&String> = all.iter().flat_map(BTreeMap::keys).collect();
    let difference = |key: &String| SettingDifference {
        key: key.clone(),
        values: all.iter().map(|keys| keys.get(key).cloned()).collect(),
    };
    let differs = |found: &SettingDifference| {
        found.key != FOLDER && found.values.windows(2).any(|pair| pair[0] != pair[1])
    };
    names.into_iter().map(difference).filter(differs).collect()
}

/// Returns all keys of a configuration with their sections. The tables of a list have numbers from 0.
fn keys(settings: &Table) -> BTreeMap<String, Value> {
    let mut found = BTreeMap::new();
    settings.iter().for_each(|(key, value)| add(key.clone(), value, &mut found));
    found
}

fn add(key: String, value: &Value, found: &mut BTreeMap<String, Value>) {
    match value {
        Value::Table(table) => {
            table.iter().for_each(|(name, value)| add(format!("{key}.{name}"), value, found));
        }
        Value::Array(list) if list.iter().any(Value::is_table) => {
            list.iter().enumerate().for_each(|(index, value)| add(format!("{key}.{index}"), value, found));
        }
        value => {
            found.insert(key, value.clone());
        }
    }
}
