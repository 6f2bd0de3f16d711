//! Values with their places, as TOML has them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use serde::Deserialize;
use toml::Spanned;
use toml::de::{DeString, DeTable, DeValue, ValueDeserializer};

use crate::place::{Place, Source};
use crate::problem::{Problem, Problems};

/// A table: its keys with their values.
#[derive(Clone, Debug)]
pub struct Table {
    /// The place of the table itself.
    pub place: Place,
    /// The keys.
    pub entries: BTreeMap<String, Entry>,
}

/// A key that is written, with its value.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The place of the key.
    pub key_place: Place,
    /// The value.
    pub value: Value,
}

/// A value with its place.
#[derive(Clone, Debug)]
pub struct Value {
    /// The place of the value.
    pub place: Place,
    content: ValueKind,
}

#[derive(Clone, Debug)]
enum ValueKind {
    /// A value without parts.
    Plain(toml::Value),
    List(Vec<Value>),
    Table(Table),
}

impl Table {
    /// Returns a table without keys.
    pub fn new(place: Place) -> Self {
        Self { place, entries: BTreeMap::new() }
    }

    /// Parses a file. A text that is not TOML, or has more than `most` bytes, has only problems.
    pub fn parse(source: Source, most: usize, problems: &mut Vec<Problem>) -> Option<Self> {
        let source = Arc::new(source);
        let file = Place::File { source: Arc::clone(&source), span: 0..0 };
        if source.text.len() > most {
            problems.push(Problem::new(file, format!("the file has more than {most} bytes")));
            return None;
        }
        let (table, errors) = DeTable::parse_recoverable(&source.text);
        if errors.is_empty() {
            return Some(Self::of(table.into_inner(), file.clone(), problems));
        }
        problems.extend(errors.iter().map(|error| {
            let sentence = format!("not valid TOML: {}", error.message().replace('\n', ", "));
            let problem = Problem::new(file.part(error.span().unwrap_or(0..0)), sentence);
            problem.help("write keys as `key = value` below a `[section]`")
        }));
        None
    }

    fn of(table: DeTable<'_>, place: Place, problems: &mut Vec<Problem>) -> Self {
        let entry = |(key, value): (Spanned<DeString<'_>>, Spanned<DeValue<'_>>)| {
            let (key_place, key): (Place, String) = (place.part(key.span()), key.into_inner().into_owned());
            let value = Value::of(&key, value, &place, problems)?;
            Some((key, Entry { key_place, value }))
        };
        let entries = table.into_iter().filter_map(entry).collect();
        Self { place, entries }
    }

    /// Reads a file of at most `most` bytes.
    ///
    /// # Errors
    /// Fails with every mistake in the file, in the order of their places.
    pub fn read<T>(
        source: impl Into<Source>,
        most: usize,
        read: impl FnOnce(&Self, &mut Vec<Problem>) -> Option<T>,
    ) -> Result<T, Problems> {
        let mut problems = Vec::new();
        let read =
            Self::parse(source.into(), most, &mut problems).and_then(|table| read(&table, &mut problems));
        match read.filter(|_| problems.is_empty()) {
            Some(read) => Ok(read),
            None => {
                problems.sort_by_key(|problem| problem.place.start());
                Err(Problems(problems))
            }
        }
    }

    /// Returns the value of a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.entries.get(key).map(|entry| &entry.value)
    }
}

impl Value {
    /// Reads the value of `key` from an argument, whose text is a value of TOML or a text without quotes.
    pub fn of_argument(key: &str, text: &str, place: &Place, problems: &mut Vec<Problem>) -> Option<Self> {
        let string = || Spanned::new(0..text.len(), DeValue::String(text.into()));
        Self::of(key, DeValue::parse(text).unwrap_or_else(|_| string()), place, problems)
    }

