//! Reads the keys of one table by type.
//!
//! A getter returns `None` if the key is not written, or if its value is wrong. A wrong value is recorded as
//! a problem, and reading continues, so that all problems are reported together.

use std::error::Error;
use std::ops::RangeInclusive;

use crate::bound::Bound;
use crate::names::{advice_for_unknown, nearest, with_other_unit};
use crate::place::{Place, shortened};
use crate::problem::Problem;
use crate::quantity::{Measure, Refusal};
use crate::value::{Table, Value};

/// The keys of one table, as they are read.
pub struct Reader<'a> {
    name: &'a str,
    table: &'a Table,
    /// The problems found so far.
    pub problems: &'a mut Vec<Problem>,
    /// The keys that exist, because they were asked for.
    asked: Vec<&'static str>,
    /// The keys that must be written, and are not.
    missing: Vec<&'static str>,
    /// The beginning of each sentence about the table: its number, if it is one of several.
    prefix: String,
}

impl<'a> Reader<'a> {
    /// Returns a reader of a table. `name` is the table's name in messages, such as `[pipeline]`.
    pub fn new(name: &'a str, table: &'a Table, problems: &'a mut Vec<Problem>) -> Self {
        Self { name, table, problems, asked: Vec::new(), missing: Vec::new(), prefix: String::new() }
    }

