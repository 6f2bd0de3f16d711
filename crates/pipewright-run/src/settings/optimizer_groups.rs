//! `[[optimizer.groups]]`: parameters that the optimizer treats in another way than the rest.
//!
//! ```toml
//! [[optimizer.groups]]
//! parameters = ["embedding", "model.layers.0.*"]
//! learning_rate = 1e-4
//! ```

use globset::Glob;
use pipewright_document::{Bound, Reader};
use pipewright_models::ParameterGroup;
use serde::Serialize;

use crate::settings::section::Section;

/// Parameters that the optimizer treats in another way than the rest. If several groups have a parameter, the
/// last one counts, key by key.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GroupSettings {
    /// Names of groups (`norm`, `bias`, `embedding`), and patterns of paths.
    pub parameters: Vec<String>,
    /// The highest learning rate of the group.
    pub learning_rate: Option<f64>,
    /// The weight decay of the group.
    pub weight_decay: Option<f64>,
    /// The largest norm of the group's gradients together.
    pub clip_norm: Option<f64>,
}

/// Returns the group of this name, if it is a name and not a pattern.
pub(crate) fn named_group(text: &str) -> Option<ParameterGroup> {
    ParameterGroup::ALL.into_iter().find(|group| group.name() == text)
}

/// Reads the list.
pub(super) fn read(section: &mut Section<'_>) -> Vec<GroupSettings> {
    const EXPECTED: &str = "a list of tables, each below [[optimizer.groups]]";
    section.read_tables("groups", ("[[optimizer.groups]]", EXPECTED), false, |table, _| group(table))
}

fn group(table: &mut Reader<'_>) -> Option<GroupSettings> {
    table.require(&["parameters"]);
    let parameters = parameters(table);
    Some(GroupSettings {
        learning_rate: table.single("learning_rate", Bound::Positive),
        weight_decay: table.single("weight_decay", Bound::NonNegative),
        clip_norm: table.single("clip_norm", Bound::Positive),
        parameters: parameters?,
    })
}

fn parameters(table: &mut Reader<'_>) -> Option<Vec<String>> {
    const KEY: &str = "parameters";
    let expected = "a list of texts, such as [\"norm\", \"model.layers.0.*\"]";
    let items: Vec<String> = table.read(KEY, expected, |value| {
        value.as_list()?.iter().map(|item| item.as_text().map(str::to_owned)).collect()
    })?;
    if items.is_empty() {
        return table.empty(KEY);
    }
    for item in &items {
        let is_path = item.contains(['.', '*', '?', '[', '{']);
        if named_group(item).is_none() && !is_path {
            table.unknown_word(KEY, item, ParameterGroup::ALL.iter().map(|group| group.name()));
        } else if Glob::new(item).is_err() {
            table.out_of_range::<()>(KEY, item, "a path, in which * means any letters");
        }
    }
    Some(items)
}
