//! Keeps the modules of a crate in layers, so that no modules import each other in a circle.
//!
//! A crate lists its modules in order. A module may import the modules before it in the list; an import of a later
//! one is reported with its file and line. To check another crate, add to it
//!
//! 1. `pipewright-layers = { workspace = true }` under `[dev-dependencies]`, and
//! 2. a file `tests/layers.rs`:
//!
//! ```text
//! #[test]
//! fn no_module_imports_a_later_one() {
//!     pipewright_layers::assert_layers(env!("CARGO_MANIFEST_DIR"), &["ids", "action", "lower::error", "lower"]);
//! }
//! ```
//!
//! Rules:
//!
//! - An entry is a module's path without `crate::`. The file `src/lower/error.rs` is `lower::error`, and
//!   `src/lower/mod.rs` is `lower`.
//! - A file that has no entry belongs to the nearest module above it that has one. A folder with a single entry is
//!   therefore one unit, inside which imports are not checked. Each file needs such an entry; `lib.rs` and `main.rs`
//!   do not, because they may import every module.
//! - An entry that has no file is reported, so that the list stays true.
//! - Names that `lib.rs` exports again are imported from the module that defines them.
//! - Paths count wherever they are in the code, in `use` lines and elsewhere. Comments, strings and modules under
//!   `#[cfg(test)]` do not count.

mod imports;
mod source;
mod tokens;

use std::fmt;
use std::path::Path;

use crate::imports::imports;
use crate::source::{SourceFile, read_sources};

/// One breach of the order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// The file below the crate's folder, and its line; `None` stands for the whole file.
    pub place: (String, Option<usize>),
    /// The breach, and how to fix it.
    pub message: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            (file, Some(line)) => write!(f, "{file}:{line}: {}", self.message),
            (file, None) => write!(f, "{file}: {}", self.message),
        }
    }
}

/// Asserts that no module of the crate in `crate_dir` imports a module that comes later in `layers`.
///
/// # Panics
/// When one does, when a file has no entry in `layers`, or when an entry has no file. The message lists all breaches.
pub fn assert_layers(crate_dir: &str, layers: &[&str]) {
    let sources = read_sources(Path::new(crate_dir)).unwrap_or_else(|error| panic!("{crate_dir}: {error}"));
    let violations: Vec<String> = violations(&sources, layers).iter().map(ToString::to_string).collect();
    assert!(violations.is_empty(), "modules out of their layers:\n{}", violations.join("\n"));
}

/// Returns all breaches of the order in `sources`.
fn violations(sources: &[SourceFile], layers: &[&str]) -> Vec<Violation> {
    let mut violations = Vec::new();
    for entry in layers {
        let has_file = sources.iter().any(|source| source.module == *entry);
        if !has_file {
            let message =
                format!("the list of layers names the module `{entry}`, which has no file; remove it");
            violations.push(Violation { place: ("src".to_owned(), None), message });
        }
    }
    for source in sources.iter().filter(|source| !source.module.is_empty()) {
        match layer_of(layers, &source.module) {
            Some(own) => check_imports(source, own, layers, &mut violations),
            None => {
                let message = format!("the module `{}` is not in the list of layers; add it", source.module);
                violations.push(Violation { place: (source.file.clone(), None), message });
            }
        }
    }
    violations
}

fn check_imports(source: &SourceFile, own: usize, layers: &[&str], violations: &mut Vec<Violation>) {
    for import in imports(source) {
        let message = match layer_of(layers, &import.path) {
            Some(layer) if layer <= own => continue,
            Some(layer) => format!(
                "`{}` imports `{}`, which comes later in the list of layers; move what both need to an earlier module",
                layers[own], layers[layer]
            ),
            None => format!("`crate::{}` is not in a listed module; import it from its module", import.path),
        };
        violations.push(Violation { place: (source.file.clone(), Some(import.line)), message });
    }
    // A group may name a module several times.
    violations.dedup();
}

