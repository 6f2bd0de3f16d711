//! The commands of Cargo in the documents name tests, examples, crates and features that exist.
//!
//! Tests of `pipewright-cli` check the commands of `pipewright`.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use pipewright_book::markdown::{files_below, inline_code, shell_lines};
use pipewright_book::root;

/// Words that take the place of a name, and the name of a file that the reader makes.
const PLACEHOLDERS: [&str; 3] = ["NAME", "CRATE", "mine"];

/// The names that commands may use.
struct Names {
    tests: BTreeSet<String>,
    examples: BTreeSet<String>,
    packages: BTreeSet<String>,
    features: BTreeSet<String>,
}

impl Names {
    fn of_workspace() -> Self {
        let (mut tests, mut examples) = (BTreeSet::new(), BTreeSet::new());
        for path in files_below(&root(), "rs").expect("the sources") {
            let parent = path.parent().unwrap_or(&path);
            let name = |path: &Path| path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let is_in_tests = parent.parent().is_some_and(|folder| folder.ends_with("tests"));
            match parent.file_name().and_then(|name| name.to_str()) {
                _ if name(&path) == "main" && is_in_tests => _ = tests.insert(name(parent)),
                Some("tests") => _ = tests.insert(name(&path)),
                Some("examples") => _ = examples.insert(name(&path)),
                _ => {}
            }
        }
        let manifests = files_below(&root(), "toml").expect("the manifests");
        let manifests = manifests.iter().filter(|path| path.ends_with("Cargo.toml"));
        let manifests: Vec<String> =
            manifests.map(|path| fs::read_to_string(path).expect("a manifest")).collect();
        let named = |text: &str, table: &str| {
            let tables: Vec<String> =
                text.split(&format!("{table}\nname = \"")).skip(1).map(str::to_owned).collect();
            tables.into_iter().filter_map(|rest| Some(rest.split_once('"')?.0.to_owned()))
        };
        let packages = manifests.iter().flat_map(|text| named(text, "[package]"));
        tests.extend(manifests.iter().flat_map(|text| named(text, "[[test]]")));
        let features = manifests.iter().filter_map(|text| {
            let (_, after) = text.split_once("[features]\n")?;
            Some(after.split("\n[").next()?.to_owned())
        });
        let features = features.flat_map(|text| {
            let names = text.lines().filter_map(|line| Some(line.split_once(" = ")?.0.to_owned()));
            names.collect::<Vec<_>>()
        });
        Self { tests, examples, packages: packages.collect(), features: features.collect() }
    }

    /// Returns what a command names that does not exist.
    fn unknown(&self, command: &str) -> Vec<String> {
        let words: Vec<&str> = command.split_whitespace().collect();
        let own = words.iter().position(|word| *word == "--").unwrap_or(words.len());
        let mut unknown = Vec::new();
        for pair in words[..own].windows(2) {
            let known = match pair[0] {
                "--test" => &self.tests,
                "--example" => &self.examples,
                "-p" => &self.packages,
                "--features" => &self.features,
                _ => continue,
            };
            let names = pair[1].split(',').filter(|name| !PLACEHOLDERS.contains(name));
            unknown.extend(
                names.filter(|name| !known.contains(*name)).map(|name| format!("{} {name}", pair[0])),
            );
        }
        unknown
    }
}

#[test]
fn commands_of_cargo_name_what_exists() {
    let names = Names::of_workspace();
    let (mut faults, mut count) = (Vec::new(), 0);
    for path in files_below(&root(), "md").expect("the repository") {
        let text = fs::read_to_string(&path).expect("a document");
        // In a list of tests, further ones are written without the command.
        let is_command = |text: &str| text.contains("cargo ") || text.starts_with("--test ");
        let commands = shell_lines(&text).into_iter().chain(inline_code(&text));
        for command in commands.filter(|command| is_command(&command.text)) {
            count += 1;
            let place = format!("{}:{}", path.display(), command.line);
            let unknown = names.unknown(&command.text).into_iter();
            faults.extend(unknown.map(|name| format!("{place}: unknown {name}")));
        }
    }
    assert!(count > 50, "{count} commands");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
