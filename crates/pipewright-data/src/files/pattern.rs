//! A pattern of paths, split into the folder where the search starts and the glob that paths below it must
//! match.
//!
//! ```text
//! src/**/*.rs   ->  start src, glob **/*.rs
//! notes.txt     ->  start notes.txt, no glob: the file itself
//! ```

use std::path::PathBuf;

use globset::{Glob, GlobBuilder};

use crate::error::DataError;

/// A parsed pattern.
#[derive(Debug)]
pub(crate) struct Pattern {
    /// The components before the first that has a wildcard.
    pub(crate) start: PathBuf,
    /// The glob that the path below `start` must match; `None` if `start` names a file.
    pub(crate) glob: Option<Glob>,
}

impl Pattern {
    /// Returns the pattern in `text`.
    pub(crate) fn parse(text: &str) -> Result<Self, DataError> {
        let mut start = PathBuf::new();
        let mut rest = text;
        loop {
            let (first, tail) =
                rest.split_once('/').map_or((rest, None), |(first, tail)| (first, Some(tail)));
            let Some(name) = literal(first) else {
                return Ok(Self { start, glob: Some(compile(text, rest)?) });
            };
            // An empty component is the root if it comes first, and is ignored elsewhere.
            start.push(if name.is_empty() && start.as_os_str().is_empty() && tail.is_some() {
                "/"
            } else {
                &name
            });
            match tail {
                Some(tail) => rest = tail,
                None => return Ok(Self { start, glob: None }),
            }
        }
    }
}

/// Compiles a glob whose wildcards other than `**` stay within one component.
pub(crate) fn compile(pattern: &str, glob: &str) -> Result<Glob, DataError> {
    GlobBuilder::new(glob).literal_separator(true).build().map_err(|error| malformed(pattern, &error))
}

/// Returns the error of a pattern that cannot be understood.
pub(crate) fn malformed(pattern: &str, error: &globset::Error) -> DataError {
    let problem =
        format!("not a pattern of paths: {}; check that brackets and braces are closed", error.kind());
    DataError::of(pattern.as_ref(), problem)
}

/// Returns the name that a component without wildcards matches; `[x]` and `\x` match the letter itself.
fn literal(component: &str) -> Option<String> {
    let mut name = String::with_capacity(component.len());
    let mut letters = component.chars();
    while let Some(letter) = letters.next() {
        match letter {
            '*' | '?' | '{' => return None,
            '\\' => name.push(letters.next()?),
            '[' => {
                let escaped = letters.next().filter(|letter| !matches!(letter, '!' | '^'))?;
                if letters.next() != Some(']') {
                    return None;
                }
                name.push(escaped);
            }
            letter => name.push(letter),
        }
    }
    Some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, start: &str, glob: Option<&str>) {
        let pattern = Pattern::parse(text).expect(text);
        let found = (pattern.start.to_str().expect("UTF-8"), pattern.glob.as_ref().map(Glob::glob));
        assert_eq!(found, (start, glob), "{text}");
    }

    #[test]
    fn where_the_search_starts() {
        check("**/*.md", "", Some("**/*.md"));
        check("a/b/*.md", "a/b", Some("*.md"));
        check("/a/b*/c.md", "/a", Some("b*/c.md"));
        check("/*.md", "/", Some("*.md"));
        check("../a/?.md", "../a", Some("?.md"));
        check("a/{b,c}.md", "a", Some("{b,c}.md"));
    }

    #[test]
    fn files_by_name() {
        check("a.txt", "a.txt", None);
        check("/a/b.txt", "/a/b.txt", None);
        check("a[[]b[]]/c\\*.txt", "a[b]/c*.txt", None);
        check("[ab].txt", "", Some("[ab].txt"));
    }

    #[test]
    fn not_a_pattern() {
        let error = Pattern::parse("a/{b").expect_err("an open brace");
        assert!(error.to_string().starts_with("a/{b: not a pattern of paths: "), "{error}");
    }
}
