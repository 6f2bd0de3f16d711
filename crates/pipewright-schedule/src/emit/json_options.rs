//! The keys of a JSON text as options with their lines: a key is the path to a value, such as `zero_optimization.stage`.

use serde_json::Value;

use crate::emit::nested_options::NestedOptions;
use crate::emit::options::Options;
use crate::emit::read_error::ReadError;

/// Reads JSON. Values that are `null` are left out. The text has no mark of its byte order.
///
/// # Errors
/// When it is not JSON, or a path is too long.
pub(super) fn json_options(text: &str) -> Result<(Value, Options), ReadError> {
    let value: Value = serde_json::from_str(text)
        .map_err(|error| ReadError::new(format!("the JSON cannot be read: {error}")).at(error.line()))?;
    let mut nested = NestedOptions::default();
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
            '{' | '[' => nested.open(letter == '[', line)?,
            '}' | ']' => nested.close(),
            ':' | ',' => {}
            letter if letter.is_whitespace() => line += token.matches('\n').count(),
            _ => match serde_json::from_str(token) {
                Ok(Value::String(text)) => nested.scalar(&text, false, line)?,
                _ => nested.scalar(token, token == "null", line)?,
            },
        }
        rest = &rest[token.len()..];
    }
    Ok((value, nested.finish()))
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
        let long = format!("{{\n\"{}\": 1}}", "x".repeat(1000));
        assert_eq!(error(&long), "line 2: the path to a value has more than 1000 bytes; use shorter keys");
        let deep = format!("{{\n\"a\": {}{}}}", "[".repeat(100), "]".repeat(100));
        assert_eq!(error(&deep), "line 2: too many values are inside each other");
    }
}
