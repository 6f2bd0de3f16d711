//! The keys of a JSON text as options with their lines: a key is the path to a value, such as `zero_optimization.stage`.

use serde_json::Value;

use crate::emit::options::{GivenOption, Options};
use crate::emit::read_error::ReadError;

/// The longest path to a value, in bytes.
const LONGEST: usize = 1000;

/// An object or a list that is open.
struct Open {
    is_list: bool,
    /// The key whose value is next, with its line.
    key: Option<(String, usize)>,
    /// The values of a list.
    values: Vec<String>,
}

/// Reads JSON. Values that are `null` are left out, and values of lists in lists are joined by commas. The text has no mark
/// of its byte order.
///
/// # Errors
/// When it is not JSON, or a path is too long.
pub(super) fn json_options(text: &str) -> Result<(Value, Options), ReadError> {
    let value: Value = serde_json::from_str(text)
        .map_err(|error| ReadError::new(format!("the JSON cannot be read: {error}")).at(error.line()))?;
    let mut list = Vec::new();
    let mut open: Vec<Open> = Vec::new();
    let (mut rest, mut line) = (text, 1);
    while let Some(letter) = rest.chars().next() {
        let token = match letter {
            '"' => string_of(rest),
            '{' | '}' | '[' | ']' | ':' | ',' => &rest[..1],
            _ => {
                &rest[..rest
                    .find(|letter| "{}[]:,\" \n\r\t".contains(letter))
                    .unwrap_or(rest.len())
                    .max(letter.len_utf8())]
            }
        };
        match letter {
            '{' | '[' => open.push(Open { is_list: letter == '[', key: None, values: Vec::new() }),
            '}' | ']' => close(&mut open, &mut list),
            ':' | ',' => {}
            letter if letter.is_whitespace() => line += token.matches('\n').count(),
            _ => add(&mut open, &mut list, token, line)?,
        }
        rest = &rest[token.len()..];
    }
    Ok((value, Options { list, ..Options::default() }))
}

/// Returns the string at the start of a text, with its quotes.
fn string_of(text: &str) -> &str {
    let mut is_escaped = false;
    for (index, byte) in text.bytes().enumerate().skip(1) {
        match byte {
            b'"' if !is_escaped => return &text[..=index],
            _ => is_escaped = byte == b'\\' && !is_escaped,
        }
    }
    text
}

/// Ends an object or a list.
fn close(open: &mut Vec<Open>, list: &mut Vec<GivenOption>) {
    let Some(closed) = open.pop() else { return };
    match open.last_mut() {
        Some(parent) if parent.is_list => parent.values.push(closed.values.join(",")),
        Some(_) if closed.is_list => {
            if let Some((name, line)) = path(open) {
                list.push(GivenOption::new(&name, closed.values, line));
            }
        }
        _ => {}
    }
    if let Some(parent) = open.last_mut() {
        parent.key = None;
    }
}

/// Adds a key or a value.
fn add(open: &mut [Open], list: &mut Vec<GivenOption>, token: &str, line: usize) -> Result<(), ReadError> {
    let text = match serde_json::from_str(token) {
        Ok(Value::String(text)) => text,
        _ => token.to_owned(),
    };
    let Some(last) = open.last_mut() else { return Ok(()) };
    if last.is_list {
        last.values.push(text);
    } else if last.key.is_none() {
        last.key = Some((text, line));
        let length: usize =
            open.iter().filter_map(|open| open.key.as_ref()).map(|(name, _)| 1 + name.len()).sum();
        if length > LONGEST {
            return Err(ReadError::new(format!("the path to a value has more than {LONGEST} bytes")).at(line));
        }
    } else {
        if let Some((name, line)) = path(open).filter(|_| token != "null") {
            list.push(GivenOption::new(&name, vec![text], line));
        }
        if let Some(last) = open.last_mut() {
            last.key = None;
        }
    }
    Ok(())
}

/// Returns the keys of the open objects, and the line of the last one.
fn path(open: &[Open]) -> Option<(String, usize)> {
    let keys: Option<Vec<&(String, usize)>> = open.iter().map(|open| open.key.as_ref()).collect();
    let keys = keys?;
    let names: Vec<&str> = keys.iter().map(|(name, _)| name.as_str()).collect();
    Some((names.join("."), keys.last()?.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_their_path_and_line() {
        let text = "\n{\n\t\"a\": {\"b\": 1,\n \"c\\\"}\": null}, \"d\": [\"x,\", [2, 3]],\n\n \"a2\": {\"b\": true}, \"e\": [{\"f\": 1}]}";
        let (_, options) = json_options(text).expect("JSON");
        let found: Vec<(&str, String, usize)> = options
            .list
            .iter()
            .map(|option| (option.name.as_str(), option.values.join(" "), option.line))
            .collect();
        let expected = [("a.b", "1", 3), ("d", "x, 2,3", 4), ("a2.b", "true", 6), ("e", "", 6)];
        assert_eq!(found, expected.map(|(name, values, line)| (name, values.to_owned(), line)));
    }

    #[test]
    fn mistakes_have_their_line() {
        let error = |text: &str| json_options(text).expect_err("a mistake").to_string();
        assert_eq!(
            error("{\n\"a\": 1"),
            "line 2: the JSON cannot be read: EOF while parsing an object at line 2 column 6"
        );
        let long = format!("{{\n\"{}\": 1}}", "x".repeat(LONGEST));
        assert_eq!(error(&long), "line 2: the path to a value has more than 1000 bytes");
    }
}
