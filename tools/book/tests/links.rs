//! Links and paths in the documents lead to something.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use pipewright_book::markdown::{anchors, code_blocks, files_below, inline_code, links};
use pipewright_book::root;

/// The folders whose paths the documents name.
const FOLDERS: [&str; 6] = ["crates/", "bench/", "docs/", "examples/", "tools/", ".ci/"];

/// Returns all documents, with their paths below the repository and their texts.
fn documents() -> Vec<(PathBuf, String)> {
    let paths = files_below(&root(), "md").expect("the repository");
    let text = |path: &Path| fs::read_to_string(path).expect("a document");
    paths
        .into_iter()
        .map(|path| (path.strip_prefix(root()).expect("a path").to_owned(), text(&path)))
        .collect()
}

fn is_page(document: &Path) -> bool {
    document.starts_with("docs")
}

/// Returns whether a page is only a heading and a link: in the book, the text of the file is in its place
/// (`tools/book/linked_texts.py`).
fn is_link_alone(page: &str) -> bool {
    let mut lines = page.lines().filter(|line| !line.is_empty()).skip(1);
    lines.next().is_some_and(|line| line.starts_with("See [") && line.ends_with(")."))
        && lines.next().is_none()
}

/// Returns what is wrong with a link.
fn fault(document: &Path, text: &str, link: &str) -> Option<String> {
    if link.contains(':') {
        return None;
    }
    let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
    let folder = root().join(document.parent().unwrap_or(Path::new("")));
    let target = folder.join(file);
    if !target.exists() {
        return Some(format!("the link `{link}` leads nowhere"));
    }
    let is_in_book = target.canonicalize().ok()?.starts_with(root().join("docs").canonicalize().ok()?);
    if is_page(document) && !is_in_book && !is_link_alone(text) {
        return Some(format!(
            "`{link}` is not part of the book, so the link is broken there; name the path as code"
        ));
    }
    if anchor.is_empty() {
        return None;
    }
    let there = if file.is_empty() { text.to_owned() } else { fs::read_to_string(&target).ok()? };
    let is_there = anchors(&there).iter().any(|known| known == anchor);
    (!is_there).then(|| format!("`{link}` names a heading that does not exist"))
}

#[test]
fn links_lead_somewhere() {
    let mut faults = Vec::new();
    let mut count = 0;
    for (document, text) in documents() {
        for link in links(&text) {
            count += 1;
            let fault = fault(&document, &text, &link.text);
            faults.extend(fault.map(|fault| format!("{}:{}: {fault}", document.display(), link.line)));
        }
    }
    assert!(count > 100, "{count} links");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn paths_exist() {
    let mut faults = Vec::new();
    for (document, text) in documents() {
        for code in inline_code(&text) {
            let is_path = FOLDERS.iter().any(|folder| code.text.starts_with(folder));
            let is_plain = !code.text.contains([' ', '*', '{', '<']);
            // A scratch file of a script, which is not in the repository.
            let is_made = code.text == "bench/gpu/pipewright-cuda" || code.text.starts_with("bench/.venv");
            if is_path && is_plain && !is_made && !root().join(&code.text).exists() {
                faults.push(format!("{}:{}: there is no `{}`", document.display(), code.line, code.text));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn pages_that_the_code_names_exist() {
    let mut faults = Vec::new();
    let mut files = files_below(&root().join("crates"), "rs").expect("the sources");
    files.extend(files_below(&root().join("crates"), "toml").expect("the configurations"));
    for path in files {
        let code = fs::read_to_string(&path).expect("a file");
        for rest in code.split("docs/").skip(1) {
            let end = rest.find(|letter: char| !letter.is_ascii_alphanumeric() && !"-/.".contains(letter));
            let name = &rest[..end.unwrap_or(rest.len())];
            if name.ends_with(".md") && !root().join("docs").join(name).exists() {
                faults.push(format!("{}: there is no docs/{name}", path.display()));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn every_page_is_a_chapter() {
    let docs = root().join("docs");
    let summary = fs::read_to_string(docs.join("SUMMARY.md")).expect("the list of chapters");
    let chapters: BTreeSet<PathBuf> = links(&summary).into_iter().map(|link| docs.join(link.text)).collect();
    let pages = files_below(&docs, "md").expect("the pages");
    let pages: BTreeSet<PathBuf> = pages.into_iter().filter(|path| !path.ends_with("SUMMARY.md")).collect();
    let missing: Vec<&PathBuf> = pages.difference(&chapters).collect();
    assert!(missing.is_empty(), "pages that docs/SUMMARY.md lacks: {missing:#?}");
}

#[test]
fn pages_are_plain_markdown() {
    for (document, text) in documents().iter().filter(|(document, _)| is_page(document)) {
        let is_plain = !text.contains("{{#");
        assert!(is_plain, "{}: a code host shows a directive of mdBook as it is", document.display());
    }
}

#[test]
fn rust_on_a_page_is_compiled() {
    let library = fs::read_to_string(root().join("crates/pipewright/src/lib.rs")).expect("the library");
    for (document, text) in documents().iter().filter(|(document, _)| is_page(document)) {
        // Parts of an example are compiled with it, and imports where the lines that need them are.
        let elsewhere = ["rust,example", "rust,imports"];
        let has_rust = code_blocks(text)
            .iter()
            .any(|block| block.language.starts_with("rust") && !elsewhere.contains(&block.language.as_str()));
        let line = format!("include_str!(\"../../../{}\")", document.display());
        assert!(!has_rust || library.contains(&line), "crates/pipewright/src/lib.rs lacks {line}");
    }
}

#[test]
fn parts_of_examples_are_in_the_example_that_the_page_names() {
    let mut count = 0;
    for (document, text) in documents().iter().filter(|(document, _)| is_page(document)) {
        let parts: Vec<_> =
            code_blocks(text).into_iter().filter(|block| block.language == "rust,example").collect();
        let named: Vec<String> = inline_code(text).into_iter().map(|code| code.text).collect();
        let examples = named.iter().filter(|path| path.contains("/examples/") && path.ends_with(".rs"));
        let examples: Vec<String> =
            examples.map(|path| fs::read_to_string(root().join(path)).expect("a path that exists")).collect();
        for part in &parts {
            let is_there = examples.iter().any(|example| example.contains(part.text.trim_end()));
            assert!(is_there, "{}:{}: no example of the page has this part", document.display(), part.line);
        }
        count += parts.len();
    }
    assert!(count > 5, "{count} parts of examples");
}
