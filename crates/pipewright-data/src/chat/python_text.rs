//! Writes values as Python's `str` and `repr` do.

use std::fmt;
use std::sync::Arc;

use minijinja::value::{Object, ObjectRepr, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// The deepest nesting of a value that is written. Only a value that contains itself is deeper.
const DEPTH: usize = 500;

/// The longest text of a value that is not a text. A value that contains another one often has no end otherwise.
pub(crate) const LONGEST: usize = 2 << 20;

/// Text that a template writes as it is, and that is not a text for the engine: a number of a record that no type
/// holds, or a text whose special characters are replaced (Python's `Markup`).
#[derive(Debug)]
pub(crate) enum Written {
    /// An integer with more digits than the engine's integers.
    Integer(String),
    /// A text that filters such as `escape` and `safe` return.
    Markup(String),
}

impl Written {
    /// Returns the text of a value of this type.
    pub(crate) fn text_of(value: &Value) -> Option<&str> {
        value.downcast_object_ref::<Self>().map(|(Self::Integer(text) | Self::Markup(text))| text.as_str())
    }
}

impl Object for Written {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn is_true(self: &Arc<Self>) -> bool {
        let (Self::Integer(text) | Self::Markup(text)) = &**self;
        !text.is_empty()
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Integer(text) | Self::Markup(text)) = &**self;
        f.write_str(text)
    }
}

/// Returns the error of a template with a message.
pub(crate) fn error(reason: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason.into())
}

/// Returns what Python's `str` returns; nothing for an undefined value, as Jinja writes it.
pub(crate) fn text_of(value: &Value) -> Result<String, Error> {
    if let Some(text) = value.as_str().or_else(|| Written::text_of(value)) {
        return Ok(text.to_owned());
    }
    let mut text = String::new();
    if !value.is_undefined() {
        write_repr(value, 0, &mut text)?;
    }
    Ok(text)
}

/// Appends what Python's `repr` returns.
pub(crate) fn write_repr(value: &Value, depth: usize, text: &mut String) -> Result<(), Error> {
    if depth > DEPTH {
        return Err(error("a value contains itself"));
    }
    if text.len() > LONGEST {
        return Err(error("the text of a list or a table is too long"));
    }
    match value.kind() {
        ValueKind::String => write_quoted(value.as_str().unwrap_or_default(), text),
        ValueKind::Number if !value.is_integer() => text.push_str(&float(f64::try_from(value.clone())?)),
        ValueKind::Undefined => text.push_str("Undefined"),
        ValueKind::Map => {
            let keys: Vec<Value> = value.try_iter()?.collect();
            text.push('{');
            for (index, key) in keys.iter().enumerate() {
                text.push_str(if index > 0 { ", " } else { "" });
                write_repr(key, depth + 1, text)?;
                text.push_str(": ");
                write_repr(&value.get_item(key)?, depth + 1, text)?;
            }
            text.push('}');
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let brackets = if value.is_tuple() { ['(', ')'] } else { ['[', ']'] };
            text.push(brackets[0]);
            let mut count = 0;
            for item in value.try_iter()? {
                text.push_str(if count > 0 { ", " } else { "" });
                write_repr(&item, depth + 1, text)?;
                count += 1;
            }
            text.push_str(if value.is_tuple() && count == 1 { "," } else { "" });
            text.push(brackets[1]);
        }
        ValueKind::Bytes => {
            return Err(error("bytes that are not UTF-8 are not text"));
        }
        ValueKind::Invalid => return value.clone().try_iter().map(drop),
        _ => text.push_str(&value.to_string()),
    }
    Ok(())
}

/// Returns a floating-point number as Python writes it: the fewest digits that give this number, with an exponent
/// below 1e-4 and from 1e16.
pub(crate) fn float(number: f64) -> String {
    if number.is_nan() {
        return "nan".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or_default();
    if (-4..16).contains(&exponent) {
        let text = number.to_string();
        return if text.contains('.') { text } else { format!("{text}.0") };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.unsigned_abs())
}

/// Appends a text in quotation marks.
fn write_quoted(string: &str, text: &mut String) {
    let quote = if string.contains('\'') && !string.contains('"') { '"' } else { '\'' };
    text.push(quote);
    for letter in string.chars() {
        match letter {
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            '\\' => text.push_str("\\\\"),
            letter if letter == quote => text.extend(['\\', letter]),
            ' '..='~' => text.push(letter),
            letter if is_printable(letter) => text.push(letter),
            letter => {
                let code = u32::from(letter);
                text.push_str(&match code {
                    0..=0xff => format!("\\x{code:02x}"),
                    0x100..=0xffff => format!("\\u{code:04x}"),
                    _ => format!("\\U{code:08x}"),
                });
            }
        }
    }
    text.push(quote);
}

/// Returns whether Python writes a character as it is. The standard library uses the same categories of
/// characters; behind a letter, it writes marks as they are too.
fn is_printable(letter: char) -> bool {
    let text: String = ['a', letter].iter().collect();
    text.escape_debug().eq(text.chars())
}

/// Returns whether Python's `str.isspace` takes a character for white space.
pub(crate) fn is_space(letter: char) -> bool {
    letter.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&letter)
}
