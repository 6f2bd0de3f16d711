//! The filter `tojson` of chat templates, which writes JSON as Python's `json.dumps` does.
//!
//! Transformers replaces Jinja's filter: nothing is escaped for HTML, separators have a space, and `indent`,
//! `ensure_ascii`, `separators` and `sort_keys` are arguments.

use std::fmt::Write;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// How JSON is written.
struct Style {
    indent: Option<usize>,
    is_ascii: bool,
    /// Between items, and between a key and its value.
    separators: (String, String),
    is_sorted: bool,
}

/// Writes a value as JSON.
pub(crate) fn tojson(value: &Value, arguments: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = arguments.get("indent")?;
    let separators: Option<Vec<String>> = arguments.get("separators")?;
    let separators = match separators.as_deref() {
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
        Some([items, keys]) => (items.clone(), keys.clone()),
        Some(_) => {
            return Err(Error::new(ErrorKind::InvalidOperation, "`separators` takes two texts"));
        }
    };
    let style = Style {
        indent,
        is_ascii: arguments.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        separators,
        is_sorted: arguments.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    arguments.assert_all_used()?;
    let mut text = String::new();
    style.write(value, 0, &mut text)?;
    Ok(text)
}

impl Style {
    fn write(&self, value: &Value, depth: usize, text: &mut String) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None | ValueKind::Undefined => text.push_str("null"),
            ValueKind::Bool => text.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => write!(text, "{value}").expect("a string takes all text"),
            ValueKind::String => self.write_string(value.as_str().unwrap_or_default(), text),
            ValueKind::Map => self.write_map(value, depth, text)?,
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
            self.write_string(&key.to_string(), text);
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
        if let Some(indent) = self.indent {
            text.push('\n');
            text.extend(std::iter::repeat_n(' ', indent * depth));
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
