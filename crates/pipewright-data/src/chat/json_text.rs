//! Reads JSON as Python's `json` module does: integers of any length keep their digits, and floating-point
//! numbers are the nearest ones.

use minijinja::Value;
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::chat::python_text::Written;

/// The most lists and objects inside each other, as in `serde_json`.
const DEPTH: usize = 127;

/// Parses a text.
///
/// # Errors
/// When the text is not JSON.
pub(crate) fn parse(text: &[u8]) -> Result<Value, serde_json::Error> {
    // The reader below gets well-formed text. This check has no limit of depth.
    let mut check = serde_json::Deserializer::from_slice(text);
    IgnoredAny::deserialize(&mut check)?;
    check.end()?;
    // It does not read the characters of strings. The engine's own reader knows the place of such an error.
    JsonReader { text, at: 0, depth: 0 }
        .value()
        .map_err(|error| serde_json::from_slice::<Value>(text).err().unwrap_or(error))
}

/// Reads well-formed JSON.
struct JsonReader<'a> {
    text: &'a [u8],
    at: usize,
    depth: usize,
}

impl<'a> JsonReader<'a> {
    /// Returns the next byte that is not white space.
    fn peek(&mut self) -> u8 {
        while self.text.get(self.at).is_some_and(u8::is_ascii_whitespace) {
            self.at += 1;
        }
        self.text.get(self.at).copied().unwrap_or_default()
    }

    fn value(&mut self) -> Result<Value, serde_json::Error> {
        match self.peek() {
            b'{' | b'[' if self.depth == DEPTH => Err(serde::de::Error::custom("recursion limit exceeded")),
            b'{' => self.inside(Self::object),
            b'[' => self.inside(Self::array),
            b'"' => {
                let text: std::borrow::Cow<'_, str> = serde_json::from_slice(self.string())?;
                Ok(Value::from(&*text))
            }
            _ => Ok(scalar(self.scalar())),
        }
    }

    /// Reads an object or a list, which is one level deeper.
    fn inside(
        &mut self,
        read: fn(&mut Self) -> Result<Value, serde_json::Error>,
    ) -> Result<Value, serde_json::Error> {
        self.depth += 1;
        let value = read(self)?;
        self.depth -= 1;
        Ok(value)
    }

    fn object(&mut self) -> Result<Value, serde_json::Error> {
        self.at += 1;
        let mut pairs = Vec::new();
        while self.peek() != b'}' {
            let key: String = serde_json::from_slice(self.string())?;
            // The colon.
            self.peek();
            self.at += 1;
            pairs.push((key, self.value()?));
            if self.peek() == b',' {
                self.at += 1;
                self.peek();
            }
        }
        self.at += 1;
        Ok(Value::from_pairs(pairs))
    }

    fn array(&mut self) -> Result<Value, serde_json::Error> {
        self.at += 1;
        let mut items = Vec::new();
        while self.peek() != b']' {
            items.push(self.value()?);
            if self.peek() == b',' {
                self.at += 1;
            }
        }
        self.at += 1;
        Ok(Value::from(items))
    }

    /// Returns a string with its quotation marks.
    fn string(&mut self) -> &'a [u8] {
        let start = self.at;
        self.at += 1;
        while let Some(&byte) = self.text.get(self.at).filter(|byte| **byte != b'"') {
            self.at += if byte == b'\\' { 2 } else { 1 };
        }
        self.at += 1;
        &self.text[start..self.at.min(self.text.len())]
    }

    /// Returns a number or a word.
    fn scalar(&mut self) -> &'a [u8] {
        let rest = &self.text[self.at..];
        let is_end = |byte: &u8| matches!(byte, b',' | b']' | b'}') || byte.is_ascii_whitespace();
        let length = rest.iter().position(is_end).unwrap_or(rest.len());
        self.at += length.max(1).min(rest.len());
        &rest[..length]
    }
}

fn scalar(text: &[u8]) -> Value {
    let text = std::str::from_utf8(text).unwrap_or_default();
    match text {
        "true" => Value::from(true),
        "false" => Value::from(false),
        "null" => Value::from(()),
        _ if text.contains(['.', 'e', 'E']) => Value::from(text.parse::<f64>().unwrap_or(f64::NAN)),
        _ => text
            .parse::<i64>()
            .map(Value::from)
            .or_else(|_| text.parse::<i128>().map(Value::from))
            .unwrap_or_else(|_| Value::from_object(Written::Integer(text.to_owned()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::python_text::text_of;

    fn check(text: &str, expected: &str) {
        let value = parse(text.as_bytes()).expect("JSON");
        assert_eq!(text_of(&value).expect("text"), expected, "{text}");
    }

    #[test]
    fn values_are_read_as_python_reads_them() {
        check(
            r#" { "a" : [ 1 , -0, 1.0, 1E+2, true, null, "x\"\\\u00e9" ] , "b":{}, "c":[] } "#,
            r#"{'a': [1, 0, 1.0, 100.0, True, None, 'x"\\é'], 'b': {}, 'c': []}"#,
        );
        check(
            "[1e-5, 0.0001, 1e16, 1e15, 123456789012345680.0, 1e20, 2.5e-310, 1e400]",
            "[1e-05, 0.0001, 1e+16, 1000000000000000.0, 1.2345678901234568e+17, 1e+20, 2.5e-310, inf]",
        );
        check(
            "[100000000000000000000, -18446744073709551616]",
            "[100000000000000000000, -18446744073709551616]",
        );
        let digits = "9".repeat(60);
        check(&format!("[{digits}, -{digits}]"), &format!("[{digits}, -{digits}]"));
        check(r#"{"a": 1, "b": 2, "a": 3}"#, "{'a': 3, 'b': 2}");
        check("31.245270191439438", "31.245270191439438");
    }

    #[test]
    fn other_text_is_refused() {
        for text in ["", "{", "[1,]", "{\"a\" 1}", "nul", "01", "\"a", "1 2", "[1] x"] {
            assert!(parse(text.as_bytes()).is_err(), "{text}");
        }
        for depth in [128, 1_000_000] {
            let text = "[".repeat(depth) + &"]".repeat(depth);
            let error = parse(text.as_bytes()).expect_err("it is too deep").to_string();
            assert!(error.starts_with("recursion limit exceeded"), "{error}");
        }
        parse(("[".repeat(127) + &"]".repeat(127)).as_bytes()).expect("JSON");
    }
}
