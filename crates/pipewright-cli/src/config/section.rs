//! Reads the keys of one section by type. Every getter returns a value and records a problem if the written value is
//! wrong.
//!
//! After a problem the getter returns the default, so that one command reports all problems. Checks that compare
//! several keys are skipped if there is a problem, because they would compare defaults that the user did not write.

use std::path::PathBuf;

use toml::Value;

use crate::config::data::BUILT_IN;
use crate::config::document::{Document, Entry};
use crate::config::keys::{keys_of, nearest};
use crate::config::paths::Surroundings;
use crate::config::place::Place;
use crate::config::problem::{Problem, ProblemKind, Suggestion};

/// The largest count that a configuration may contain: the largest value of a token id and of the engine's indices.
pub(super) const LARGEST_COUNT: u32 = i32::MAX as u32;

/// One section of a document.
pub(super) struct Section<'a> {
    name: &'static str,
    document: &'a mut Document,
    surroundings: &'a Surroundings,
}

/// The numbers that a key takes.
pub(super) enum Bound {
    /// Above 0.
    Positive,
    /// 0 and above.
    NonNegative,
    /// From 0 to below 1.
    Fraction,
    /// Above 0 and below 1.
    Share,
}

impl Bound {
    pub(super) fn holds(&self, number: f64) -> bool {
        number.is_finite()
            && match self {
                Self::Positive => number > 0.0,
                Self::NonNegative => number >= 0.0,
                Self::Fraction => (0.0..1.0).contains(&number),
                Self::Share => 0.0 < number && number < 1.0,
            }
    }

    pub(super) fn words(&self) -> &'static str {
        match self {
            Self::Positive => "a finite number above 0",
            Self::NonNegative => "a finite number, 0 or above",
            Self::Fraction => "a number from 0 to below 1",
            Self::Share => "a number above 0 and below 1",
        }
    }

    /// Returns the range in words if it does not have the number, or does not have it after rounding to single precision, in
    /// which the optimizer computes.
    pub(super) fn refuses_single(&self, number: f64) -> Option<String> {
        let rounded = number as f32;
        if !self.holds(number) {
            Some(self.words().to_owned())
        } else if !self.holds(rounded.into()) {
            Some(format!("{} in single precision, which rounds {number:?} to {rounded},", self.words()))
        } else {
            None
        }
    }
}

impl<'a> Section<'a> {
    /// Returns the section named `name`.
    pub(super) fn new(
        document: &'a mut Document,
        surroundings: &'a Surroundings,
        name: &'static str,
    ) -> Self {
        Self { name, document, surroundings }
    }

    /// Reads a whole number of at least 1.
    pub(super) fn count(&mut self, key: &'static str, default: u32) -> u32 {
        self.count_to(key, default, LARGEST_COUNT)
    }

    /// Reads a whole number of at least 0; 0 if it is not written.
    pub(super) fn count_from_0(&mut self, key: &'static str) -> u32 {
        let count = self.whole(key, 0, 0, u64::from(LARGEST_COUNT));
        u32::try_from(count).expect("whole() keeps to its range, which u32 holds")
    }

    /// Reads a whole number from 1 to `most`.
    pub(super) fn count_to(&mut self, key: &'static str, default: u32, most: u32) -> u32 {
        let count = self.whole(key, u64::from(default), 1, u64::from(most));
        u32::try_from(count).expect("whole() keeps to its range, which u32 holds")
    }

    /// Reads a whole number within `least..=most`.
    pub(super) fn whole(&mut self, key: &'static str, default: u64, least: u64, most: u64) -> u64 {
        let Some(value) = self.value(key) else { return default };
        let Value::Integer(number) = value else {
            self.report(key, ProblemKind::wrong_type(key, "a whole number", &value));
            return default;
        };
        match u64::try_from(number) {
            Ok(number) if (least..=most).contains(&number) => number,
            _ => {
                let range = format!("a whole number from {least} to {most}");
                self.report(key, ProblemKind::OutOfRange { key, value: number.to_string(), range });
                default
            }
        }
    }

