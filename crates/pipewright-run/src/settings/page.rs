//! The page of the configuration in the book: the table of the keys as Markdown, with a heading for each key.

use std::fmt::Write;

use super::keys::{Key, LARGEST_COUNT, SectionKeys, sections};

/// The longest line of the page, in characters.
const WIDTH: usize = 120;

const INTRODUCTION: &str = "\
# The configuration

<!-- Generated from crates/pipewright-run/src/settings/keys.toml; its test says how. Do not edit. -->

A configuration is a file in TOML. It may leave out any key: a key then has its default, or no value if it has no default. An
unknown key is an error.

`pipewright init my.toml` writes a file with every key, its default and the same comment. `pipewright check my.toml` checks
everything that can be checked without training, and `pipewright train my.toml` trains. `--set section.key=value` overrides a
key for one command. The built-in sample, which `pipewright train` uses without a file, is in
`crates/pipewright-run/src/settings/sample.toml`.

Relative paths start at the folder of the file, and `run.out` at the folder in which the command runs. A path may begin with
`~`, the home folder, or `$NAME`, an environment variable.

SECTIONS

## Marks

Below the name of each key are its default or an example, which also shows its type, the range of its numbers, and its marks:

- *kept*: a resumed run needs the same value. Every key of `[model]` is kept, except `stream` and `stream_window`.
- *local*: the processes of a run may have different values.
- *timed*: the time of a step depends on the key. It also depends on every key of `[model]`, `[pipeline]` and `[mesh]`.

Some comments name the models or the values to which they apply, followed by a colon, such as `granite: ...` or `sgd: ...`. A
comment that begins with `Or` names further values.
";

/// Returns the page.
pub fn page() -> String {
    let links = sections().iter().map(|section| format!("[`{name}`](#{name})", name = section.name));
    let links = links.collect::<Vec<_>>().join(", ");
    let mut page = INTRODUCTION.replace("SECTIONS", &wrapped(&format!("The sections are {links}.")));
    for section in sections() {
        push_section(&mut page, section);
    }
    page
}

fn push_section(page: &mut String, section: &SectionKeys) {
    push(page, &format!("\n## `[{}]`", section.name));
    push_text(page, section.comment);
    let mut is_in_group = false;
    for (index, key) in section.keys.iter().enumerate() {
        let mut comment = key.comment.clone();
        match key.above.strip_suffix(':') {
            Some(group) => {
                is_in_group = true;
                push(page, &format!("\n### {}", capitalised(&escaped(group))));
            }
            None if index == 0 => push_text(page, &key.above),
            None => comment = [key.above.as_str(), &comment].join(" "),
        }
        let level = if is_in_group { "####" } else { "###" };
        push(page, &format!("\n{level} `{}.{}`", section.name, key.name));
        push(page, &format!("\n{}", wrapped(&facts(key))));
        push_text(page, comment.trim());
    }
}

/// Returns the default of a key or an example, its range and its marks.
fn facts(key: &Key) -> String {
    let default = if key.has_default { "Default:" } else { "No default; for example" };
    let mut facts = format!("{default} `{}`", key.value);
    if let Some(range) = range(key) {
        write!(facts, "; {range}").expect("a string takes all");
    }
    let marks = key.marks.iter().filter(|mark| ["kept", "local", "timed"].contains(mark));
    let marks: Vec<String> = marks.map(|mark| format!("[{mark}](#marks)")).collect();
    if !marks.is_empty() {
        write!(facts, "; {}", marks.join(", ")).expect("a string takes all");
    }
    facts + "."
}

