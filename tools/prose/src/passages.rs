//! The passages of a file: comments and strings of Rust code, paragraphs of Markdown.

use std::sync::LazyLock;

use regex::Regex;

/// The part of a file that a passage belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A comment of the code.
    Comment,
    /// A string of the code with several words: a message or a help text.
    Message,
    /// A paragraph of a document.
    Document,
}

/// Text that is read as one piece.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Passage {
    /// The part of the file that the passage belongs to.
    pub kind: Kind,
    /// Its first line, counted from 1.
    pub line: usize,
    /// The text on one line, without comment marks.
    pub text: String,
}

impl Passage {
    /// Returns the number of words.
    pub fn words(&self) -> usize {
        self.text.split_whitespace().count()
    }
}

/// A string with fewer words is a name rather than a message.
const MESSAGE_WORDS: usize = 4;

/// A line comment, a string, or a character literal, whichever begins first.
static PIECE: LazyLock<Regex> = LazyLock::new(|| {
    let pieces =
        r##"//[^\n]*|b?r#"(?s:.*?)"#|b?r"[^"]*"|"(?:[^"\\]|\\(?s:.))*"|'(?:[^'\\\n]|\\[^\n]{1,8}?)'"##;
    Regex::new(pieces).expect("a valid pattern")
});

/// Returns the comments and messages of Rust code.
pub fn of_rust(code: &str) -> Vec<Passage> {
    let mut passages = Vec::new();
    let mut comment = Paragraphs::new(Kind::Comment);
    let mut end = 0;
    for piece in PIECE.find_iter(code) {
        let line = code[..piece.start()].matches('\n').count() + 1;
        let follows = code[end..piece.start()].trim().is_empty();
        end = piece.end();
        if let Some(text) = piece.as_str().strip_prefix("//") {
            if !follows {
                passages.append(&mut comment.finish());
            }
            comment.add(line, text.trim_start_matches(['/', '!']).trim());
            continue;
        }
        passages.append(&mut comment.finish());
        let text = piece.as_str().replace("\\n", " ").replace('\\', " ");
        let text = text.trim_start_matches(['b', 'r']).trim_matches(['"', '#', '\'']);
        let text = text.split_whitespace().collect::<Vec<_>>();
        if text.len() >= MESSAGE_WORDS {
            passages.push(Passage { kind: Kind::Message, line, text: text.join(" ") });
        }
    }
    passages.append(&mut comment.finish());
    passages
}

/// Returns the paragraphs of a document. A row of a table is a paragraph.
pub fn of_markdown(text: &str) -> Vec<Passage> {
    let mut paragraphs = Paragraphs::new(Kind::Document);
    for (index, line) in text.lines().enumerate() {
        let line_number = index + 1;
        if line.trim_start().starts_with('|') {
            paragraphs.add(line_number, "");
        }
        paragraphs.add(line_number, line.trim());
    }
    paragraphs.finish()
}

/// Joins lines to paragraphs, which end at empty lines. Code between fences is left out.
struct Paragraphs {
    kind: Kind,
    finished: Vec<Passage>,
    current: Option<Passage>,
    is_code: bool,
}

impl Paragraphs {
    fn new(kind: Kind) -> Self {
        Self { kind, finished: Vec::new(), current: None, is_code: false }
    }

    fn add(&mut self, line: usize, text: &str) {
        if text.starts_with("```") {
            self.is_code = !self.is_code;
            self.finished.extend(self.current.take());
        } else if self.is_code {
        } else if text.is_empty() {
            self.finished.extend(self.current.take());
        } else if let Some(current) = &mut self.current {
            current.text.push(' ');
            current.text.push_str(text);
        } else {
            self.current = Some(Passage { kind: self.kind, line, text: text.to_owned() });
        }
    }

    /// Returns the paragraphs so far, and starts again.
    fn finish(&mut self) -> Vec<Passage> {
        self.is_code = false;
        self.finished.extend(self.current.take());
        std::mem::take(&mut self.finished)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(found: &[Passage], expected: &[(Kind, usize, &str)]) {
        let found: Vec<_> =
            found.iter().map(|passage| (passage.kind, passage.line, passage.text.as_str())).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn comments_are_joined_to_paragraphs() {
        let code =
            "//! One,\n//! two.\n//!\n//! ```\n//! code();\n//! ```\n//! Three.\nfn f() {} // Behind.\n";
        let comment = |line, text| (Kind::Comment, line, text);
        check(&of_rust(code), &[comment(1, "One, two."), comment(7, "Three."), comment(8, "Behind.")]);
    }

    #[test]
    fn strings_with_several_words_are_messages() {
        let code = "let a = ['\"', '\\''];\nlet b = \"a name\";\nlet c = \"beside the rank \\\n    has // no stage or\";\n";
        check(&of_rust(code), &[(Kind::Message, 3, "beside the rank has // no stage or")]);
    }

    #[test]
    fn rows_of_a_table_are_paragraphs() {
        let text = "A line\nand one more.\n\n| a | b |\n| c | d |\n\n```sh\ncargo test\n```\n";
        let passage = |line, text| (Kind::Document, line, text);
        check(
            &of_markdown(text),
            &[passage(1, "A line and one more."), passage(4, "| a | b |"), passage(5, "| c | d |")],
        );
    }
}
