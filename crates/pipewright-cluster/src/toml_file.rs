//! Reads TOML tables key by key, with the place of each mistake.

use thiserror::Error;
use toml::Spanned;
use toml::de::{DeString, DeTable, DeValue};

use crate::place::Place;
use crate::quantity::{Measure, QuantityError};
use crate::suggest::nearest;

/// The largest file that is read, in bytes.
pub const MAX_FILE: usize = 1 << 20;

/// A mistake in a file.
#[derive(Clone, PartialEq, Error)]
#[error("{place}: {kind}")]
pub struct TomlFileError {
    /// Where it is written.
    pub place: Place,
    /// The kind of mistake.
    pub kind: TomlFileErrorKind,
}

/// A kind of mistake in a file.
#[derive(Clone, PartialEq, Error)]
pub enum TomlFileErrorKind {
    /// The text is not TOML.
    #[error("{0}")]
    Syntax(String),
    /// The file is too large.
    #[error("the file has more than {MAX_FILE} bytes; such a file has some lines")]
    TooLarge,
    /// A key does not exist.
    #[error("unknown key `{key}`{hint}; known are {known}")]
    UnknownKey {
        /// The key.
        key: String,
        /// The nearest key, if there is one.
        hint: String,
        /// All keys.
        known: String,
    },
    /// A key is missing.
    #[error("`{key}` is missing{advice}")]
    Missing {
        /// The key.
        key: &'static str,
        /// Why it is needed, and what to do.
        advice: String,
    },
    /// The name of a machine means several known machines.
    #[error("`name` is `{name}`, which means {}; use the words of one of them", .machines.join(" and "))]
    SeveralMachines {
        /// The name.
        name: String,
        /// The names of the machines, in quotes.
        machines: Vec<String>,
    },
    /// A table has the same sizes as one before it.
    #[error("this [[{table}]] has the sizes of one before it; keep one of them")]
    Twice {
        /// The name of the table.
        table: &'static str,
    },
    /// A value is of another kind.
    #[error("`{key}` is {found}; write {expected}")]
    Kind {
        /// The key.
        key: String,
        /// The value, shortened.
        found: String,
        /// The expected kind.
        expected: String,
    },
    /// A number is not what its key measures.
    #[error(transparent)]
    Quantity(#[from] QuantityError),
}

pipewright_schedule::message_as_debug!(TomlFileError);
pipewright_schedule::message_as_debug!(TomlFileErrorKind);

pub(crate) type Key<'a> = Spanned<DeString<'a>>;
pub(crate) type Value<'a> = Spanned<DeValue<'a>>;

/// A text that is read.
#[derive(Clone, Copy)]
pub(crate) struct Reader<'a> {
    pub(crate) text: &'a str,
}

impl<'a> Reader<'a> {
    /// Parses a text.
    ///
    /// # Errors
    /// When it is too large or not TOML.
    pub(crate) fn parse(text: &'a str) -> Result<(Self, Spanned<DeTable<'a>>), TomlFileError> {
        let reader = Self { text };
        if text.len() > MAX_FILE {
            return Err(reader.at(0, TomlFileErrorKind::TooLarge));
        }
        let table = DeTable::parse(text).map_err(|error| {
            let byte = error.span().map_or(0, |span| span.start);
            reader.at(byte, TomlFileErrorKind::Syntax(error.message().to_owned()))
        })?;
        Ok((reader, table))
    }

    pub(crate) fn at(self, byte: usize, kind: TomlFileErrorKind) -> TomlFileError {
        TomlFileError { place: Place::of(self.text, byte), kind }
    }

    pub(crate) fn unknown(self, key: &Key<'_>, known: &[&str]) -> TomlFileError {
        let word: &str = key.get_ref();
        let hint = nearest(word, known.iter().copied());
        let (short, known) = (word.chars().take(64).collect(), known.join(", "));
        self.at(key.span().start, TomlFileErrorKind::UnknownKey { key: short, hint, known })
    }

    pub(crate) fn wrong_kind(self, key: &str, value: &Value<'_>, expected: &str) -> TomlFileError {
        let written = self.text.get(value.span()).unwrap_or_default();
        let found = written.lines().next().unwrap_or_default().chars().take(64).collect();
        let kind = TomlFileErrorKind::Kind { key: key.into(), found, expected: expected.into() };
        self.at(value.span().start, kind)
    }

    /// Returns the number of a value.
    pub(crate) fn number(self, measure: Measure, value: &Value<'_>) -> Result<f64, TomlFileError> {
        measure.value(value.get_ref()).map_err(|error| self.at(value.span().start, error.into()))
    }

    /// Returns the number of a key of a table, if the table has it.
    pub(crate) fn number_in(
        self,
        table: &DeTable<'_>,
        measure: Measure,
    ) -> Result<Option<f64>, TomlFileError> {
        table.get(measure.key).map(|value| self.number(measure, value)).transpose()
    }

    /// Returns the text of a key of a table, if the table has it.
    pub(crate) fn text_in(self, table: &DeTable<'_>, key: &str) -> Result<Option<String>, TomlFileError> {
        let Some(value) = table.get(key) else { return Ok(None) };
        match value.get_ref() {
            DeValue::String(text) => Ok(Some(text.to_string())),
            _ => Err(self.wrong_kind(key, value, "text in quotes")),
        }
    }

    /// Returns the one of `words` that a value is.
    pub(crate) fn word<T: Copy>(
        self,
        key: &str,
        value: &Value<'_>,
        words: &[(&str, T)],
    ) -> Result<T, TomlFileError> {
        let word = match value.get_ref() {
            DeValue::String(word) => word.as_ref(),
            _ => "",
        };
        words.iter().find(|(known, _)| *known == word).map(|&(_, meaning)| meaning).ok_or_else(|| {
            let known: Vec<String> = words.iter().map(|(known, _)| format!("\"{known}\"")).collect();
            self.wrong_kind(key, value, &format!("one of {}", known.join(", ")))
        })
    }
}