    /// Reads a list of whole numbers of at least 1.
    pub(super) fn counts(&mut self, key: &'static str) -> Option<Vec<u32>> {
        const EXPECTED: &str = "a list of whole numbers, such as [4, 8]";
        let value = self.value(key)?;
        let Value::Array(items) = &value else {
            self.report(key, ProblemKind::wrong_type(key, EXPECTED, &value));
            return None;
        };
        let mut counts = Vec::with_capacity(items.len());
        for item in items {
            let Value::Integer(number) = item else {
                self.report(key, ProblemKind::wrong_type(key, EXPECTED, &value));
                return None;
            };
            match u32::try_from(*number) {
                Ok(count) if (1..=LARGEST_COUNT).contains(&count) => counts.push(count),
                _ => {
                    let range = format!("whole numbers from 1 to {LARGEST_COUNT}");
                    self.report(key, ProblemKind::OutOfRange { key, value: value.to_string(), range });
                    return None;
                }
            }
        }
        Some(counts)
    }

    /// Reads a whole number of at least 1, or a list of them; empty if it is not written.
    pub(super) fn count_or_counts(&mut self, key: &'static str) -> Vec<u32> {
        match self.value(key) {
            None => Vec::new(),
            Some(Value::Array(items)) if items.is_empty() => {
                self.report(key, ProblemKind::Empty { key });
                Vec::new()
            }
            Some(Value::Array(_)) => self.counts(key).unwrap_or_default(),
            Some(_) => vec![self.count(key, 1)],
        }
    }

    /// Reads a number with or without a fraction.
    pub(super) fn number(&mut self, key: &'static str, default: f64, bound: &Bound) -> f64 {
        let Some(value) = self.value(key) else { return default };
        match as_number(&value) {
            Some(number) if bound.holds(number) => number,
            Some(_) => {
                let range = bound.words().to_owned();
                self.report(key, ProblemKind::OutOfRange { key, value: shown(&value), range });
                default
            }
            None => {
                self.report(key, ProblemKind::wrong_type(key, "a number", &value));
                default
            }
        }
    }

    /// As [`Section::number`], for a number that the optimizer rounds to single precision.
    pub(super) fn single(&mut self, key: &'static str, default: f64, bound: &Bound) -> f64 {
        let number = self.number(key, default, bound);
        if let Some(range) = bound.refuses_single(number) {
            self.report(key, ProblemKind::OutOfRange { key, value: format!("{number:?}"), range });
        }
        number
    }

    /// Reads two numbers that the optimizer rounds to single precision.
    pub(super) fn single_pair(&mut self, key: &'static str, default: [f64; 2], bound: &Bound) -> [f64; 2] {
        let Some(value) = self.value(key) else { return default };
        let numbers = match &value {
            Value::Array(items) => items.iter().map(as_number).collect::<Option<Vec<f64>>>(),
            _ => None,
        };
        match numbers.and_then(|numbers| <[f64; 2]>::try_from(numbers).ok()) {
            Some(pair) => match pair.iter().find_map(|number| bound.refuses_single(*number)) {
                None => pair,
                Some(range) => {
                    let range = format!("for each of the two {range}");
                    self.report(key, ProblemKind::OutOfRange { key, value: shown(&value), range });
                    default
                }
            },
            None => {
                self.report(key, ProblemKind::wrong_type(key, "a list of two numbers", &value));
                default
            }
        }
    }

    /// Reads `true` or `false`.
    pub(super) fn flag(&mut self, key: &'static str, default: bool) -> bool {
        match self.value(key) {
            None => default,
            Some(Value::Boolean(flag)) => flag,
            Some(value) => {
                self.report(key, ProblemKind::wrong_type(key, "true or false", &value));
                default
            }
        }
    }

