//! Comments, messages and documents are plain English.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use pipewright_book::markdown::files_below;
use pipewright_book::root;
use pipewright_prose::{Kind, Passage, Use, of_markdown, of_rust, rate, uses};
use regex::Regex;

/// The most uses of unidiomatic constructions per 10,000 words.
const LIMIT: f64 = 5.0;

/// Returns the passages of all files with an ending, each with its file.
fn passages(ending: &str, read: fn(&str) -> Vec<Passage>) -> Vec<(String, Passage)> {
    let files = files_below(&root(), ending).expect("the repository");
    let passages_of = |path: &Path| {
        let text = fs::read_to_string(path).expect("a readable file");
        let name = path.strip_prefix(root()).expect("a path").display().to_string();
        read(&text).into_iter().map(move |passage| (name.clone(), passage)).collect::<Vec<_>>()
    };
    // The list of constructions names each of them.
    let files = files.iter().filter(|path| !path.starts_with(root().join("tools/prose")));
    files.flat_map(|path| passages_of(path)).collect()
}

/// Checks the passages of one kind, which have at least `least` words.
fn check(passages: &[(String, Passage)], kind: Kind, least: usize) {
    let passages: Vec<_> = passages.iter().filter(|(_, passage)| passage.kind == kind).collect();
    let words: usize = passages.iter().map(|(_, passage)| passage.words()).sum();
    assert!(words >= least, "{words} words are not the whole repository");
    let found: Vec<(&str, Use)> = passages
        .iter()
        .flat_map(|(file, passage)| uses(passage).into_iter().map(|found| (file.as_str(), found)))
        .collect();
    let rate = rate(found.len(), words);
    if rate > LIMIT {
        let mut report = String::new();
        for (file, found) in found {
            let Use { line, excerpt, instead } = found;
            writeln!(report, "{file}:{line}: {excerpt}\n    instead: {instead}").expect("a string takes all");
        }
        panic!(
            "{rate:.1} uses per 10,000 words, and at most {LIMIT} are accepted; rewrite some of these sentences:\n{report}"
        );
    }
}

#[test]
fn comments() {
    check(&passages("rs", of_rust), Kind::Comment, 100_000);
}

#[test]
fn messages() {
    check(&passages("rs", of_rust), Kind::Message, 10_000);
}

#[test]
fn documents() {
    check(&passages("md", of_markdown), Kind::Document, 30_000);
}

/// `pipewright_schedule::words::counted` gives a number its noun.
#[test]
fn no_message_leaves_the_plural_open() {
    let open = Regex::new(r"[a-z]\(s\)").expect("a pattern");
    for (file, Passage { line, text, .. }) in
        passages("rs", of_rust).iter().chain(&passages("md", of_markdown))
    {
        assert!(!open.is_match(text), "{file}:{line}: choose between singular and plural: {text}");
    }
}
