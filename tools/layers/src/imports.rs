//! The paths into its own crate in the code of a file, and the modules that it declares.

use crate::source::SourceFile;
use crate::tokens::{Token, tokens};

/// A path into the file's own crate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Import {
    /// The path without `crate::`.
    pub(crate) path: String,
    pub(crate) line: usize,
}

/// Returns every path of `source` that begins with `crate`, or with `super` at the top level of the file.
pub(crate) fn imports(source: &SourceFile) -> Vec<Import> {
    let all = tokens(&source.text);
    let mut reader = Reader { source, tokens: &all, at: 0, imports: Vec::new() };
    while reader.at < all.len() {
        if reader.skip_tests() {
            continue;
        }
        let is_path = reader.is_at("crate", 0) || reader.is_at("super", 0);
        if is_path && reader.is_at("::", 1) {
            reader.path("");
        } else {
            reader.at += 1;
        }
    }
    reader.imports
}

/// The modules that a file declares, in order.
#[derive(Debug, Default)]
pub(crate) struct Declared {
    pub(crate) modules: Vec<String>,
    /// Those under `#[cfg(test)]`.
    pub(crate) tests: Vec<String>,
}

/// Returns the modules that `source` declares.
pub(crate) fn declared(source: &SourceFile) -> Declared {
    let all = tokens(&source.text);
    let mut reader = Reader { source, tokens: &all, at: 0, imports: Vec::new() };
    let mut declared = Declared::default();
    while reader.at < all.len() {
        let start = reader.at;
        if reader.skip_tests() {
            declared.tests.push(all[start + TEST_MODULE.len()].text.to_owned());
            continue;
        }
        if reader.is_at("mod", 0) && reader.is_at(";", 2) {
            declared.modules.push(all[start + 1].text.to_owned());
        }
        reader.at += 1;
    }
    declared
}

/// The tokens with which a module for tests begins.
const TEST_MODULE: [&str; 8] = ["#", "[", "cfg", "(", "test", ")", "]", "mod"];

struct Reader<'a> {
    source: &'a SourceFile,
    tokens: &'a [Token<'a>],
    at: usize,
    imports: Vec<Import>,
}

impl Reader<'_> {
    fn is_at(&self, text: &str, ahead: usize) -> bool {
        self.tokens.get(self.at + ahead).is_some_and(|token| token.text == text)
    }

    /// Moves past a module under `#[cfg(test)]`, if one begins here. Returns whether it did.
    fn skip_tests(&mut self) -> bool {
        if !TEST_MODULE.iter().enumerate().all(|(ahead, text)| self.is_at(text, ahead)) {
            return false;
        }
        let mut depth = 0;
        while let Some(token) = self.tokens.get(self.at) {
            self.at += 1;
            match token.text {
                "{" => depth += 1,
                "}" => depth -= 1,
                ";" if depth == 0 => break,
                _ => continue,
            }
            if depth == 0 {
                break;
            }
        }
        true
    }

    /// Reads a path behind `prefix`, with the groups of a `use`, and records each path in it.
    fn path(&mut self, prefix: &str) {
        let mut path = prefix.to_owned();
        let line = self.tokens[self.at].line;
        while let Some(token) = self.tokens.get(self.at) {
            if token.text == "{" {
                self.group(&path);
                return;
            }
            path = self.join(&path, token.text);
            self.at += 1;
            if !self.is_at("::", 0) {
                break;
            }
            self.at += 1;
        }
        self.imports.push(Import { path, line });
    }

    /// Reads `{a, b::{c, d}}` behind `prefix`.
    fn group(&mut self, prefix: &str) {
        self.at += 1;
        while self.at < self.tokens.len() && !self.is_at("}", 0) {
            match self.tokens[self.at].text {
                "," => self.at += 1,
                // The alias of an import.
                "as" => self.at += 2,
                _ => self.path(prefix),
            }
        }
        self.at += 1;
    }

    /// Returns `path` with one more segment.
    fn join(&self, path: &str, segment: &str) -> String {
        match segment {
            "crate" => String::new(),
            "self" | "*" => path.to_owned(),
            "super" if path.is_empty() => parent(&self.source.module).to_owned(),
            "super" => parent(path).to_owned(),
            _ if path.is_empty() => segment.to_owned(),
            _ => format!("{path}::{segment}"),
        }
    }
}

fn parent(module: &str) -> &str {
    module.rsplit_once("::").map_or("", |(parent, _)| parent)
}
