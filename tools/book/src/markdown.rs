//! Finds the code, the links and the headings of a page in Markdown.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// A fenced block of code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CodeBlock {
    /// The line of the opening fence, counted from 1.
    pub line: usize,
    /// The words after the opening fence, such as `rust,no_run`.
    pub language: String,
    /// The lines between the fences.
    pub text: String,
}

/// A part of a page: a link's target, the text of inline code, or a line of a shell (with the line at which
/// its block begins).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// The line on which it begins, counted from 1.
    pub line: usize,
    /// The text.
    pub text: String,
}

/// A page without its blocks of code, which are in a list of their own.
struct Parts {
    blocks: Vec<CodeBlock>,
    /// The lines outside of blocks. Lines of blocks are empty, so that numbers of lines stay.
    prose: String,
}

/// Returns the files below `folder` with this ending, sorted. Folders of builds, hidden folders and
/// symbolic links to folders are left out.
///
/// # Errors
/// When a folder cannot be read.
pub fn files_below(folder: &Path, ending: &str) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let path = entry.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if entry.file_type()?.is_dir() && name != "target" && !name.starts_with('.') {
                folders.push(path);
            } else if path.extension().is_some_and(|found| found == ending) {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

/// Returns the blocks of code of a page.
pub fn code_blocks(page: &str) -> Vec<CodeBlock> {
    parts(page).blocks
}

/// Returns the inline code of a page.
pub fn inline_code(page: &str) -> Vec<Span> {
    spans(&parts(page).prose).0
}

/// Returns the lines of the blocks of a shell, with continued lines as one.
pub fn shell_lines(page: &str) -> Vec<Span> {
    let mut lines = Vec::new();
    for block in code_blocks(page).into_iter().filter(|block| block.language == "sh") {
        let joined = block.text.replace("\\\n", " ");
        lines.extend(joined.lines().map(|text| Span { line: block.line, text: text.to_owned() }));
    }
    lines
}

/// Returns the targets of the links and pictures of a page.
pub fn links(page: &str) -> Vec<Span> {
    spans(&parts(page).prose).1
}

/// Returns the anchors of the headings of a page.
pub fn anchors(page: &str) -> Vec<String> {
    let prose = parts(page).prose;
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    let headings = prose.lines().filter_map(|line| {
        let text = line.trim_start_matches('#');
        (text.len() < line.len()).then(|| text.strip_prefix(' ')).flatten()
    });
    headings
        .map(|heading| {
            let anchor = anchor(heading);
            let count = seen.entry(anchor.clone()).or_default();
            *count += 1;
            if *count > 1 { format!("{anchor}-{}", *count - 1) } else { anchor }
        })
        .collect()
}

/// Returns the anchor of a heading: in lower case, with hyphens for spaces and without other signs.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().chars().filter_map(|letter| match letter {
        ' ' => Some('-'),
        letter if letter.is_alphanumeric() || letter == '-' || letter == '_' => Some(letter),
        _ => None,
    });
    kept.flat_map(char::to_lowercase).collect()
}

fn parts(page: &str) -> Parts {
    let mut parts = Parts { blocks: Vec::new(), prose: String::new() };
    let mut open: Option<(usize, CodeBlock)> = None;
    for (index, line) in page.lines().enumerate() {
        let trimmed = line.trim_start();
        let ticks = trimmed.len() - trimmed.trim_start_matches('`').len();
        match open.take() {
            Some((fence, block)) if ticks >= fence => parts.blocks.push(block),
            Some((fence, mut block)) => {
                block.text.push_str(line);
                block.text.push('\n');
                open = Some((fence, block));
            }
            None if ticks >= 3 => {
                let language = trimmed.trim_start_matches('`').trim().to_owned();
                open = Some((ticks, CodeBlock { line: index + 1, language, text: String::new() }));
            }
            None => parts.prose.push_str(line),
        }
        parts.prose.push('\n');
    }
    parts.blocks.extend(open.map(|(_, block)| block));
    parts
}

/// Returns the inline code and the targets of links of a text without blocks of code.
fn spans(prose: &str) -> (Vec<Span>, Vec<Span>) {
    let (mut code, mut links) = (Vec::new(), Vec::new());
    let mut at = 0;
    let line = |at: usize| prose[..at].matches('\n').count() + 1;
    while let Some(found) = prose[at..].find(['`', ']']) {
        let start = at + found;
        let rest = &prose[start..];
        if let Some(target) = rest.strip_prefix("](") {
            let end = target.find(')').unwrap_or(target.len());
            links.push(Span { line: line(start), text: target[..end].to_owned() });
            // The text of a link may contain code, the target may not.
            at = start + 2 + end;
            continue;
        }
        let ticks = rest.len() - rest.trim_start_matches('`').len();
        let inside = start + ticks;
        match closing(&prose[inside..], ticks) {
            Some(length) if ticks > 0 => {
                let text = prose[inside..inside + length].replace('\n', " ");
                code.push(Span { line: line(start), text });
                at = inside + length + ticks;
            }
            _ => at = start + ticks.max(1),
        }
    }
    (code, links)
}

/// Returns the length of the text before the next run of `ticks` backticks in the same paragraph.
fn closing(text: &str, ticks: usize) -> Option<usize> {
    let paragraph = &text[..text.find("\n\n").unwrap_or(text.len())];
    let mut at = 0;
    while let Some(found) = paragraph[at..].find('`') {
        let start = at + found;
        let run = paragraph[start..].len() - paragraph[start..].trim_start_matches('`').len();
        if run == ticks {
            return Some(start);
        }
        at = start + run;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "\
# One: `two` and more

See [the `a](b)` page](c.md#d) and ``x `y` z``, and `code
on two lines`. ![picture](e.svg)

```sh
# not a heading [no link](f.md)
```
## Again
## Again
";

    #[test]
    fn code_links_and_headings_are_told_apart() {
        let block = CodeBlock {
            line: 6,
            language: "sh".to_owned(),
            text: "# not a heading [no link](f.md)\n".to_owned(),
        };
        assert_eq!(code_blocks(PAGE), [block]);
        let text =
            |spans: Vec<Span>| spans.into_iter().map(|span| (span.line, span.text)).collect::<Vec<_>>();
        let of = |parts: &[(usize, &str)]| {
            parts.iter().map(|&(line, text)| (line, text.to_owned())).collect::<Vec<_>>()
        };
        assert_eq!(
            text(inline_code(PAGE)),
            of(&[(1, "two"), (3, "a](b)"), (3, "x `y` z"), (3, "code on two lines")])
        );
        assert_eq!(text(links(PAGE)), of(&[(3, "c.md#d"), (4, "e.svg")]));
        assert_eq!(anchors(PAGE), ["one-two-and-more", "again", "again-1"]);
    }
}
