//! `[[optimizer.groups]]`: parameters that the optimizer treats in another way than the rest.
//!
//! ```toml
//! [[optimizer.groups]]
//! parameters = ["embedding", "model.layers.0.*"]
//! learning_rate = 1e-4
//! ```

use globset::Glob;
use pipewright_models::ParameterGroup;
use serde::Serialize;
use toml::{Table, Value};

use crate::settings::problem::ProblemKind;
use crate::settings::section::{Bound, Section, as_number, shown};

/// The key of the list.
const GROUPS: &str = "groups";
/// The section's name in messages.
const SECTION: &str = "[[optimizer.groups]]";
/// The key of a group that names its parameters.
const PARAMETERS: &str = "parameters";
const KEYS: [&str; 4] = [PARAMETERS, "learning_rate", "weight_decay", "clip_norm"];

/// Parameters that the optimizer treats in another way than the rest. If several groups have a parameter, the
/// last one counts, key by key.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GroupSettings {
    /// Names of groups (`norm`, `bias`, `embedding`), and patterns of paths.
    pub parameters: Vec<String>,
    /// The highest learning rate of the group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub learning_rate: Option<f64>,
    /// The weight decay of the group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
    /// The largest norm of the group's gradients together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clip_norm: Option<f64>,
}

/// Returns the group of this name, if it is a name and not a pattern.
pub fn named_group(text: &str) -> Option<ParameterGroup> {
    ParameterGroup::ALL.into_iter().find(|group| group.name() == text)
}

/// Reads the list.
pub(super) fn read(section: &mut Section<'_>) -> Vec<GroupSettings> {
    const EXPECTED: &str = "a list of tables, each below [[optimizer.groups]]";
    let Some(value) = section.value(GROUPS) else { return Vec::new() };
    let tables = value.as_array().and_then(|items| items.iter().map(Value::as_table).collect());
    let Some(tables): Option<Vec<&Table>> = tables else {
        section.report_wrong_type(GROUPS, EXPECTED, &value);
        return Vec::new();
    };
    match tables.as_slice() {
        [table] => group(section, table).into_iter().collect(),
        tables => {
            let numbered = (1..).zip(tables);
            numbered
                .filter_map(|(number, table)| section.in_table(number, |section| group(section, table)))
                .collect()
        }
    }
}

fn group(section: &mut Section<'_>, table: &Table) -> Option<GroupSettings> {
    for key in table.keys().filter(|key| !KEYS.contains(&key.as_str())) {
        section.report_unknown_key(GROUPS, SECTION, key, &KEYS);
    }
    let learning_rate = number(section, table, "learning_rate", &Bound::Positive);
    let weight_decay = number(section, table, "weight_decay", &Bound::NonNegative);
    let clip_norm = number(section, table, "clip_norm", &Bound::Positive);
    Some(GroupSettings { parameters: parameters(section, table)?, learning_rate, weight_decay, clip_norm })
}

fn number(section: &mut Section<'_>, table: &Table, key: &'static str, bound: &Bound) -> Option<f64> {
    let value = table.get(key)?;
    let number = as_number(value);
    let refused =
        number.map_or_else(|| Some(bound.words().to_owned()), |number| bound.refuses_single(number));
    if let Some(range) = refused {
        section.report(GROUPS, ProblemKind::OutOfRange { key, value: shown(value), range });
        return None;
    }
    number
}

fn parameters(section: &mut Section<'_>, table: &Table) -> Option<Vec<String>> {
    const EXPECTED: &str = "a list of texts, such as [\"norm\", \"model.layers.0.*\"]";
    let Some(value) = table.get(PARAMETERS) else {
        section.report(GROUPS, ProblemKind::Missing { key: PARAMETERS, section: SECTION });
        return None;
    };
    let items: Option<Vec<String>> = value
        .as_array()
        .and_then(|items| items.iter().map(|item| item.as_str().map(str::to_owned)).collect());
    let Some(items) = items else {
        section.report_wrong_type(GROUPS, EXPECTED, value);
        return None;
    };
    if items.is_empty() {
        section.report(GROUPS, ProblemKind::Empty { key: PARAMETERS });
    }
    for item in &items {
        let is_path = item.contains(['.', '*', '?', '[', '{']);
        if named_group(item).is_none() && !is_path {
            let names = ParameterGroup::ALL.iter().map(|group| group.name());
            section.report_unknown_word_at(GROUPS, PARAMETERS, item, names);
        } else if Glob::new(item).is_err() {
            let range = "a path, in which * means any letters".to_owned();
            section.report(GROUPS, ProblemKind::OutOfRange { key: PARAMETERS, value: item.clone(), range });
        }
    }
    Some(items)
}