    fn of(key: &str, value: Spanned<DeValue<'_>>, file: &Place, problems: &mut Vec<Problem>) -> Option<Self> {
        let span: Range<usize> = value.span();
        let place = file.part(span.clone());
        let content = match value.into_inner() {
            DeValue::Array(items) => {
                let items = items.into_iter().map(|item| Self::of(key, item, file, problems));
                ValueKind::List(items.collect::<Option<_>>()?)
            }
            DeValue::Table(table) => ValueKind::Table(Table::of(table, place.clone(), problems)),
            plain => match toml::Value::deserialize(ValueDeserializer::from(Spanned::new(span, plain))) {
                Ok(plain) => ValueKind::Plain(plain),
                Err(error) => {
                    let sentence = format!("the value of `{key}` cannot be held: {}", error.message());
                    problems.push(Problem::new(place, sentence).help("write a number that fits 64 bits"));
                    return None;
                }
            },
        };
        Some(Self { place, content })
    }

    /// Returns the value without places.
    pub fn to_toml(&self) -> toml::Value {
        match &self.content {
            ValueKind::Plain(value) => value.clone(),
            ValueKind::List(items) => toml::Value::Array(items.iter().map(Self::to_toml).collect()),
            ValueKind::Table(table) => {
                let entries = table.entries.iter();
                let keys = entries.map(|(key, entry)| (key.clone(), entry.value.to_toml()));
                toml::Value::Table(keys.collect())
            }
        }
    }

    /// Returns the text, if the value is one.
    pub fn as_text(&self) -> Option<&str> {
        self.plain()?.as_str()
    }

    /// Returns the whole number, if the value is one.
    pub fn as_whole(&self) -> Option<i64> {
        self.plain()?.as_integer()
    }

    /// Returns the number with or without a fraction, if the value is one.
    pub fn as_number(&self) -> Option<f64> {
        match self.plain()? {
            // Whole numbers above 2^53 are rounded to the nearest float.
            toml::Value::Integer(number) => Some(*number as f64),
            toml::Value::Float(number) => Some(*number),
            _ => None,
        }
    }

    /// Returns `true` or `false`, if the value is one of them.
    pub fn as_flag(&self) -> Option<bool> {
        self.plain()?.as_bool()
    }

    /// Returns the items, if the value is a list.
    pub fn as_list(&self) -> Option<&[Self]> {
        match &self.content {
            ValueKind::List(items) => Some(items),
            ValueKind::Plain(_) | ValueKind::Table(_) => None,
        }
    }

    /// Returns the table, if the value is one.
    pub fn as_table(&self) -> Option<&Table> {
        match &self.content {
            ValueKind::Table(table) => Some(table),
            ValueKind::Plain(_) | ValueKind::List(_) => None,
        }
    }

    fn plain(&self) -> Option<&toml::Value> {
        match &self.content {
            ValueKind::Plain(value) => Some(value),
            ValueKind::List(_) | ValueKind::Table(_) => None,
        }
    }

    /// Returns the type in words.
    pub fn kind(&self) -> &'static str {
        match &self.content {
            ValueKind::Plain(toml::Value::String(_)) => "a text",
            ValueKind::Plain(toml::Value::Integer(_)) => "a whole number",
            ValueKind::Plain(toml::Value::Float(_)) => "a number with a fraction",
            ValueKind::Plain(toml::Value::Boolean(_)) => "true or false",
            ValueKind::Plain(_) => "a date",
            ValueKind::List(_) => "a list",
            ValueKind::Table(_) => "a table",
        }
    }

    /// Returns the text for a message. A large number keeps its exponent: TOML's own text of 1e308 has 309
    /// digits.
    pub fn shown(&self) -> String {
        match &self.content {
            ValueKind::Plain(toml::Value::Float(number)) if number.is_finite() => format!("{number:?}"),
            ValueKind::Plain(value) => value.to_string(),
            ValueKind::List(items) => {
                format!("[{}]", items.iter().map(Self::shown).collect::<Vec<_>>().join(", "))
            }
            ValueKind::Table(_) => self.to_toml().to_string(),
        }
    }
}
