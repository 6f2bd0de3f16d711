//! Where a value was written: a file's line and column, a `--set` argument, or nowhere because it is a
//! default.
//!
//! ```text
//! train.toml:12:9          --set pipeline.ranks=0          the defaults
//! ```

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// A file as it was read.
#[derive(Debug)]
pub struct Source {
    /// The path as the user gave it; empty if the text has no name.
    pub name: String,
    /// The text, to find lines and columns in and to show.
    pub text: String,
}

impl From<&str> for Source {
    /// A text without a name.
    fn from(text: &str) -> Self {
        Self { name: String::new(), text: text.to_owned() }
    }
}

impl From<&String> for Source {
    fn from(text: &String) -> Self {
        text.as_str().into()
    }
}

/// Where a value was written.
#[derive(Clone, Debug)]
pub enum Place {
    /// A range of bytes of a file.
    File {
        /// The file.
        source: Arc<Source>,
        /// The bytes, within the file's text.
        span: Range<usize>,
    },
    /// An argument of the command line.
    Set {
        /// The text after `--set`.
        argument: String,
    },
    /// Nowhere: the value is a default.
    Default,
}

impl Place {
    /// Returns whether the value was written after `--set`.
    pub fn is_argument(&self) -> bool {
        matches!(self, Self::Set { .. })
    }

    /// Returns the place of some bytes of the same file or argument.
    pub(crate) fn part(&self, span: Range<usize>) -> Self {
        match self {
            Self::File { source, .. } => Self::File { source: Arc::clone(source), span },
            other => other.clone(),
        }
    }

    /// Returns the first byte of a place in a file, or 0.
    pub fn start(&self) -> usize {
        match self {
            Self::File { span, .. } => span.start,
            Self::Set { .. } | Self::Default => 0,
        }
    }

    /// Returns the line and the column of a place in a file, counted from 1. Columns count characters.
    pub fn line_and_column(&self) -> Option<(usize, usize)> {
        let Self::File { source, span } = self else { return None };
        let before = source.text.get(..span.start.min(source.text.len()))?;
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        Some((before.matches('\n').count() + 1, before[line_start..].chars().count() + 1))
    }

    /// Returns the number of bytes of the lines of a place in a file, or 0.
    pub fn line_length(&self) -> usize {
        let Self::File { source, span } = self else { return 0 };
        let (before, after) = (source.text.get(..span.start), source.text.get(span.end..));
        let [before, after] = [before, after].map(Option::unwrap_or_default);
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        span.len() + (before.len() - line_start) + after.find('\n').unwrap_or(after.len())
    }

    /// Returns the first line of what is written there, shortened.
    pub(crate) fn written(&self) -> Cow<'_, str> {
        let written = match self {
            Self::File { source, span } => source.text.get(span.clone()).unwrap_or_default(),
            Self::Set { argument } => argument.split_once('=').map_or("", |(_, value)| value.trim()),
            Self::Default => "",
        };
        shortened(written.lines().next().unwrap_or_default())
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self, self.line_and_column()) {
            (Self::File { source, .. }, Some((line, column))) if source.name.is_empty() => {
                write!(f, "line {line}, column {column}")
            }
            (Self::File { source, .. }, Some((line, column))) => write!(f, "{}:{line}:{column}", source.name),
            (Self::File { source, .. }, None) => f.write_str(&source.name),
            (Self::Set { argument }, _) => write!(f, "--set {}", shortened(argument)),
            (Self::Default, _) => f.write_str("the defaults"),
        }
    }
}

/// The most characters of a value that a message repeats.
const LONGEST: usize = 120;

/// Returns a value, or its beginning and its length if it is long.
pub fn shortened(value: &str) -> Cow<'_, str> {
    if value.chars().count() <= LONGEST {
        return Cow::Borrowed(value);
    }
    let beginning: String = value.chars().take(LONGEST / 2).collect();
    Cow::Owned(format!("{beginning}... ({} characters)", value.chars().count()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_count_characters() {
        let check = |name: &str, needle: &str, expected: &str| {
            let source = Source { name: name.into(), text: "[run]\nout = \"é\" # x\n".into() };
            let start = source.text.find(needle).expect("the needle is in the text");
            let place = Place::File { source: Arc::new(source), span: start..start + needle.len() };
            assert_eq!(place.to_string(), expected);
        };
        check("a.toml", "[run]", "a.toml:1:1");
        check("a.toml", "out", "a.toml:2:1");
        check("a.toml", "# x", "a.toml:2:11");
        check("", "# x", "line 2, column 11");
    }

    #[test]
    fn long_values_are_cut() {
        assert_eq!(shortened("F=1"), "F=1");
        assert_eq!(shortened(&"1".repeat(300)), format!("{}... (300 characters)", "1".repeat(60)));
        assert_eq!(shortened(&"\u{e4}".repeat(121)), format!("{}... (121 characters)", "\u{e4}".repeat(60)));
    }
}
