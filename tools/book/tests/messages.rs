//! The messages on the page about errors exist in the code.

use std::fs;
use std::path::Path;

use pipewright_book::markdown::{code_blocks, files_below};
use pipewright_book::root;

/// Returns the code with its texts on one line, and with `...` in place of what a text puts in.
fn with_dots(code: &str) -> String {
    let mut lines = code.split("\\\n");
    let mut joined = lines.next().unwrap_or_default().to_owned();
    for line in lines {
        joined += line.trim_start();
    }
    let mut dotted = String::new();
    let mut rest = joined.as_str();
    while let Some((before, after)) = rest.split_once('{') {
        dotted += before;
        // A brace with a line break is a block of code.
        match after.split_once('}').filter(|(inside, _)| !inside.contains('\n')) {
            Some((_, after)) => {
                dotted += "...";
                rest = after;
            }
            None => rest = after,
        }
    }
    (dotted + rest).replace("\\\"", "\"")
}

#[test]
fn the_messages_of_the_page_exist() {
    let page = fs::read_to_string(root().join("docs/troubleshooting.md")).expect("the page");
    let blocks = code_blocks(&page).into_iter().filter(|block| block.language == "text");
    let messages: Vec<String> =
        blocks.flat_map(|block| block.text.lines().map(str::to_owned).collect::<Vec<_>>()).collect();
    assert!(messages.len() > 40, "{messages:#?}");
    let sources = files_below(&root().join("crates"), "rs").expect("the sources");
    let code = sources.iter().filter(|path| path.components().any(|part| part.as_os_str() == "src"));
    let code: Vec<(&Path, String)> =
        code.map(|path| (path.as_path(), with_dots(&fs::read_to_string(path).expect("a file")))).collect();
    let is_written = |message: &str| {
        let has = |text: &str| code.iter().any(|(_, file)| file.contains(text));
        // Errors of files write the path in front of the sentence.
        let Some(sentence) = message.strip_prefix("...: ") else { return has(message) };
        // The advice is in the file of the sentence, or in the `error.rs` next to it.
        let is_in_parts = |(sentence, advice): (&str, &str)| {
            code.iter().filter(|(_, file)| file.contains(sentence)).any(|(path, file)| {
                let errors = path.with_file_name("error.rs");
                let is_in_errors =
                    |(other, file): &(&Path, String)| *other == errors && file.contains(advice);
                file.contains(advice) || code.iter().any(is_in_errors)
            })
        };
        has(sentence) || sentence.rsplit_once("; ").is_some_and(is_in_parts)
    };
    let missing: Vec<&String> = messages.iter().filter(|message| !is_written(message)).collect();
    assert!(missing.is_empty(), "no code has these messages of docs/troubleshooting.md: {missing:#?}");
}

#[test]
fn texts_are_joined_and_dotted() {
    let code = "#[error(\n    \"`{key}` is \\\"{value}\\\", \\\n     and {} more\", .0.len()\n)]";
    assert!(with_dots(code).contains("\"`...` is \"...\", and ... more\""), "{}", with_dots(code));
}

#[test]
fn public_errors_print_their_message_with_debug() {
    let is_library = |path: &Path| {
        path.iter().any(|part| part == "src") && !path.iter().any(|part| part == "pipewright-cli")
    };
    let sources = files_below(&root().join("crates"), "rs").expect("the sources");
    let mut derived = Vec::new();
    for path in sources.iter().filter(|path| is_library(path)) {
        let code = fs::read_to_string(path).expect("a file");
        let derives = code.match_indices("#[derive(").filter_map(|(start, _)| {
            let (traits, after) = code[start + 9..].split_once(")]")?;
            let names: Vec<&str> = traits.split(", ").collect();
            let is_error = names.contains(&"Error") || names.contains(&"thiserror::Error");
            // The type's own line is the first one that is neither an attribute nor a comment.
            let item = after.lines().find(|line| line.starts_with("pub "))?;
            (is_error && names.contains(&"Debug")).then(|| format!("{}: {item}", path.display()))
        });
        derived.extend(derives);
    }
    assert!(derived.is_empty(), "use `message_as_debug!` instead of `Debug`: {derived:#?}");
}
