//! Getters of flags, texts, words of a list, and paths.

use std::path::PathBuf;

use toml::Value;

use crate::settings::problem::ProblemKind;
use crate::settings::sample::BUILT_IN;
use crate::settings::section::reader::Section;

impl Section<'_> {
    /// Reads `true` or `false`.
    pub(crate) fn flag(&mut self, key: &'static str, default: bool) -> bool {
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
    pub(crate) fn text(&mut self, key: &'static str) -> Option<String> {
        match self.value(key)? {
            Value::String(text) if text.is_empty() => self.report(key, ProblemKind::Empty { key }),
            Value::String(text) => return Some(text),
            value => self.report(key, ProblemKind::wrong_type(key, "a text", &value)),
        }
        None
    }

    /// Reads one text or a list of texts, none of them empty.
    pub(crate) fn texts(&mut self, key: &'static str) -> Option<Vec<String>> {
        let value = self.value(key)?;
        self.texts_of(key, key, &value)
    }

    /// Reads one text or a list of texts from the value of `key` in a table that is the value of `place`.
    fn texts_of(&mut self, place: &str, key: &'static str, value: &Value) -> Option<Vec<String>> {
        let texts = match value {
            Value::String(text) => Some(vec![text.clone()]),
            Value::Array(items) => items.iter().map(|item| item.as_str().map(str::to_owned)).collect(),
            _ => None,
        };
        match texts {
            Some(texts) if texts.is_empty() || texts.iter().any(String::is_empty) => {
                self.report(place, ProblemKind::Empty { key });
            }
            Some(texts) => return Some(texts),
            None => self.report(place, ProblemKind::wrong_type(key, "a text or a list of texts", value)),
        }
        None
    }

    /// Reads a list of the words in `options`; empty if it is not written.
    pub(crate) fn choices<T: Copy>(&mut self, key: &'static str, options: &[(&str, T)]) -> Vec<T> {
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

    /// Reads one of the words in `options`.
    pub(crate) fn choice<T: Copy>(&mut self, key: &'static str, default: T, options: &[(&str, T)]) -> T {
        let Some(text) = self.text(key) else { return default };
        match options.iter().find(|(name, _)| *name == text) {
            Some((_, option)) => *option,
            None => {
                self.report_unknown_word(key, &text, options.iter().map(|(name, _)| *name));
                default
            }
        }
    }

    /// Reads one of the words in `options`, or a list, which `list` reads and `expected` describes.
    pub(crate) fn choice_or_list<T: Clone>(
        &mut self,
        key: &'static str,
        default: T,
        options: &[(&str, T)],
        expected: &'static str,
        list: impl FnOnce(&[Value]) -> Option<T>,
    ) -> T {
        self.choice_or(key, default, options, expected, |value| list(value.as_array()?))
    }

    /// Reads one of the words in `options`, or a value that is not a text, which `other` reads and `expected`
    /// describes.
    pub(crate) fn choice_or<T: Clone>(
        &mut self,
        key: &'static str,
        default: T,
        options: &[(&str, T)],
        expected: &'static str,
        other: impl FnOnce(&Value) -> Option<T>,
    ) -> T {
        match self.value(key) {
            None => default,
            Some(Value::String(text)) => match options.iter().find(|(name, _)| *name == text) {
                Some((_, option)) => option.clone(),
                None => {
                    self.report_unknown_word(key, &text, options.iter().map(|(name, _)| *name));
                    default
                }
            },
            Some(value) => other(&value).unwrap_or_else(|| {
                self.report(key, ProblemKind::wrong_type(key, expected, &value));
                default
            }),
        }
    }

    /// Reads a path and makes it absolute: relative to the file's folder, or to the working folder after
    /// `--set`.
    pub(crate) fn path(&mut self, key: &'static str) -> Option<PathBuf> {
        let text = self.text(key)?;
        match self.surroundings.path(key, &text, &self.place(key)) {
            Ok(path) => Some(path),
            Err(kind) => {
                self.report(key, kind);
                None
            }
        }
    }

    /// Reads patterns of paths, made absolute as in [`Section::path`], or the word that selects the text in
    /// the binary.
    pub(crate) fn patterns(&mut self, key: &'static str) -> Option<Vec<String>> {
        let texts = self.texts(key)?;
        if texts == [BUILT_IN] {
            return Some(texts);
        }
        self.absolute(key, key, &texts)
    }

    /// Reads patterns of paths from the value of `key` in a table that is the value of `place`.
    pub(crate) fn patterns_of(
        &mut self,
        place: &str,
        key: &'static str,
        value: &Value,
    ) -> Option<Vec<String>> {
        let texts = self.texts_of(place, key, value)?;
        self.absolute(place, key, &texts)
    }

    /// Makes patterns absolute, as in [`Section::path`].
    fn absolute(&mut self, place: &str, key: &'static str, texts: &[String]) -> Option<Vec<String>> {
        let written = self.place(place);
        match texts.iter().map(|text| self.surroundings.pattern(key, text, &written)).collect() {
            Ok(patterns) => Some(patterns),
            Err(kind) => {
                self.report(place, kind);
                None
            }
        }
    }
}