    /// Reads a text that is not empty.
    pub(super) fn text(&mut self, key: &'static str) -> Option<String> {
        match self.value(key)? {
            Value::String(text) if text.is_empty() => self.report(key, ProblemKind::Empty { key }),
            Value::String(text) => return Some(text),
            value => self.report(key, ProblemKind::wrong_type(key, "a text", &value)),
        }
        None
    }

    /// Reads one text or a list of texts, none of them empty.
    pub(super) fn texts(&mut self, key: &'static str) -> Option<Vec<String>> {
        let value = self.value(key)?;
        let texts = match &value {
            Value::String(text) => Some(vec![text.clone()]),
            Value::Array(items) => items.iter().map(|item| item.as_str().map(str::to_owned)).collect(),
            _ => None,
        };
        match texts {
            Some(texts) if texts.is_empty() || texts.iter().any(String::is_empty) => {
                self.report(key, ProblemKind::Empty { key });
            }
            Some(texts) => return Some(texts),
            None => self.report(key, ProblemKind::wrong_type(key, "a text or a list of texts", &value)),
        }
        None
    }

    /// Reads a list of the words in `options`; empty if it is not written.
    pub(super) fn choices<T: Copy>(&mut self, key: &'static str, options: &[(&str, T)]) -> Vec<T> {
        if let Some(Value::Array(items)) = self.value(key)
            && items.is_empty()
        {
            return Vec::new();
        }
        let mut found = Vec::new();
        for text in self.texts(key).unwrap_or_default() {
            match options.iter().find(|(name, _)| *name == text) {
                Some((_, option)) => found.push(*option),
                None => self.report_unknown_word(key, &text, options.iter().map(|(name, _)| *name)),
            }
        }
        found
    }

    /// Reads a value of any type, which the caller checks.
    pub(super) fn any(&mut self, key: &'static str) -> Option<Value> {
        self.value(key)
    }

    /// Reads one of the words in `options`.
    pub(super) fn choice<T: Copy>(&mut self, key: &'static str, default: T, options: &[(&str, T)]) -> T {
        let Some(text) = self.text(key) else { return default };
        match options.iter().find(|(name, _)| *name == text) {
            Some((_, option)) => *option,
            None => {
                self.report_unknown_word(key, &text, options.iter().map(|(name, _)| *name));
                default
            }
        }
    }

    /// Reads one of the words in `options`, or a list of whole numbers.
    pub(super) fn choice_or_list<T: Clone>(
        &mut self,
        key: &'static str,
        default: T,
        options: &[(&str, T)],
        list: impl FnOnce(Vec<u32>) -> Option<T>,
    ) -> T {
        const EXPECTED: &str = "a word, or a list of whole numbers, such as [0, 2]";
        match self.value(key) {
            None => default,
            Some(Value::String(text)) => match options.iter().find(|(name, _)| *name == text) {
                Some((_, option)) => option.clone(),
                None => {
                    self.report_unknown_word(key, &text, options.iter().map(|(name, _)| *name));
                    default
                }
            },
            Some(value) => {
                let number = |item: &Value| u32::try_from(item.as_integer()?).ok();
                let items = value.as_array().and_then(|items| items.iter().map(number).collect());
                items.and_then(list).unwrap_or_else(|| {
                    self.report(key, ProblemKind::wrong_type(key, EXPECTED, &value));
                    default
                })
            }
        }
    }

    /// Reads a path and makes it absolute: relative to the file's folder, or to the working folder after `--set`.
    pub(super) fn path(&mut self, key: &'static str) -> Option<PathBuf> {
        let text = self.text(key)?;
        match self.surroundings.path(key, &text, &self.place(key)) {
            Ok(path) => Some(path),
            Err(kind) => {
                self.report(key, kind);
                None
            }
        }
    }

