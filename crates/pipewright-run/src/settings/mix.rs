//! `data.mix`: the sources of a mixture, with their weights.
//!
//! ```toml
//! [data]
//! mix = [{ path = "chats.jsonl", weight = 0.7 }, { path = ["corpus/*.txt"], weight = 0.3 }]
//! ```

use pipewright::train::data::{MixSource, MixWeight};
use pipewright_document::{Bound, Reader, Value};

use crate::settings::document::Document;
use crate::settings::paths::Surroundings;
use crate::settings::section::{Section, patterns_of};

/// Removes the key of `path` and `mix` that is in the file if the other one is after `--set`, which replaces
/// it.
pub(super) fn remove_replaced(document: &mut Document) {
    let is_argument = |key| document.value("data", key).map(|value| value.place.is_argument());
    let replaced = match (is_argument("path"), is_argument("mix")) {
        (Some(false), Some(true)) => "path",
        (Some(true), Some(false)) => "mix",
        _ => return,
    };
    document.remove_of_file("data", |key| key == replaced);
}

/// Reads the list. A `path` in the same place is a problem.
pub(super) fn read(section: &mut Section<'_>) -> Vec<MixSource> {
    const EXPECTED: &str = "a list of tables, such as [{ path = \"a.jsonl\", weight = 0.7 }, { path = \"b/*.txt\", weight = 0.3 }]";
    if section.is_written("mix") && section.is_written("path") {
        let help = "remove `path`, or make it a source of `mix`, such as { path = \"...\", weight = 1 }";
        section.report("mix", "`path` and `mix` both name the training data", help);
    }
    if section.value("mix").and_then(Value::as_list).is_some_and(<[Value]>::is_empty) {
        section.empty::<()>("mix");
    }
    section.read_tables("mix", ("a source of `data.mix`", EXPECTED), true, source)
}

fn source(table: &mut Reader<'_>, surroundings: &Surroundings) -> Option<MixSource> {
    table.require(&["path", "weight"]);
    let path = patterns_of(table, "path", surroundings);
    let weight = table.number("weight", Bound::Positive);
    Some(MixSource { path: path?, weight: MixWeight::try_from(weight?).ok()? })
}
