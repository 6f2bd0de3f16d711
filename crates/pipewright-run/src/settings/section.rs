//! Reads the keys of one section. The range and the default of each key are in the table of the keys.
//!
//! After a problem a getter returns the default, so that one command reports all problems. Checks that
//! compare several keys are skipped if there is a problem, because they would compare defaults that the user
//! did not write.

use std::error::Error;
use std::ops::{Deref, DerefMut};
use std::path::PathBuf;

use pipewright_document::{Bound, Place, Reader, Table, Value};

use crate::settings::document::Document;
use crate::settings::keys::{Key, LARGEST_COUNT, defaults_of, find};
use crate::settings::paths::Surroundings;
use crate::settings::sample::BUILT_IN;

/// One section of a document: a reader whose keys have defaults, ranges and paths.
pub(crate) struct Section<'a> {
    name: &'static str,
    reader: Reader<'a>,
    defaults: &'static Table,
    notes: &'a mut Vec<String>,
    surroundings: &'a Surroundings,
}

impl<'a> Deref for Section<'a> {
    type Target = Reader<'a>;

    fn deref(&self) -> &Reader<'a> {
        &self.reader
    }
}

impl DerefMut for Section<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.reader
    }
}

impl<'a> Section<'a> {
    /// Returns the section named `name`.
    pub(crate) fn new(
        document: &'a mut Document,
        surroundings: &'a Surroundings,
        name: &'static str,
    ) -> Self {
        let Document { sections, problems, notes } = document;
        let defaults = defaults_of(name);
        let reader = Reader::new(name, sections.get(name).unwrap_or(defaults), problems);
        Self { name, reader, defaults, notes, surroundings }
    }

    /// Records a key that has an effect only together with another one.
    pub(crate) fn report_without(&mut self, key: &str, other: &str, advice: &str) {
        self.report(key, format!("`{key}` has no effect without {other}"), advice);
    }

    /// Records two keys that choose the same thing.
    pub(crate) fn report_twice(&mut self, key: &str, other: &str, what: &str) {
        let sentence = format!("`{key}` and `{other}` both choose {what}");
        self.report(key, sentence, format!("remove `{key}` or `{other}`"));
    }

