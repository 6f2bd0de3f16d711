//! One section of a document.

use toml::Value;

use crate::settings::document::{Document, Entry};
use crate::settings::keys::{Suggestion, keys_of, nearest};
use crate::settings::paths::Surroundings;
use crate::settings::place::Place;
use crate::settings::problem::{Problem, ProblemKind};

/// The largest count that a configuration may contain: the largest value of a token id and of the engine's
/// indices.
pub(crate) const LARGEST_COUNT: u32 = i32::MAX as u32;

/// One section of a document.
pub(crate) struct Section<'a> {
    name: &'static str,
    document: &'a mut Document,
    pub(super) surroundings: &'a Surroundings,
}

impl<'a> Section<'a> {
    /// Returns the section named `name`.
    pub(crate) fn new(
        document: &'a mut Document,
        surroundings: &'a Surroundings,
        name: &'static str,
    ) -> Self {
        Self { name, document, surroundings }
    }

    /// Records a word that is not one of the known ones.
    pub(crate) fn report_unknown_word<'w>(
        &mut self,
        key: &'static str,
        value: &str,
        known: impl Iterator<Item = &'w str> + Clone,
    ) {
        self.report_unknown_word_at(key, key, value, known);
    }

    /// Like [`Section::report_unknown_word`], for a word in a table that is the value of `place`.
    pub(crate) fn report_unknown_word_at<'w>(
        &mut self,
        place: &str,
        key: &'static str,
        value: &str,
        known: impl Iterator<Item = &'w str> + Clone,
    ) {
        let suggestion = nearest(value, known.clone()).map(|name| Suggestion::Name(name.to_owned()));
        let known = known.map(str::to_owned).collect();
        self.report(place, ProblemKind::UnknownValue { key, value: value.to_owned(), known, suggestion });
    }

    /// Records a key that does not exist in a table that is the value of `place`. `section` is the table's
    /// name in messages.
    pub(crate) fn report_unknown_key(
        &mut self,
        place: &str,
        section: &'static str,
        key: &str,
        known: &[&'static str],
    ) {
        let suggestion = nearest(key, known.iter().copied());
        let suggestion = known.iter().copied().find(|known| Some(*known) == suggestion);
        let (key, known) = (key.to_owned(), known.to_vec());
        self.report(place, ProblemKind::UnknownKeyOf { key, section, known, suggestion });
    }

    /// Records a value of another type.
    pub(crate) fn report_wrong_type(&mut self, key: &'static str, expected: &'static str, value: &Value) {
        self.report(key, ProblemKind::wrong_type(key, expected, value));
    }

    /// Records a problem of one key.
    pub(crate) fn report(&mut self, key: &str, kind: ProblemKind) {
        let place = self.place(key);
        self.document.problems.push(Problem { place, kind });
    }

    /// Records a sentence about a key that has no effect.
    pub(crate) fn note(&mut self, sentence: String) {
        self.document.notes.push(sentence);
    }

    /// Records a problem of several keys, at the first key that is written.
    pub(crate) fn report_at_first_of(&mut self, keys: &[&str], kind: ProblemKind) {
        let written = keys.iter().find(|key| self.is_written(key));
        self.report(written.or(keys.first()).copied().unwrap_or_default(), kind);
    }

    /// Returns whether no problem has been found so far.
    pub(crate) fn is_sound(&self) -> bool {
        self.document.problems.is_empty()
    }

    /// Returns the keys of the section that are written, with their values.
    pub(crate) fn written(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.document.values(self.name)
    }

    /// Returns whether the key is written.
    pub(crate) fn is_written(&self, key: &str) -> bool {
        self.document.entry(self.name, key).is_some()
    }

    /// Returns the place where the key was written.
    pub(crate) fn place(&self, key: &str) -> Place {
        self.document.entry(self.name, key).map_or(Place::Default, |entry| entry.place.clone())
    }

    /// Reads the table with this number, and says in each of its problems which one it is.
    pub(crate) fn in_table<T>(&mut self, number: usize, read: impl FnOnce(&mut Self) -> T) -> T {
        let known = self.document.problems.len();
        let value = read(self);
        let problems = self.document.problems.drain(known..).collect::<Vec<_>>();
        self.document.problems.extend(problems.into_iter().map(|Problem { place, kind }| Problem {
            place,
            kind: ProblemKind::InTable { number, problem: Box::new(kind) },
        }));
        value
    }

    /// Returns a value of any type, which the caller checks.
    pub(crate) fn value(&self, key: &'static str) -> Option<Value> {
        debug_assert!(keys_of(self.name).is_some_and(|keys| keys.contains(&key)), "{key} is not in SECTIONS");
        self.document.entry(self.name, key).map(|Entry { value, .. }| value.clone())
    }
}

/// Returns the text of a value. A large number keeps its exponent: TOML's own text of 1e308 has 309 digits.
pub(crate) fn shown(value: &Value) -> String {
    match value {
        Value::Float(number) if number.is_finite() => format!("{number:?}"),
        Value::Array(items) => format!("[{}]", items.iter().map(shown).collect::<Vec<_>>().join(", ")),
        other => other.to_string(),
    }
}

pub(crate) fn as_number(value: &Value) -> Option<f64> {
    match value {
        // Whole numbers above 2^53 are rounded to the nearest float.
        Value::Integer(number) => Some(*number as f64),
        Value::Float(number) => Some(*number),
        _ => None,
    }
}
