//! The filter `tojson` of chat templates, which writes JSON as Python's `json.dumps` does.
//!
//! Transformers replaces Jinja's filter: nothing is escaped for HTML, separators have a space, and `indent`,
//! `ensure_ascii`, `separators` and `sort_keys` are arguments.

use std::fmt::Write;

use minijinja::value::ValueKind;
use minijinja::{Error, State, Value};

use crate::chat::arguments::Arguments;
use crate::chat::python_text::{LONGEST, Written, error, float, text_of};

/// How JSON is written.
struct Style {
    indent: Option<String>,
    is_ascii: bool,
    /// Between items, and between a key and its value.
    separators: (String, String),
    is_sorted: bool,
}

/// The deepest nesting of a value that is written. Only a value that contains itself is deeper.
const DEPTH: usize = 500;

/// Writes a value as JSON.
pub(crate) fn tojson(_: &State<'_, '_>, value: &Value, given: &[Value]) -> Result<Value, Error> {
    let arguments = Arguments::of(["ensure_ascii", "indent", "separators", "sort_keys"], given)?;
    let indent = match arguments.get(1) {
        None => None,
        Some(indent) if indent.as_str().is_some() => indent.as_str().map(str::to_owned),
        Some(_) if arguments.size(1, 0)? > 1000 => return Err(error("`indent` is at most 1000")),
        Some(_) => Some(" ".repeat(arguments.size(1, 0)?)),
    };
    let separators = match arguments.get(2) {
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
        Some(pair) => match &*pair.try_iter()?.collect::<Vec<Value>>() {
            [items, keys] => (text_of(items)?, text_of(keys)?),
            _ => return Err(error("`separators` takes two texts")),
        },
    };
    let style = Style { indent, is_ascii: arguments.is_true(0), separators, is_sorted: arguments.is_true(3) };
    let mut text = String::new();
    style.write(value, 0, &mut text)?;
    Ok(Value::from(text))
}

impl Style {
    fn write(&self, value: &Value, depth: usize, text: &mut String) -> Result<(), Error> {
        if depth > DEPTH {
            return Err(error("a value contains itself"));
        }
        if text.len() > LONGEST {
            return Err(error("the JSON of a value is too long"));
        }
        match value.kind() {
            ValueKind::None => text.push_str("null"),
            ValueKind::Bool => text.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => text.push_str(&number(value)?),
            ValueKind::String => self.write_string(value.as_str().unwrap_or_default(), text),
            ValueKind::Map => self.write_map(value, depth, text)?,
            ValueKind::Plain => match value.downcast_object_ref::<Written>() {
                Some(Written::Integer(digits)) => text.push_str(digits),
                Some(Written::Markup(markup)) => self.write_string(markup, text),
                None => self.write_string(&value.to_string(), text),
            },
            ValueKind::Undefined | ValueKind::Bytes => {
                return Err(error(format!("a value of the type {} cannot be JSON", value.kind())));
            }
            _ => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.write_all(['[', ']'], items.iter(), depth, text, |item, text| {
                    self.write(item, depth + 1, text)
                })?;
            }
        }
        Ok(())
    }

    fn write_map(&self, map: &Value, depth: usize, text: &mut String) -> Result<(), Error> {
        let mut keys: Vec<Value> = map.try_iter()?.collect();
        if self.is_sorted {
            keys.sort();
        }
        self.write_all(['{', '}'], keys.iter(), depth, text, |key, text| {
            match key.kind() {
                ValueKind::String => self.write_string(key.as_str().unwrap_or_default(), text),
                ValueKind::Bool | ValueKind::None | ValueKind::Number => {
                    let mut written = String::new();
                    self.write(key, depth, &mut written)?;
                    self.write_string(&written, text);
                }
                other => return Err(error(format!("a key of the type {other} cannot be JSON"))),
            }
            text.push_str(&self.separators.1);
            self.write(&map.get_item(key)?, depth + 1, text)
        })
    }

    fn write_all<'v>(
        &self,
        [open, close]: [char; 2],
        items: impl ExactSizeIterator<Item = &'v Value>,
        depth: usize,
        text: &mut String,
        mut write: impl FnMut(&'v Value, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let is_empty = items.len() == 0;
        text.push(open);
        for (index, item) in items.enumerate() {
            if index > 0 {
                text.push_str(&self.separators.0);
            }
            self.begin_line(depth + 1, text);
            write(item, text)?;
        }
        if !is_empty {
            self.begin_line(depth, text);
        }
        text.push(close);
        Ok(())
    }

    fn begin_line(&self, depth: usize, text: &mut String) {
        if let Some(indent) = &self.indent {
            text.push('\n');
            text.extend(std::iter::repeat_n(indent.as_str(), depth));
        }
    }

    fn write_string(&self, string: &str, text: &mut String) {
        text.push('"');
        for letter in string.chars() {
            match letter {
                '"' => text.push_str("\\\""),
                '\\' => text.push_str("\\\\"),
                '\n' => text.push_str("\\n"),
                '\r' => text.push_str("\\r"),
                '\t' => text.push_str("\\t"),
                '\u{8}' => text.push_str("\\b"),
                '\u{c}' => text.push_str("\\f"),
                letter if letter < ' ' || (self.is_ascii && !letter.is_ascii()) => {
                    for unit in letter.encode_utf16(&mut [0; 2]) {
                        write!(text, "\\u{unit:04x}").expect("a string takes all text");
                    }
                }
                letter => text.push(letter),
            }
        }
        text.push('"');
    }
}

/// Returns a number. Python writes numbers that JSON does not have too.
fn number(value: &Value) -> Result<String, Error> {
    if value.is_integer() {
        return text_of(value);
    }
    let number = f64::try_from(value.clone())?;
    Ok(match number {
        _ if number.is_nan() => "NaN".to_owned(),
        f64::INFINITY => "Infinity".to_owned(),
        f64::NEG_INFINITY => "-Infinity".to_owned(),
        number => float(number),
    })
}
