//! Turns relative paths and paths that begin with `~` or `$NAME` into absolute paths.
//!
//! A relative path in a file is relative to that file's folder. A path after `--set`, and `run.out` in all
//! cases, is relative to the working folder. Settings hold absolute paths, so that the effective
//! configuration means the same in any folder.

use std::path::{Path, PathBuf};

use pipewright_document::Place;

/// The parts of the environment that a path depends on besides its text.
pub struct Surroundings {
    /// The absolute folder that the command runs in.
    pub working_folder: PathBuf,
    /// Looks up an environment variable by name.
    pub variable: fn(&str) -> Option<String>,
}

impl Surroundings {
    /// Reads the process's working folder and environment.
    pub fn of_process() -> std::io::Result<Self> {
        let working_folder = std::env::current_dir()?;
        if working_folder.to_str().is_none() {
            // The effective configuration is UTF-8 text with absolute paths.
            let message = format!("its path, {}, is not UTF-8", working_folder.display());
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, message));
        }
        Ok(Self {
            working_folder,
            variable: |name| std::env::var(name).ok().filter(|value| !value.is_empty()),
        })
    }

    /// Returns the absolute path for `text` written at `place`, or the variable that is not set.
    pub(super) fn path(&self, text: &str, place: &Place) -> Result<PathBuf, String> {
        Ok(match self.expand(text)? {
            Some((start, rest)) => Path::new(&start).join(rest),
            None => self.base(place).join(text),
        })
    }

    /// Returns the absolute pattern for `text` written at `place`. A leading `!` is kept. A pattern that
    /// begins with `!**/` is not changed, because it excludes files in any folder.
    pub(super) fn pattern(&self, text: &str, place: &Place) -> Result<String, String> {
        if text.starts_with("!**/") {
            return Ok(text.to_owned());
        }
        let (mark, pattern) = text.strip_prefix('!').map_or(("", text), |pattern| ("!", pattern));
        let (start, rest) = match self.expand(pattern)? {
            Some((start, rest)) => (start, rest),
            None if Path::new(pattern).is_absolute() => return Ok(text.to_owned()),
            None => (self.base(place).to_string_lossy().into_owned(), pattern.to_owned()),
        };
        let start = globset::escape(start.trim_end_matches('/'));
        Ok(match rest.strip_prefix("./").unwrap_or(&rest) {
            "" => format!("{mark}{start}"),
            rest => format!("{mark}{start}/{rest}"),
        })
    }

    /// Returns the folder that relative paths written at `place` are relative to.
    fn base(&self, place: &Place) -> PathBuf {
        match place {
            Place::File { source, .. } => {
                let folder = Path::new(&source.name).parent().unwrap_or(Path::new(""));
                self.working_folder.join(folder)
            }
            Place::Set { .. } | Place::Default => self.working_folder.clone(),
        }
    }

    /// Returns the value of a leading `~` or `$NAME`, and the rest of the path without the slash between
    /// them.
    fn expand(&self, text: &str) -> Result<Option<(String, String)>, String> {
        let (first, rest) = text.split_once('/').unwrap_or((text, ""));
        let name = match first.strip_prefix('$') {
            _ if first == "~" => "HOME",
            Some(name) => name.strip_prefix('{').and_then(|name| name.strip_suffix('}')).unwrap_or(name),
            None => return Ok(None),
        };
        let value = (self.variable)(name).ok_or_else(|| name.to_owned())?;
        Ok(Some((value, rest.to_owned())))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use pipewright_document::Source;

    use super::*;

    fn surroundings() -> Surroundings {
        let variable = |name: &str| match name {
            "HOME" => Some("/home/a[b]".to_owned()),
            "CARGO_HOME" => Some("/cargo/".to_owned()),
            _ => None,
        };
        Surroundings { working_folder: "/work".into(), variable }
    }

    fn in_file() -> Place {
        let source = Source { name: "sub/a.toml".into(), text: String::new() };
        Place::File { source: Arc::new(source), span: 0..0 }
    }

    #[test]
    fn patterns() {
        let check = |text: &str, place: &Place, expected: &str| {
            assert_eq!(surroundings().pattern(text, place).expect(text), expected);
        };
        check("**/*.md", &Place::Default, "/work/**/*.md");
        check("./*.md", &in_file(), "/work/sub/*.md");
        check("!*.md", &in_file(), "!/work/sub/*.md");
        check("!**/*.md", &in_file(), "!**/*.md");
        check("/data/*.md", &in_file(), "/data/*.md");
        check("~/x/*.md", &in_file(), "/home/a[[]b[]]/x/*.md");
        check("$CARGO_HOME/registry/**/*.rs", &in_file(), "/cargo/registry/**/*.rs");
        check("${CARGO_HOME}/*.rs", &in_file(), "/cargo/*.rs");
        check("$CARGO_HOME", &in_file(), "/cargo");
    }

    #[test]
    fn paths() {
        let check = |text: &str, place: &Place, expected: &str| {
            assert_eq!(surroundings().path(text, place).expect(text), Path::new(expected));
        };
        check("runs/a", &Place::Default, "/work/runs/a");
        check("runs/a", &in_file(), "/work/sub/runs/a");
        check("~/a", &in_file(), "/home/a[b]/a");
        check("/a", &in_file(), "/a");
        check("a~", &in_file(), "/work/sub/a~");
    }

    #[test]
    fn a_variable_that_is_not_set() {
        assert_eq!(surroundings().path("$NOWHERE/a", &Place::Default), Err("NOWHERE".to_owned()));
    }
}
