//! Hints at the name that is nearest to an unknown one, for error messages.

use pipewright_schedule::words;

/// Returns a hint such as "; the nearest name is `h100`", or nothing if no name is near: at most one letter
/// in four differs, and one more. Case, spaces and punctuation do not matter.
pub(crate) fn nearest<'a>(unknown: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    words::nearest(unknown, known, |letters| 1 + letters / 4).map_or_else(String::new, nearest_hint)
}

/// Returns the hint that a name is the nearest one.
pub(crate) fn nearest_hint(name: &str) -> String {
    format!("; the nearest name is `{name}`")
}
