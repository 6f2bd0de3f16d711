//! Keys of a file of published runs that say something to readers, and nothing to the cost model.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// The keys that are remarks wherever they stand.
const REMARKS: [&str; 9] =
    ["comment", "comments", "date", "link", "note", "notes", "reference", "source_url", "url"];
/// Keys that are remarks in a table of this name alone.
const REMARKS_OF_TABLE: [(&str, &str); 3] = [("", "source"), ("", "title"), ("model", "source")];

/// A text without its remarks.
pub(crate) struct Plain {
    /// The text, in which spaces replace remarks so that errors name the lines of the file.
    pub(crate) text: String,
    /// The remarks' keys with their places, in the order of the file.
    pub(crate) remarks: Vec<String>,
}

/// Finds the remarks of a text and replaces them by spaces. A text that is not TOML is returned as it is.
pub(crate) fn without_remarks(text: &str) -> Plain {
    let mut found = Vec::new();
    if let Ok(file) = DeTable::parse(text) {
        add_remarks("", "the file", file.get_ref(), &mut found);
        for (name, value) in file.get_ref() {
            let DeValue::Array(tables) = value.get_ref() else { continue };
            for (index, table) in tables.iter().enumerate() {
                let DeValue::Table(table) = table.get_ref() else { continue };
                let name: &str = name.get_ref();
                add_remarks(name, &format!("{name} {}", index + 1), table, &mut found);
            }
        }
    }
    found.sort_by_key(|(range, _)| range.start);
    let mut plain = text.as_bytes().to_vec();
    for (range, _) in &found {
        let bytes = plain.get_mut(range.clone()).unwrap_or_default();
        bytes.iter_mut().filter(|byte| !byte.is_ascii_control()).for_each(|byte| *byte = b' ');
    }
    let text = String::from_utf8(plain).unwrap_or_else(|_| text.to_owned());
    Plain { text, remarks: found.into_iter().map(|(_, remark)| remark).collect() }
}

/// Adds the remarks of the table `name` at `place`.
fn add_remarks(name: &str, place: &str, table: &DeTable<'_>, found: &mut Vec<(Range<usize>, String)>) {
    for (key, value) in table {
        let word: &str = key.get_ref();
        let is_remark = REMARKS.contains(&word) || REMARKS_OF_TABLE.contains(&(name, word));
        if is_remark && is_plain(value) {
            found.push((key.span().start..value.span().end, format!("`{word}` of {place}")));
        }
    }
}

/// Whether a value is in one piece behind its key.
fn is_plain(value: &Spanned<DeValue<'_>>) -> bool {
    match value.get_ref() {
        DeValue::Table(_) => false,
        DeValue::Array(items) => items.iter().all(|item| !matches!(item.get_ref(), DeValue::Table(_))),
        _ => true,
    }
}
