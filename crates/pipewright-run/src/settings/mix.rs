//! `data.mix`: the sources of a mixture, with their weights.
//!
//! ```toml
//! [data]
//! mix = [{ path = "chats.jsonl", weight = 0.7 }, { path = ["corpus/*.txt"], weight = 0.3 }]
//! ```

use pipewright::train::data::{MixSource, MixWeight};
use toml::{Table, Value};

use crate::settings::document::Document;
use crate::settings::place::Place;
use crate::settings::problem::ProblemKind;
use crate::settings::section::{Bound, Section, as_number, shown};

/// The key of the list.
const MIX: &str = "mix";
/// The table's name in messages.
const SECTION: &str = "a source of `data.mix`";
const PATH: &str = "path";
const WEIGHT: &str = "weight";
const KEYS: [&str; 2] = [PATH, WEIGHT];

/// Removes the key of `path` and `mix` that is in the file if the other one is after `--set`, which replaces
/// it.
pub(super) fn remove_replaced(document: &mut Document) {
    let is_in_file =
        |key: &str| document.entry("data", key).map(|entry| matches!(entry.place, Place::File { .. }));
    let replaced = match (is_in_file(PATH), is_in_file(MIX)) {
        (Some(true), Some(false)) => PATH,
        (Some(false), Some(true)) => MIX,
        _ => return,
    };
    document.remove("data", replaced);
}

/// Reads the list. A `path` in the same place is a problem.
pub(super) fn read(section: &mut Section<'_>) -> Vec<MixSource> {
    const EXPECTED: &str = "a list of tables, such as [{ path = \"a.jsonl\", weight = 0.7 }, { path = \"b/*.txt\", weight = 0.3 }]";
    let Some(value) = section.value(MIX) else { return Vec::new() };
    if section.is_written(PATH) {
        section.report(MIX, ProblemKind::PathAndMix);
    }
    let tables = value.as_array().and_then(|items| items.iter().map(Value::as_table).collect());
    let Some(tables): Option<Vec<&Table>> = tables else {
        section.report_wrong_type(MIX, EXPECTED, &value);
        return Vec::new();
    };
    if tables.is_empty() {
        section.report(MIX, ProblemKind::Empty { key: MIX });
    }
    let numbered = (1..).zip(tables);
    numbered
        .filter_map(|(number, table)| section.in_table(number, |section| source(section, table)))
        .collect()
}

fn source(section: &mut Section<'_>, table: &Table) -> Option<MixSource> {
    for key in table.keys().filter(|key| !KEYS.contains(&key.as_str())) {
        section.report_unknown_key(MIX, SECTION, key, &KEYS);
    }
    let (path, weight) = (path(section, table), weight(section, table));
    Some(MixSource { path: path?, weight: weight? })
}

fn weight(section: &mut Section<'_>, table: &Table) -> Option<MixWeight> {
    let Some(value) = table.get(WEIGHT) else {
        section.report(MIX, ProblemKind::Missing { key: WEIGHT, section: SECTION });
        return None;
    };
    let weight = as_number(value).and_then(|number| MixWeight::try_from(number).ok());
    if weight.is_none() {
        let range = Bound::Positive.words().to_owned();
        section.report(MIX, ProblemKind::OutOfRange { key: WEIGHT, value: shown(value), range });
    }
    weight
}

fn path(section: &mut Section<'_>, table: &Table) -> Option<Vec<String>> {
    match table.get(PATH) {
        Some(value) => section.patterns_of(MIX, PATH, value),
        None => {
            section.report(MIX, ProblemKind::Missing { key: PATH, section: SECTION });
            None
        }
    }
}
