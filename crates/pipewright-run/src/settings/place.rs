//! Where a setting was written: a file's line and column, a `--set` argument, or nowhere because it is a
//! default.
//!
//! ```text
//! train.toml:12:9          --set pipeline.ranks=0          the defaults
//! ```

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::text::shortened;

/// A configuration file as it was read.
#[derive(Debug)]
pub struct Source {
    /// The path as the user gave it.
    pub name: String,
    /// The text, to find lines and columns in and to show.
    pub text: String,
}

/// Where a setting was written.
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
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { source, .. } => match self.line_and_column() {
                Some((line, column)) => write!(f, "{}:{line}:{column}", source.name),
                None => f.write_str(&source.name),
            },
            Self::Set { argument } => write!(f, "--set {}", shortened(argument)),
            Self::Default => f.write_str("the defaults"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_count_characters() {
        let source = Arc::new(Source { name: "a.toml".into(), text: "[run]\nout = \"é\" # x\n".into() });
        let place = |needle: &str| {
            let start = source.text.find(needle).expect("the needle is in the text");
            Place::File { source: Arc::clone(&source), span: start..start + needle.len() }.to_string()
        };
        assert_eq!(place("[run]"), "a.toml:1:1");
        assert_eq!(place("out"), "a.toml:2:1");
        assert_eq!(place("# x"), "a.toml:2:11");
    }
}