/// Returns the values that a key takes, in words.
fn range(key: &Key) -> Option<String> {
    if let Some(range) = key.range() {
        let most = match *range.end() {
            most if most == u64::from(LARGEST_COUNT) => "2^31 - 1".to_owned(),
            most if most == i64::MAX as u64 => "2^63 - 1".to_owned(),
            most => most.to_string(),
        };
        return Some(format!("whole numbers from {} to {most}", range.start()));
    }
    match key.bound() {
        Some((bound, true)) => Some(format!("{}, in single precision too", bound.words())),
        Some((bound, false)) => Some(bound.words().to_owned()),
        None => ["true", "false"].contains(&key.value).then(|| "true or false".to_owned()),
    }
}

/// Appends a paragraph, unless it is empty.
fn push_text(page: &mut String, text: &str) {
    if !text.is_empty() {
        let end = if text.ends_with(['.', ':']) { "" } else { "." };
        push(page, &format!("\n{}{end}", wrapped(&capitalised(&escaped(text)))));
    }
}

fn push(page: &mut String, line: &str) {
    page.push_str(line);
    page.push('\n');
}

/// Returns the text with a capital first letter, if it begins with an ordinary word: not with a name, which contains a digit
/// or an underscore, or which a colon or a comma follows.
fn capitalised(text: &str) -> String {
    let word = text.split(' ').next().unwrap_or_default();
    let is_ordinary = word.chars().all(|letter| letter.is_ascii_lowercase());
    match text.chars().next() {
        Some(first) if is_ordinary => first.to_ascii_uppercase().to_string() + &text[first.len_utf8()..],
        _ => text.to_owned(),
    }
}

/// Returns the text with backslashes before the signs that mean something in Markdown, except in code.
fn escaped(text: &str) -> String {
    let parts = text.split('`').enumerate().map(|(index, part)| match index % 2 {
        0 => part.replace('*', "\\*").replace('<', "\\<").replace(" - ", " \\- "),
        _ => part.to_owned(),
    });
    parts.collect::<Vec<_>>().join("`")
}

/// Returns the text in lines of at most [`WIDTH`] characters, if its words are not longer.
fn wrapped(text: &str) -> String {
    let mut lines = String::new();
    let mut width = 0;
    for word in text.split_whitespace() {
        let length = word.chars().count();
        if width > 0 && width + 1 + length > WIDTH {
            lines.push('\n');
            width = 0;
        } else if width > 0 {
            lines.push(' ');
            width += 1;
        }
        lines.push_str(word);
        width += length;
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Set to 1, it lets the test write the page.
    const WRITE: &str = "PIPEWRIGHT_WRITE_PAGES";

    #[test]
    fn the_page_of_the_configuration_is_up_to_date() {
        let path = pipewright_book::root().join("docs/configuration.md");
        if std::env::var_os(WRITE).is_some_and(|value| value == "1") {
            std::fs::write(&path, page()).expect("the page can be written");
        }
        let found = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            found == page(),
            "docs/configuration.md differs from the table of the keys; run \
             `{WRITE}=1 cargo test --workspace --lib page_of_the_configuration`"
        );
    }

    #[test]
    fn every_key_has_an_anchor() {
        let anchors = pipewright_book::markdown::anchors(&page());
        for section in sections() {
            for name in section.keys.iter().map(|key| key.name) {
                let anchor = format!("{}{name}", section.name);
                let count = anchors.iter().filter(|known| **known == anchor).count();
                assert_eq!(count, 1, "{}.{name}", section.name);
            }
        }
    }

    fn check(text: &str, expected: &str) {
        assert_eq!(capitalised(&escaped(text)), expected);
    }

    #[test]
    fn comments_are_markdown() {
        check("or `a*b`, and *4", "Or `a*b`, and \\*4");
        check("M Mamba-2, - feed-forward", "M Mamba-2, \\- feed-forward");
        check("sgd: 0 unless it is written", "sgd: 0 unless it is written");
        check("adamw, adam", "adamw, adam");
        check("microbatch_size rows", "microbatch_size rows");
        check("2: every second layer", "2: every second layer");
        assert_eq!(wrapped(&"word ".repeat(30)).lines().map(str::len).collect::<Vec<_>>(), [119, 29]);
    }
}
