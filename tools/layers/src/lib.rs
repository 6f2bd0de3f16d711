//! Keeps the modules of a crate in layers, so that no modules import each other in a circle.
//!
//! The `mod` lines give the order: `lib.rs` declares a module after the modules that it imports. Within a
//! folder the order of the lines does not matter, but no files import each other in a circle.
//! `tests/layers.rs` checks all crates of the workspace.
//!
//! Rules:
//!
//! - A folder's own file, such as `lower/mod.rs`, imports all modules of the folder. So a module of `lower`
//!   that imports a name from `crate::lower` makes a circle.
//! - `lib.rs` and `main.rs` may import every module. The names that they export again are imported from the
//!   module that defines them.
//! - A folder whose files may import each other in circles is named as such. The name of one without circles
//!   is reported. The empty name stands for the crate: then the order of the lines in `main.rs` does not
//!   matter, but circles do.
//! - Paths count wherever they are in the code, in `use` lines and elsewhere. Comments, strings, and modules
//!   for tests do not count.

mod source;
mod tokens;
mod imports;
mod circles;

use std::fmt;
use std::path::Path;

use crate::circles::{folders, reached};
use crate::imports::{declared, imports};
use crate::source::{SourceFile, read_sources};

/// One breach of the order.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Violation {
    /// The file below the crate's folder.
    pub file: String,
    /// The line of the import.
    pub line: usize,
    /// The breach, and how to fix it.
    pub message: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file, self.line, self.message)
    }
}

/// An import of one module by another one.
#[derive(Debug, Clone, Copy)]
struct Edge<'a> {
    source: &'a SourceFile,
    line: usize,
    target: &'a str,
}

/// Asserts that the modules of the crate in `crate_dir` are in layers. The modules of the folders `circular`
/// may import each other in circles.
///
/// # Panics
/// When the modules are not in layers, or a folder in `circular` has no circle. The message lists all
/// breaches.
pub fn assert_layers(crate_dir: &Path, circular: &[&str]) {
    let shown = crate_dir.display();
    let sources = read_sources(crate_dir).unwrap_or_else(|error| panic!("{shown}: {error}"));
    let violations = violations(&sources, circular);
    assert!(violations.is_empty(), "{shown}: modules out of their layers:\n{}", violations.join("\n"));
}

/// Returns all breaches of the order in `sources`.
fn violations(sources: &[SourceFile], circular: &[&str]) -> Vec<String> {
    let sources = &without_tests(sources);
    let mut violations = Vec::new();
    let mut edges = Vec::new();
    for source in sources.iter().filter(|source| !source.module.is_empty()) {
        for import in imports(source) {
            match module_of(sources, &import.path) {
                Some(target) => edges.push(Edge { source, line: import.line, target }),
                None => {
                    let message =
                        format!("`crate::{}` is not in a module; import it from its module", import.path);
                    violations.push(Violation { file: source.file.clone(), line: import.line, message });
                }
            }
        }
    }
    edges.retain(|edge| edge.source.module != edge.target);
    if !circular.contains(&"") {
        violations.extend(later_imports(sources, &edges));
    }
    let mut unused = circular.to_vec();
    unused.retain(|named| !named.is_empty());
    let mut targets = folders(sources);
    for edge in &edges {
        targets.entry(&edge.source.module).or_default().insert(edge.target);
    }
    let reached = reached(&targets);
    let is_circular = |edge: &&Edge<'_>| {
        let others = reached.get(edge.target);
        others.is_some_and(|others| others.contains(edge.source.module.as_str()))
    };
    for edge in edges.iter().filter(is_circular) {
        if let Some(named) =
            circular.iter().find(|named| !named.is_empty() && is_within(named, edge.folder()))
        {
            unused.retain(|unused| unused != named);
            continue;
        }
        let (from, to) = (&edge.source.module, edge.target);
        let message =
            format!("`{from}` imports `{to}` in a circle; move what both need to a module of its own");
        violations.push(Violation { file: edge.source.file.clone(), line: edge.line, message });
    }
    violations.sort();
    // A group may name a module several times.
    violations.dedup();
    let unused =
        unused.into_iter().map(|folder| format!("`{folder}` has no circle; remove it from the list"));
    violations.iter().map(ToString::to_string).chain(unused).collect()
}

/// Returns the sources that are not modules for tests.
fn without_tests(sources: &[SourceFile]) -> Vec<SourceFile> {
    let path = |source: &SourceFile, name: String| match source.module.as_str() {
        "" => name,
        module => format!("{module}::{name}"),
    };
    let folders = folders(sources);
    let is_folder = |source: &&SourceFile| {
        let module = source.module.as_str();
        module.is_empty() || folders.contains_key(module)
    };
    let tests_of = |source| declared(source).tests.into_iter().map(move |name| path(source, name));
    let tests: Vec<String> = sources.iter().filter(is_folder).flat_map(tests_of).collect();
    let is_test = |source: &&SourceFile| tests.iter().any(|test| is_within(test, &source.module));
    sources.iter().filter(|source| !is_test(source)).cloned().collect()
}

/// Returns the imports of modules that `lib.rs` or `main.rs` declares later.
fn later_imports(sources: &[SourceFile], edges: &[Edge<'_>]) -> Vec<Violation> {
    let Some(root) = sources.iter().find(|source| source.module.is_empty()) else { return Vec::new() };
    let order = declared(root).modules;
    let position = |module: &str| order.iter().position(|declared| declared == first(module));
    let is_late = |edge: &&Edge<'_>| position(&edge.source.module) < position(edge.target);
    let violation = |edge: &Edge<'_>| {
        let (from, to, root) = (first(&edge.source.module), first(edge.target), &root.file);
        let message = format!(
            "`{from}` imports `{to}`, which {root} declares later; move what both need to an earlier module"
        );
        Violation { file: edge.source.file.clone(), line: edge.line, message }
    };
    edges.iter().filter(is_late).map(violation).collect()
}