    /// Reads patterns of paths, made absolute as in [`Section::path`], or the word that selects the text in the binary.
    pub(super) fn patterns(&mut self, key: &'static str) -> Option<Vec<String>> {
        let texts = self.texts(key)?;
        if texts == [BUILT_IN] {
            return Some(texts);
        }
        let place = self.place(key);
        match texts.iter().map(|text| self.surroundings.pattern(key, text, &place)).collect() {
            Ok(patterns) => Some(patterns),
            Err(kind) => {
                self.report(key, kind);
                None
            }
        }
    }

    /// Records a word that is not one of the known ones.
    pub(super) fn report_unknown_word<'w>(
        &mut self,
        key: &'static str,
        value: &str,
        known: impl Iterator<Item = &'w str> + Clone,
    ) {
        self.report_unknown_word_at(key, key, value, known);
    }

    /// As [`Section::report_unknown_word`], for a word in a table that is the value of `place`.
    pub(super) fn report_unknown_word_at<'w>(
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

    /// Records a value of another type.
    pub(super) fn report_wrong_type(&mut self, key: &'static str, expected: &'static str, value: &Value) {
        self.report(key, ProblemKind::wrong_type(key, expected, value));
    }

    /// Reads the table with this number, and says in each of its problems which one it is.
    pub(super) fn in_table<T>(&mut self, number: usize, read: impl FnOnce(&mut Self) -> T) -> T {
        let known = self.document.problems.len();
        let value = read(self);
        let problems = self.document.problems.drain(known..).collect::<Vec<_>>();
        self.document.problems.extend(problems.into_iter().map(|Problem { place, kind }| Problem {
            place,
            kind: ProblemKind::InTable { number, problem: Box::new(kind) },
        }));
        value
    }

    /// Records a problem of one key.
    pub(super) fn report(&mut self, key: &str, kind: ProblemKind) {
        let place = self.place(key);
        self.document.problems.push(Problem { place, kind });
    }

    /// Records a sentence about a key that has no effect.
    pub(super) fn note(&mut self, sentence: String) {
        self.document.notes.push(sentence);
    }

    /// Records a problem of several keys, at the first key that is written.
    pub(super) fn report_at_first_of(&mut self, keys: &[&str], kind: ProblemKind) {
        let written = keys.iter().find(|key| self.is_written(key));
        self.report(written.or(keys.first()).copied().unwrap_or_default(), kind);
    }

    /// Returns whether no problem has been found so far.
    pub(super) fn is_sound(&self) -> bool {
        self.document.problems.is_empty()
    }

    /// Returns the keys of the section that are written, with their values.
    pub(super) fn written(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.document.values(self.name)
    }

    /// Returns whether the key is written.
    pub(super) fn is_written(&self, key: &str) -> bool {
        self.document.entry(self.name, key).is_some()
    }

    /// Returns the place where the key was written.
    pub(super) fn place(&self, key: &str) -> Place {
        self.document.entry(self.name, key).map_or(Place::Default, |entry| entry.place.clone())
    }

    fn value(&self, key: &'static str) -> Option<Value> {
        debug_assert!(keys_of(self.name).is_some_and(|keys| keys.contains(&key)), "{key} is not in SECTIONS");
        self.document.entry(self.name, key).map(|Entry { value, .. }| value.clone())
    }
}

/// Returns the text of a value. A large number keeps its exponent: TOML's own text of 1e308 has 309 digits.
pub(super) fn shown(value: &Value) -> String {
    match value {
        Value::Float(number) if number.is_finite() => format!("{number:?}"),
        Value::Array(items) => format!("[{}]", items.iter().map(shown).collect::<Vec<_>>().join(", ")),
        other => other.to_string(),
    }
}

pub(super) fn as_number(value: &Value) -> Option<f64> {
    match value {
        // Whole numbers above 2^53 are rounded to the nearest float.
        Value::Integer(number) => Some(*number as f64),
        Value::Float(number) => Some(*number),
        _ => None,
    }
}