/// Returns the place in `layers` of the longest entry that `path` is equal to or begins with.
fn layer_of(layers: &[&str], path: &str) -> Option<usize> {
    let is_within =
        |entry: &str| path.strip_prefix(entry).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"));
    let entries = layers.iter().enumerate().filter(|(_, entry)| is_within(entry));
    entries.max_by_key(|(_, entry)| entry.len()).map(|(place, _)| place)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYERS: &[&str] = &["ids", "lower::error", "lower::send", "lower", "run"];

    /// Checks the breaches in a crate in which one file has this text; the other listed modules have empty files.
    fn check(file: &str, text: &str, expected: &[&str]) {
        let mut sources: Vec<SourceFile> =
            ["src/ids.rs", "src/lower/error.rs", "src/lower/send.rs", "src/lower/mod.rs", "src/run.rs"]
                .into_iter()
                .filter(|other| *other != file)
                .map(|other| SourceFile::new(other, ""))
                .collect();
        sources.push(SourceFile::new(file, text));
        let found: Vec<String> = violations(&sources, LAYERS).iter().map(ToString::to_string).collect();
        assert_eq!(found, expected);
    }

    const LATER: &str = "which comes later in the list of layers; move what both need to an earlier module";

    #[test]
    fn earlier_modules_may_be_imported() {
        check("src/lower/send.rs", "use crate::ids::Rank;\nuse super::error::{LowerError, Other};\n", &[]);
        check("src/lower/mod.rs", "pub use send::send;\nuse crate::lower::error::LowerError;\n", &[]);
        check("src/run.rs", "use crate::{ids::Rank, lower::{self, send::send}};\n", &[]);
    }

    #[test]
    fn later_modules_are_named_with_file_and_line() {
        let expected = format!("src/ids.rs:2: `ids` imports `run`, {LATER}");
        check("src/ids.rs", "\nuse crate::run::Run;\n", &[&expected]);
        check("src/ids.rs", "\nfn f() { crate::run::go() }\n", &[&expected]);
        let expected = format!("src/lower/error.rs:3: `lower::error` imports `lower::send`, {LATER}");
        check(
            "src/lower/error.rs",
            "use {\n    std::fmt,\n    super::send::{send, other},\n};\n",
            &[&expected],
        );
    }

    #[test]
    fn a_folder_is_not_imported_from_within() {
        let expected = format!("src/lower/send.rs:1: `lower::send` imports `lower`, {LATER}");
        check("src/lower/send.rs", "use crate::lower::LowerError;\n", &[&expected]);
        check("src/lower/send.rs", "use super::LowerError;\n", &[&expected]);
    }

    #[test]
    fn comments_strings_and_tests_do_not_count() {
        let text = "//! [`crate::run`]\n/* crate::run /* nested */ */\nconst A: &str = \"crate::run\";\n\
                    const B: &str = r#\"crate::run \" x\"#;\nconst C: char = '\"';\n\
                    fn f<'a>(a: &'a str) -> &'a str { a }\n\
                    #[cfg(test)]\nmod tests {\n    use crate::run::Run;\n}\n";
        check("src/ids.rs", text, &[]);
        let behind = format!("{text}use crate::run::Run;\n");
        let expected = format!("src/ids.rs:11: `ids` imports `run`, {LATER}");
        check("src/ids.rs", &behind, &[&expected]);
    }

    #[test]
    fn names_of_the_root_come_from_their_module() {
        let expected = "src/run.rs:1: `crate::Rank` is not in a listed module; import it from its module";
        check("src/run.rs", "use crate::Rank;\n", &[expected]);
    }

    #[test]
    fn the_list_names_every_file_and_no_other() {
        let expected = "src/new.rs: the module `new` is not in the list of layers; add it";
        check("src/new.rs", "", &[expected]);
        check("src/lower/send/deep.rs", "use crate::lower::error::LowerError;\n", &[]);
        let sources = [SourceFile::new("src/ids.rs", "")];
        let found: Vec<String> =
            violations(&sources, &["ids", "gone"]).iter().map(ToString::to_string).collect();
        assert_eq!(found, ["src: the list of layers names the module `gone`, which has no file; remove it"]);
    }
}