/// Returns the longest module that `path` is equal to or begins with.
fn module_of<'a>(sources: &'a [SourceFile], path: &str) -> Option<&'a str> {
    let modules = sources.iter().map(|source| source.module.as_str()).filter(|module| !module.is_empty());
    modules.filter(|module| is_within(module, path)).max_by_key(|module| module.len())
}

/// Returns whether `path` is `module`, or in it.
fn is_within(module: &str, path: &str) -> bool {
    path.strip_prefix(module).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

/// Returns the first name of a module's path.
fn first(module: &str) -> &str {
    module.split_once("::").map_or(module, |(first, _)| first)
}

impl Edge<'_> {
    /// Returns the path of the lowest folder that contains both modules; empty for the crate.
    fn folder(&self) -> &str {
        let shared = self.target.split("::").zip(self.source.module.split("::"));
        let names = shared.take_while(|(one, other)| one == other);
        let length: usize = names.map(|(name, _)| name.len() + "::".len()).sum();
        &self.target[..length.saturating_sub("::".len())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the breaches in a crate in which one file has this text; the other files declare modules only.
    fn check(file: &str, text: &str, circular: &[&str], expected: &[&str]) {
        let files = [
            ("src/lib.rs", "pub mod ids;\nmod lower;\n#[cfg(test)]\nmod tests;\npub(crate) mod run;\n"),
            ("src/ids.rs", ""),
            ("src/lower/error.rs", ""),
            ("src/lower/send.rs", "use super::error::LowerError;\n"),
            ("src/lower/mod.rs", "mod send;\nmod error;\n"),
            ("src/run.rs", ""),
            ("src/tests/cases.rs", ""),
        ];
        let text_of = |(name, own): (&'static str, &'static str)| {
            SourceFile::new(name, if name == file { text } else { own })
        };
        let sources: Vec<SourceFile> = files.into_iter().map(text_of).collect();
        assert_eq!(violations(&sources, circular), expected);
    }

    const LATER: &str = "which src/lib.rs declares later; move what both need to an earlier module";
    const CIRCLE: &str = "in a circle; move what both need to a module of its own";

    #[test]
    fn earlier_modules_may_be_imported() {
        check(
            "src/lower/send.rs",
            "use crate::ids::Rank;\nuse super::error::{LowerError, Other};\n",
            &[],
            &[],
        );
        check("src/lower/mod.rs", "pub use send::send;\nuse crate::lower::error::LowerError;\n", &[], &[]);
        check("src/run.rs", "use crate::{ids::Rank, lower::{self, send::send}};\n", &[], &[]);
        check("src/run.rs", "use crate::run::Run;\n", &[], &[]);
        check("src/lower/send.rs", "use super::super::ids::Rank;\n", &[], &[]);
    }

    #[test]
    fn later_modules_are_named_with_file_and_line() {
        let expected = format!("src/ids.rs:2: `ids` imports `run`, {LATER}");
        check("src/ids.rs", "\nuse crate::run::Run;\n", &[], &[&expected]);
        check("src/ids.rs", "\nfn f() { crate::run::go() }\n", &[], &[&expected]);
        let expected = format!("src/lower/send.rs:3: `lower` imports `run`, {LATER}");
        check(
            "src/lower/send.rs",
            "use {\n    std::fmt,\n    crate::run::{send, other},\n};\n",
            &[],
            &[&expected],
        );
    }

    #[test]
    fn modules_of_a_folder_do_not_import_each_other() {
        let error = format!("src/lower/error.rs:1: `lower::error` imports `lower::send` {CIRCLE}");
        let send = format!("src/lower/send.rs:1: `lower::send` imports `lower::error` {CIRCLE}");
        check("src/lower/error.rs", "use super::send::send;\n", &[], &[&error, &send]);
        check("src/lower/error.rs", "use super::send::send;\n", &["lower"], &[]);
        check("src/ids.rs", "use crate::run::Run;\n", &[""], &[]);
        check("src/ids.rs", "", &["lower"], &["`lower` has no circle; remove it from the list"]);
    }

    #[test]
    fn a_folder_is_not_imported_from_within() {
        let expected = format!("src/lower/send.rs:1: `lower::send` imports `lower` {CIRCLE}");
        check("src/lower/send.rs", "use crate::lower::LowerError;\n", &[], &[&expected]);
        check("src/lower/send.rs", "use super::LowerError;\n", &[], &[&expected]);
    }

    #[test]
    fn comments_strings_and_tests_do_not_count() {
        let text = "//! [`crate::run`]\n/* crate::run /* nested */ */\nconst A: &str = \"crate::run\";\n\
                    const B: &str = r#\"crate::run \" x\"#;\nconst C: char = '\"';\n\
                    fn f<'a>(a: &'a str) -> &'a str { a }\n\
                    #[cfg(test)]\nmod tests {\n    use crate::run::Run;\n}\n";
        check("src/ids.rs", text, &[], &[]);
        let behind = format!("{text}use crate::run::Run;\n");
        let expected = format!("src/ids.rs:11: `ids` imports `run`, {LATER}");
        check("src/ids.rs", &behind, &[], &[&expected]);
        check("src/tests/cases.rs", "use crate::missing::Name;\n", &[], &[]);
    }

    #[test]
    fn names_of_the_root_come_from_their_module() {
        let expected = "src/run.rs:1: `crate::Rank` is not in a module; import it from its module";
        check("src/run.rs", "use crate::Rank;\n", &[], &[expected]);
    }
}