    /// Returns the first of several keys that is written, or the first one.
    pub(crate) fn first_of<'k>(&self, keys: &[&'k str]) -> &'k str {
        let written = keys.iter().find(|key| self.is_written(key));
        written.or(keys.first()).copied().unwrap_or_default()
    }

    /// Records an error that several keys lead to, at the first key that is written.
    pub(crate) fn report_error_of(&mut self, keys: &[&str], error: impl Error + Send + Sync + 'static) {
        let key = self.first_of(keys);
        self.report_error(key, error);
    }

    /// Records a sentence about a key that has no effect.
    pub(crate) fn note(&mut self, sentence: String) {
        self.notes.push(sentence);
    }

    /// Returns whether no problem has been found so far.
    pub(crate) fn is_sound(&self) -> bool {
        self.problems.is_empty()
    }

    /// Returns whether the key is written after `--set`.
    pub(crate) fn is_argument(&self, key: &str) -> bool {
        self.place(key).is_argument()
    }

    /// Returns what `read` reads, of the table of the keys if the key is not written or wrong.
    fn or_default<T>(&mut self, read: impl Fn(&mut Reader<'_>) -> Option<T>) -> T {
        let read_default = || read(&mut Reader::new(self.name, self.defaults, &mut Vec::new()));
        match read(&mut self.reader) {
            Some(value) => value,
            None => read_default().expect("the table of the keys has the default, as the tests check"),
        }
    }

    /// Reads `true` or `false`.
    pub(crate) fn flag(&mut self, key: &'static str) -> bool {
        self.or_default(|reader| reader.flag(key))
    }

    /// Reads `true` or `false`, if it is written.
    pub(crate) fn given_flag(&mut self, key: &'static str) -> Option<bool> {
        self.reader.flag(key)
    }

    /// Reads a text that is not empty.
    pub(crate) fn text_or_default(&mut self, key: &'static str) -> String {
        self.or_default(|reader| reader.text(key))
    }

    /// Reads one of the words in `options`.
    pub(crate) fn word<T: Clone>(&mut self, key: &'static str, options: &[(&str, T)]) -> T {
        self.or_default(|reader| reader.word(key, options))
    }

    /// Reads one of the words in `options`, if one is written.
    pub(crate) fn given_word<T: Clone>(&mut self, key: &'static str, options: &[(&str, T)]) -> Option<T> {
        self.reader.word(key, options)
    }

    /// Reads a whole number.
    pub(crate) fn whole(&mut self, key: &'static str) -> u64 {
        let range = find(self.name, key).and_then(Key::range).unwrap_or(0..=i64::MAX as u64);
        self.or_default(|reader| reader.whole(key, range.clone()))
    }

    /// Reads a whole number, if it is written.
    pub(crate) fn given_whole(&mut self, key: &'static str) -> Option<u64> {
        let range = find(self.name, key).and_then(Key::range);
        self.reader.whole(key, range.expect("the table of the keys has the range, as the tests check"))
    }

    /// Reads a whole number that 32 bits hold.
    pub(crate) fn count(&mut self, key: &'static str) -> u32 {
        u32::try_from(self.whole(key)).unwrap_or(u32::MAX)
    }

    /// Reads a whole number that 32 bits hold, if it is written.
    pub(crate) fn given_count(&mut self, key: &'static str) -> Option<u32> {
        self.given_whole(key).and_then(|number| u32::try_from(number).ok())
    }

    /// Reads a whole number, or a list of them from 1 on that is not empty.
    pub(crate) fn one_or_several(&mut self, key: &'static str) -> Vec<u32> {
        let most = self.largest_count(key);
        self.or_default(|reader| one_or_several(reader, key, most))
    }

    /// Like [`Section::one_or_several`], if it is written.
    pub(crate) fn given_one_or_several(&mut self, key: &'static str) -> Option<Vec<u32>> {
        let most = self.largest_count(key);
        one_or_several(&mut self.reader, key, most)
    }

    fn largest_count(&self, key: &str) -> u32 {
        let range = find(self.name, key).and_then(Key::range);
        range.and_then(|range| u32::try_from(*range.end()).ok()).unwrap_or(LARGEST_COUNT)
    }

    /// Reads a number with or without a fraction, if it is written.
    pub(crate) fn given_number(&mut self, key: &'static str) -> Option<f64> {
        let bound = find(self.name, key).and_then(Key::bound);
        match bound.expect("the table of the keys has the range, as the tests check") {
            (bound, false) => self.reader.number(key, bound),
            (bound, true) => self.reader.single(key, bound),
        }
    }

    /// Reads a number with or without a fraction.
    pub(crate) fn number(&mut self, key: &'static str) -> f64 {
        let default = self.defaults.get(key).and_then(Value::as_number);
        self.given_number(key).or(default).expect("the table of the keys has the default, as the tests check")
    }

    /// Reads two numbers that are rounded to single precision.
    pub(crate) fn pair(&mut self, key: &'static str) -> [f64; 2] {
        let bound = find(self.name, key).and_then(Key::bound).map_or(Bound::NonNegative, |(bound, _)| bound);
        self.or_default(|reader| reader.pair(key, bound))
    }

    /// Reads a path and makes it absolute: relative to the file's folder, or to the working folder after
    /// `--set`.
    pub(crate) fn path(&mut self, key: &'static str) -> Option<PathBuf> {
        let text = self.text(key)?;
        self.absolute_path(key, &text, &self.place(key))
    }

    /// Reads a folder that the run writes to. It is relative to the working folder, wherever the configuration
    /// is.
    pub(crate) fn folder(&mut self, key: &'static str) -> PathBuf {
        let text = self.text_or_default(key);
        self.absolute_path(key, &text, &Place::Default).unwrap_or_default()
    }

    fn absolute_path(&mut self, key: &str, text: &str, place: &Place) -> Option<PathBuf> {
        let path = self.surroundings.path(text, place);
        path.map_err(|variable| report_no_variable(&mut self.reader, key, &variable)).ok()
    }

    /// Reads patterns of paths, made absolute as in [`Section::path`], or the word that selects the text in
    /// the binary.
    pub(crate) fn patterns(&mut self, key: &'static str) -> Option<Vec<String>> {
        let texts = self.texts(key)?;
        if texts == [BUILT_IN] {
            return Some(texts);
        }
        absolute(&mut self.reader, key, &texts, self.surroundings)
    }

    /// Reads the tables of a list, with the number of each in its messages if there are several or
    /// `are_numbered`. `name` is the name of such a table, and `expected` describes the list.
    pub(crate) fn read_tables<T>(
        &mut self,
        key: &'static str,
        (name, expected): (&str, &str),
        are_numbered: bool,
        read: impl Fn(&mut Reader<'_>, &Surroundings) -> Option<T>,
    ) -> Vec<T> {
        let tables = self.read(key, expected, |value| {
            value.as_list()?.iter().map(Value::as_table).collect::<Option<Vec<_>>>()
        });
        let tables = tables.unwrap_or_default();
        let are_numbered = are_numbered || tables.len() > 1;
        let row = |(number, table)| {
            let reader = self.reader.inner(name, table);
            let mut reader = if are_numbered { reader.numbered(number) } else { reader };
            let row = read(&mut reader, self.surroundings);
            reader.finish();
            row
        };
        (1..).zip(tables).filter_map(row).collect()
    }
}

fn one_or_several(reader: &mut Reader<'_>, key: &'static str, most: u32) -> Option<Vec<u32>> {
    match reader.value(key)?.as_list() {
        Some([]) => reader.empty(key),
        Some(_) => reader.counts(key, most),
        None => reader.count(key, 1..=most).map(|number| vec![number]),
    }
}

/// Reads patterns of paths of a table, made absolute as in [`Section::path`].
pub(crate) fn patterns_of(
    reader: &mut Reader<'_>,
    key: &'static str,
    surroundings: &Surroundings,
) -> Option<Vec<String>> {
    let texts = reader.texts(key)?;
    absolute(reader, key, &texts, surroundings)
}

fn absolute(
    reader: &mut Reader<'_>,
    key: &str,
    texts: &[String],
    surroundings: &Surroundings,
) -> Option<Vec<String>> {
    let place = reader.place(key);
    let patterns: Result<_, String> = texts.iter().map(|text| surroundings.pattern(text, &place)).collect();
    patterns.map_err(|variable| report_no_variable(reader, key, &variable)).ok()
}

fn report_no_variable(reader: &mut Reader<'_>, key: &str, variable: &str) {
    let sentence = format!("`{key}` begins with ${variable}, which is not set in the environment");
    reader.report(key, sentence, format!("set {variable}, or write the path out"));
}