    /// Returns a reader of a table that is a value of this one.
    pub fn inner<'b>(&'b mut self, name: &'b str, table: &'b Table) -> Reader<'b> {
        Reader { prefix: self.prefix.clone(), ..Reader::new(name, table, self.problems) }
    }

    /// Returns the reader with a number of the table that its messages name.
    pub fn numbered(self, number: usize) -> Self {
        Self { prefix: format!("table {number}: "), ..self }
    }

    /// Returns whether the key is written.
    pub fn is_written(&self, key: &str) -> bool {
        self.table.get(key).is_some()
    }

    /// Returns the place of a key's value, or of the table if the key is not written.
    pub fn place(&self, key: &str) -> Place {
        self.table.get(key).map_or(&self.table.place, |value| &value.place).clone()
    }

    /// Records a problem of a key, with advice.
    pub fn report(&mut self, key: &str, sentence: impl AsRef<str>, help: impl Into<String>) {
        self.report_at(self.place(key), sentence, help);
    }

    /// Records a problem at a place, with advice.
    pub fn report_at(&mut self, place: Place, sentence: impl AsRef<str>, help: impl Into<String>) {
        let sentence = format!("{}{}", self.prefix, sentence.as_ref());
        self.problems.push(Problem::new(place, sentence).help(help));
    }

    /// Records an error that a key leads to.
    pub fn report_error(&mut self, key: &str, error: impl Error + Send + Sync + 'static) {
        let problem = Problem::of(self.place(key), error);
        let sentence = format!("{}{}", self.prefix, problem.sentence);
        self.problems.push(Problem { sentence, ..problem });
    }

    /// Records a value of another type.
    pub fn wrong_type<T>(&mut self, key: &str, expected: &str) -> Option<T> {
        let found = self.table.get(key).map_or("missing", Value::kind);
        let sentence = format!("`{key}` is {found}, where {expected} is expected");
        self.report(key, sentence, format!("write {expected}"));
        None
    }

    /// Records a value out of its range.
    pub fn out_of_range<T>(&mut self, key: &str, value: &str, range: &str) -> Option<T> {
        let sentence = format!("`{key}` is {}, where {range} is expected", shortened(value));
        self.report(key, sentence, format!("write {range}"));
        None
    }

    /// Records a word that is not one of the known ones.
    pub fn unknown_word<'w>(&mut self, key: &str, word: &str, known: impl IntoIterator<Item = &'w str>) {
        let known: Vec<&str> = known.into_iter().collect();
        let help = match nearest(word, known.iter().copied()) {
            Some(meant) => format!("did you mean `{meant}`?"),
            None => "write one of these".to_owned(),
        };
        let sentence = format!("`{key}` is \"{}\", where {} is expected", shortened(word), known.join(", "));
        self.report(key, sentence, help);
    }

    /// Records a value that is empty.
    pub fn empty<T>(&mut self, key: &str) -> Option<T> {
        self.report(key, format!("`{key}` is empty"), format!("give `{key}` a value, or leave it out"));
        None
    }

    /// Records the keys that must be written and are not. [`Reader::finish`] reports them.
    pub fn require(&mut self, keys: &[&'static str]) {
        self.missing.extend(keys.iter().filter(|key| self.table.get(key).is_none()));
    }

    /// Returns the recorded keys, which are then not reported.
    pub fn take_missing(&mut self) -> Vec<&'static str> {
        std::mem::take(&mut self.missing)
    }

    /// Reports the keys that are written and do not exist, and those that are missing.
    pub fn finish(mut self) {
        let table = self.table;
        for (key, entry) in &table.entries {
            if self.asked.contains(&key.as_str()) {
                continue;
            }
            if let Some(meant) = with_other_unit(key, &self.asked) {
                self.missing.retain(|missing| *missing != meant);
                let sentence = format!("`{key}` has another unit: times are in seconds and sizes in bytes");
                let help = format!("write `{meant}`, and convert the value");
                self.report_at(entry.key_place.clone(), sentence, help);
            } else {
                let sentence = format!("unknown key `{}` in {}", shortened(key), self.name);
                let help = advice_for_unknown(key, &self.asked);
                self.report_at(entry.key_place.clone(), sentence, help);
            }
        }
        for key in self.take_missing() {
            let sentence = format!("`{key}` is missing in {}", self.name);
            self.report(key, sentence, format!("write `{key} = ...`"));
        }
    }

    /// Returns the value of a key, which the caller checks.
    pub fn value(&mut self, key: &'static str) -> Option<&'a Value> {
        self.asked.push(key);
        self.table.get(key)
    }

    /// Returns the value of a key as `read` makes it. `expected` describes what it makes something of.
    pub fn read<T>(
        &mut self,
        key: &'static str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Option<T> {
        read(self.value(key)?).or_else(|| self.wrong_type(key, expected))
    }

    /// Reads `true` or `false`.
    pub fn flag(&mut self, key: &'static str) -> Option<bool> {
        self.read(key, "true or false", Value::as_flag)
    }

    /// Reads a whole number of a range.
    pub fn whole(&mut self, key: &'static str, range: RangeInclusive<u64>) -> Option<u64> {
        let number = self.read(key, "a whole number", Value::as_whole)?;
        u64::try_from(number).ok().filter(|number| range.contains(number)).or_else(|| {
            let words = format!("a whole number from {} to {}", range.start(), range.end());
            self.out_of_range(key, &number.to_string(), &words)
        })
    }

    /// Reads a whole number of a range that 32 bits hold.
    pub fn count(&mut self, key: &'static str, range: RangeInclusive<u32>) -> Option<u32> {
        let number = self.whole(key, u64::from(*range.start())..=u64::from(*range.end()))?;
        u32::try_from(number).ok()
    }

    /// Reads a list of whole numbers from 1 to `most`.
    pub fn counts(&mut self, key: &'static str, most: u32) -> Option<Vec<u32>> {
        let expected = "a list of whole numbers, such as [4, 8]";
        let (value, numbers) = self.read(key, expected, |value| {
            let numbers: Option<Vec<i64>> = value.as_list()?.iter().map(Value::as_whole).collect();
            Some((value, numbers?))
        })?;
        let in_range = |number: i64| u32::try_from(number).ok().filter(|count| (1..=most).contains(count));
        numbers
            .into_iter()
            .map(in_range)
            .collect::<Option<_>>()
            .or_else(|| self.out_of_range(key, &value.shown(), &format!("whole numbers from 1 to {most}")))
    }

    /// Reads a number with or without a fraction.
    pub fn number(&mut self, key: &'static str, bound: Bound) -> Option<f64> {
        let number = self.read(key, "a number", Value::as_number)?;
        if bound.holds(number) {
            return Some(number);
        }
        let shown = self.table.get(key)?.shown();
        self.out_of_range(key, &shown, bound.words())
    }

    /// Like [`Reader::number`], for a number that is rounded to single precision.
    pub fn single(&mut self, key: &'static str, bound: Bound) -> Option<f64> {
        let number = self.number(key, bound)?;
        match bound.refuses_single(number) {
            None => Some(number),
            Some(range) => self.out_of_range(key, &format!("{number:?}"), &range),
        }
    }

    /// Reads two numbers that are rounded to single precision.
    pub fn pair(&mut self, key: &'static str, bound: Bound) -> Option<[f64; 2]> {
        let (value, pair) = self.read(key, "a list of two numbers", |value| {
            let numbers: Option<Vec<f64>> = value.as_list()?.iter().map(Value::as_number).collect();
            Some((value, <[f64; 2]>::try_from(numbers?).ok()?))
        })?;
        match pair.iter().find_map(|number| bound.refuses_single(*number)) {
            None => Some(pair),
            Some(range) => self.out_of_range(key, &value.shown(), &format!("for each of the two {range}")),
        }
    }

    /// Reads a number with a unit, in operations, bytes, seconds, watts, or one of the first two per second.
    pub fn measure(&mut self, measure: Measure) -> Option<f64> {
        let value = self.value(measure.key)?;
        let (key, written) = (measure.key, value.place.written());
        match measure.read(value) {
            Ok(number) => Some(number),
            Err(Refusal::Expected(range)) => self.out_of_range(key, &written, &range),
            Err(Refusal::Dimension { found, expected }) => {
                let sentence = format!("`{key}` is {written}, which measures {found}");
                self.report(key, sentence, format!("write {expected}"));
                None
            }
        }
    }

    /// Reads a text that is not empty.
    pub fn text(&mut self, key: &'static str) -> Option<String> {
        let text = self.read(key, "a text", Value::as_text)?;
        if text.is_empty() { self.empty(key) } else { Some(text.to_owned()) }
    }

    /// Reads one text or a list of texts, none of them empty.
    pub fn texts(&mut self, key: &'static str) -> Option<Vec<String>> {
        let texts: Vec<&str> = self.read(key, "a text or a list of texts", |value| {
            let single = value.as_text().map(|text| vec![text]);
            single.or_else(|| value.as_list()?.iter().map(Value::as_text).collect())
        })?;
        let is_empty = texts.is_empty() || texts.iter().any(|text| text.is_empty());
        if is_empty { self.empty(key) } else { Some(texts.into_iter().map(str::to_owned).collect()) }
    }

    /// Reads one of the words in `options`.
    pub fn word<T: Clone>(&mut self, key: &'static str, options: &[(&str, T)]) -> Option<T> {
        let text = self.text(key)?;
        self.option_of(key, &text, options)
    }

    /// Reads a list of the words in `options`, or one of them.
    pub fn words<T: Clone>(&mut self, key: &'static str, options: &[(&str, T)]) -> Option<Vec<T>> {
        if self.value(key)?.as_list().is_some_and(<[Value]>::is_empty) {
            return Some(Vec::new());
        }
        let texts = self.texts(key)?;
        Some(texts.iter().filter_map(|text| self.option_of(key, text, options)).collect())
    }

    /// Reads one of the words in `options`, or a value that is not a text, which `other` reads and `expected`
    /// describes.
    pub fn word_or<T: Clone>(
        &mut self,
        key: &'static str,
        options: &[(&str, T)],
        expected: &str,
        other: impl FnOnce(&Value) -> Option<T>,
    ) -> Option<T> {
        match self.value(key)?.as_text() {
            Some(text) => self.option_of(key, text, options),
            None => self.read(key, expected, other),
        }
    }

    fn option_of<T: Clone>(&mut self, key: &str, text: &str, options: &[(&str, T)]) -> Option<T> {
        let option = options.iter().find(|(name, _)| *name == text).map(|(_, option)| option.clone());
        if option.is_none() {
            self.unknown_word(key, text, options.iter().map(|(name, _)| *name));
        }
        option
    }

    /// Reads a table.
    pub fn table(&mut self, key: &'static str, expected: &str) -> Option<&'a Table> {
        self.read(key, expected, Value::as_table)
    }

    /// Reads a list of tables, or one table. `expected` describes them.
    pub fn tables(&mut self, key: &'static str, expected: &str) -> Option<Vec<&'a Table>> {
        self.read(key, expected, |value| match value.as_table() {
            Some(table) => Some(vec![table]),
            None => value.as_list()?.iter().map(Value::as_table).collect(),
        })
    }
}
