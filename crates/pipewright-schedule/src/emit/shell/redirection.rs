//! Skips redirections and here-documents.

use crate::emit::shell::letters::HereDocument;
use crate::emit::shell::script::Reader;
use crate::emit::shell::word::{Word, shortened};

impl Reader {
    /// Returns whether a redirection is next.
    pub(super) fn redirection_is_next(&self) -> bool {
        let is_both = self.letters.starts_with("&>");
        let is_one = self.letters.peek().is_some_and(|letter| "<>".contains(letter));
        is_one || (is_both && !self.is_plain)
    }

    /// Skips `2> file`, or reads the start of a here-document. `words` are the words before it.
    pub(super) fn redirection(&mut self, words: &mut Vec<Word>) {
        if self.letters.starts_with("<(") || self.letters.starts_with(">(") {
            let line = self.letters.line();
            self.letters.at += 1;
            let command = shortened(&self.letters.take_enclosed('(', ')'));
            words.push(Word::unknown(line, &format!("`<({command})` of line {line} is not run")));
            return;
        }
        let is_number =
            words.last().is_some_and(|word| word.text.len() < 4 && word.text.parse::<u8>().is_ok());
        if self.letters.is_behind_digit() && is_number {
            words.pop();
        }
        let operator = self.letters.take_until(|letter| !['<', '>', '&', '-'].contains(&letter));
        self.letters.skip_blanks(false);
        if self.letters.starts_with(">(") || self.letters.starts_with("<(") {
            self.letters.at += 1;
            self.letters.take_enclosed('(', ')');
            return;
        }
        let target = self.word().into_iter().next();
        if ["<<", "<<-"].contains(&operator.as_str()) {
            let has_tabs = operator == "<<-";
            self.documents.extend(target.map(|word| HereDocument { end: word.text, has_tabs }));
        }
    }

    /// Skips the lines of here-documents.
    pub(super) fn skip_documents(&mut self) {
        for HereDocument { end, has_tabs } in std::mem::take(&mut self.documents) {
            while !self.letters.is_at_end() {
                let line = self.letters.take_until(|letter| letter == '\n');
                self.letters.at += 1;
                let line = if has_tabs { line.trim_start_matches('\t') } else { &line };
                if line == end {
                    break;
                }
            }
        }
    }
}
