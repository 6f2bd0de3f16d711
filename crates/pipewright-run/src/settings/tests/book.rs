//! The configurations in the documents are valid, and the keys that they name exist.

use std::path::PathBuf;

use pipewright_book::markdown::{code_blocks, files_below, inline_code};
use pipewright_book::root;
use pipewright_system::profile_file;

use super::load;
use crate::settings::keys::keys_of;

/// Returns the documents with their texts.
fn documents() -> Vec<(PathBuf, String)> {
    let mut paths = files_below(&root().join("docs"), "md").expect("the pages");
    paths.push(root().join("README.md"));
    let text = |path: &PathBuf| std::fs::read_to_string(path).expect("a page");
    paths.into_iter().map(|path| (path.clone(), text(&path))).collect()
}

/// Returns the problems of a profile.
fn problems_of_profile(text: &str) -> Result<(), String> {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let file = folder.path().join("profile.toml");
    std::fs::write(&file, text).expect("the scratch folder takes files");
    profile_file::read(&file).map(drop).map_err(|error| format!("{error:?}"))
}

#[test]
fn configurations_on_pages_are_valid() {
    let (mut faults, mut count) = (Vec::new(), 0);
    for (path, text) in documents() {
        for block in code_blocks(&text).into_iter().filter(|block| block.language == "toml") {
            count += 1;
            let error = |error: &dyn std::error::Error| error.to_string();
            let result = if block.text.contains("[[layers]]") {
                problems_of_profile(&block.text)
            } else if block.text.contains("[[layer]]") {
                pipewright_cluster::measured::read(&block.text).map(drop).map_err(|wrong| error(&wrong))
            } else if block.text.contains("gpus_per_node") {
                pipewright_cluster::catalogue::from_toml(&block.text).map(drop).map_err(|wrong| error(&wrong))
            } else {
                load(Some(&block.text), &[]).map(drop)
            };
            let fault = result.err().map(|error| format!("{}:{}: {error}", path.display(), block.line));
            faults.extend(fault);
        }
    }
    assert!(count > 8, "{count} configurations");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// Returns whether there is a section, but no key of this name in it.
fn is_unknown(key: &str) -> bool {
    let Some((section, key)) = key.split_once('.') else { return false };
    keys_of(section).is_some_and(|keys| keys.iter().all(|known| known.name != key))
}

#[test]
fn keys_on_pages_exist() {
    let (mut faults, mut count) = (Vec::new(), 0);
    for (path, text) in documents() {
        let blocks = code_blocks(&text).into_iter().filter(|block| block.language == "sh");
        let commands = blocks.map(|block| (block.line, block.text));
        let inline = inline_code(&text).into_iter().map(|code| (code.line, code.text));
        for (line, code) in commands.chain(inline) {
            let words: Vec<&str> = code.split_whitespace().collect();
            let set = words.windows(2).filter(|pair| pair[0] == "--set").map(|pair| pair[1]);
            // Code with parentheses is Rust.
            let alone = (words.len() == 1 || words.get(1) == Some(&"=")) && !code.contains('(');
            let keys = set.chain(alone.then(|| words.first().copied()).flatten());
            let keys = keys.map(|word| word.trim_matches(['\'', '"']).split('=').next().unwrap_or(word));
            for key in keys.filter(|key| key.contains('.')) {
                count += 1;
                if is_unknown(key) {
                    faults.push(format!("{}:{line}: there is no key `{key}`", path.display()));
                }
            }
        }
    }
    assert!(count > 100, "{count} keys");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
