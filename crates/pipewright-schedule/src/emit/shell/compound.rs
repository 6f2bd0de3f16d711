//! Reads separators, the words of the language, and the compound commands that they open and close.

use crate::emit::shell::branches::{CompoundKind, Link, List, OpenCompound, Runs};
use crate::emit::shell::condition::{and, holds_in_double_brackets, matches, or};
use crate::emit::shell::loops::reason_of_loop;
use crate::emit::shell::script::{Reader, SEPARATORS, test};
use crate::emit::shell::word::{Doubt, Word, join};

impl Reader {
    /// Reads a separator, which ends a command or connects it to the next one.
    pub(super) fn separator(&mut self, letter: char, line: usize) {
        self.is_plain = false;
        if letter == '(' {
            return self.open_parenthesis(line);
        }
        self.letters.at += 1;
        let is_double = self.letters.peek() == Some(letter);
        match letter {
            '\n' => {
                self.skip_documents();
                if self.list.link == Link::None && !self.list.is_piped {
                    self.end_list();
                }
            }
            ')' => {
                if let Some(
                    CompoundKind::Subshell
                    | CompoundKind::Definition(true)
                    | CompoundKind::Call { in_parentheses: true, .. },
                ) = self.branches.last().map(|branch| &branch.kind)
                {
                    self.close(self.list.status);
                }
            }
            '&' | '|' if is_double => {
                self.letters.at += 1;
                self.list.link = if letter == '&' { Link::And } else { Link::Or };
            }
            '|' => {
                self.letters.take("&");
            }
            ';' if is_double || self.letters.peek() == Some('&') => {
                let operator = self.letters.take_until(|letter| !";&".contains(letter));
                self.end_list();
                // After `;&` and `;;&`, more than one branch may run.
                self.patterns(operator == ";");
            }
            '&' => {
                self.undo(self.list.start, line);
                self.end_list();
                self.list.status = Some(true);
            }
            _ => self.end_list(),
        }
    }

    /// Ends a list of commands, which no `&` follows any more.
    fn end_list(&mut self) {
        if self.branches.is_empty() {
            self.changes.clear();
        }
        self.list = List { status: self.list.status, ..List::after(self.changes.len()) };
    }

    /// Reads a subshell or a sum, whose parenthesis is next.
    fn open_parenthesis(&mut self, line: usize) {
        if !self.letters.starts_with("((") {
            self.letters.at += 1;
            return self.open(CompoundKind::Subshell, line);
        }
        let sum = self.letters.take_enclosed('(', ')');
        self.doubt_names_of(&sum, line);
        self.end_command(None, line);
    }

    /// Reads a word of the language, if there is one.
    pub(super) fn keyword(&mut self, line: usize) -> bool {
        let is_end =
            |letter: char| letter.is_whitespace() || SEPARATORS.contains(&letter) || "<>".contains(letter);
        let word = self.letters.word_ahead(9, is_end);
        let status = self.list.status;
        let kind = self.branches.last().map(|branch| &branch.kind);
        match (word.as_str(), kind) {
            ("if", _) => self.open_after(&word, CompoundKind::If, line),
            ("while" | "until", _) => self.open_after(&word, CompoundKind::Loop, line),
            ("for" | "select", _) => {
                self.letters.at += word.len();
                self.loop_over_words(line);
            }
            ("case", _) => {
                self.letters.at += word.len();
                self.open_case(line);
            }
            ("{", _) => self.open_after(&word, CompoundKind::Group, line),
            ("then", Some(CompoundKind::If)) => self.next_branch(&word, |branch| branch.begin(status)),
            ("elif", Some(CompoundKind::If)) => self.next_branch(&word, |branch| {
                branch.end();
                branch.begin(Some(true));
                branch.line = line;
            }),
            ("else", Some(CompoundKind::If)) => self.next_branch(&word, |branch| {
                branch.end();
                branch.begin(Some(true));
            }),
            ("do", Some(CompoundKind::Loop)) => self.next_branch(&word, |_| {}),
            ("fi", Some(CompoundKind::If))
            | ("done", Some(CompoundKind::Loop))
            | ("esac", Some(CompoundKind::Case(_))) => {
                self.letters.at += word.len();
                self.close(None);
            }
            (
                "}",
                Some(
                    CompoundKind::Group
                    | CompoundKind::Definition(false)
                    | CompoundKind::Call { in_parentheses: false, .. },
                ),
            ) => {
                self.letters.at += word.len();
                self.close(status);
            }
            ("!", _) => {
                self.letters.at += word.len();
                self.list.is_negated = !self.list.is_negated;
            }
            ("time", _) => self.letters.at += word.len(),
            ("[[", _) => {
                self.letters.at += word.len();
                let result = self.double_brackets();
                self.end_command(result, line);
            }
            ("function", _) => {
                self.letters.at += word.len();
                self.letters.skip_blanks(false);
                let name = self.letters.take_until(is_end);
                self.letters.skip_blanks(false);
                self.define(name, line);
            }
            _ => return false,
        }
        true
    }

    /// Opens a compound command whose first word is next.
    fn open_after(&mut self, word: &str, kind: CompoundKind, line: usize) {
        self.letters.at += word.len();
        self.open(kind, line);
    }

    /// Begins another part of the innermost compound command. The word that begins it is next.
    fn next_branch(&mut self, word: &str, change: impl FnMut(&mut OpenCompound)) {
        self.letters.at += word.len();
        self.branches.last_mut().into_iter().for_each(change);
        self.list = List::after(self.changes.len());
    }

    /// Opens a compound command.
    pub(super) fn open(&mut self, kind: CompoundKind, line: usize) {
        let outer = if matches!(kind, CompoundKind::Definition(_)) { Runs::No } else { self.runs() };
        let is_loop = matches!(kind, CompoundKind::Loop);
        self.loops += usize::from(is_loop);
        if let CompoundKind::Call { .. } = kind {
            self.calls.push(self.branches.len());
        }
        let start = self.changes.len();
        let list = std::mem::replace(&mut self.list, List::after(start));
        self.branches.push(OpenCompound::new(kind, line, outer, list, start));
        if is_loop && self.loops == 1 && outer != Runs::No {
            self.begin_first_reading(line);
        }
    }

    /// Closes the innermost compound command, whose result is given.
    fn close(&mut self, result: Option<bool>) {
        if self.ends_first_reading() {
            return self.read_again();
        }
        let Some(branch) = self.branches.pop() else { return };
        match &branch.kind {
            CompoundKind::Loop => self.loops -= 1,
            CompoundKind::Subshell => self.undo(branch.start, branch.line),
            CompoundKind::Call { back, start, in_parentheses } => {
                self.called += self.letters.at - start;
                self.letters.at = *back;
                self.calls.pop();
                if *in_parentheses {
                    self.undo(branch.start, branch.line);
                } else {
                    self.undo_locals(branch.start, branch.line);
                }
                self.left = self.left.filter(|&branches| branches <= self.branches.len());
            }
            _ => {}
        }
        self.list = branch.list;
        self.end_command(result, branch.line);
    }

    /// Ends a command whose result is given: reads what follows a compound command, and adds the result to the list.
    pub(super) fn end_command(&mut self, result: Option<bool>, line: usize) {
        self.letters.skip_blanks(false);
        while self.redirection_is_next() {
            self.redirection(&mut Vec::new());
            self.letters.skip_blanks(false);
        }
        let is_piped = self.letters.starts_with("|") && !self.letters.starts_with("||");
        if is_piped || self.list.is_piped {
            self.undo(self.list.command_start, line);
        }
        (self.list.is_piped, self.list.command_start) = (is_piped, self.changes.len());
        if !is_piped {
            self.list.add(result, line);
        }
    }

    /// Reads the words of a loop up to `do`.
    fn loop_over_words(&mut self, line: usize) {
        self.letters.skip_blanks(false);
        let reason = reason_of_loop(line);
        if self.letters.starts_with("((") {
            let sum = self.letters.take_enclosed('(', ')');
            self.doubt_names_of(&sum, line);
        } else {
            let name = self.letters.take_name();
            self.doubt_if_run(&name, &reason);
            while self.letters.peek().is_some_and(|letter| !self.ends_command(letter)) {
                self.word_or_letter();
                self.letters.skip_blanks(false);
            }
        }
        self.open(CompoundKind::Loop, line);
    }

    fn open_case(&mut self, line: usize) {
        self.letters.skip_blanks(false);
        let word = join(self.word_or_letter(), line);
        self.letters.skip_blanks(true);
        self.letters.take("in");
        let is_known = matches!(word.doubt, Doubt::None | Doubt::Unset(_));
        self.open(CompoundKind::Case(is_known.then_some(word.text)), line);
        self.patterns(true);
    }

    /// Reads the patterns of the next branch of `case`, up to the parenthesis.
    fn patterns(&mut self, is_alone: bool) {
        if !matches!(self.branches.last().map(|branch| &branch.kind), Some(CompoundKind::Case(_))) {
            return;
        }
        self.letters.skip_blanks(true);
        if self.letters.word_ahead(5, |letter| letter.is_whitespace() || SEPARATORS.contains(&letter))
            == "esac"
        {
            return;
        }
        self.letters.take("(");
        let mut holds = Some(false);
        loop {
            self.letters.skip_blanks(true);
            let Some(letter) = self.letters.peek() else { break };
            if letter == ')' {
                self.letters.at += 1;
                break;
            }
            if letter == '|' {
                self.letters.at += 1;
                continue;
            }
            let pattern = join(self.word_or_letter(), 0);
            let kind = self.branches.last().map(|branch| &branch.kind);
            let own = match (kind, pattern.known()) {
                (_, Some("*")) => Some(true),
                (Some(CompoundKind::Case(Some(word))), Some(pattern)) => matches(word, pattern),
                _ => None,
            };
            holds = or(holds, own);
        }
        if let Some(branch) = self.branches.last_mut() {
            branch.end();
            branch.begin(holds);
            if !is_alone {
                branch.doubt();
            }
        }
    }

    /// Reads the conditions of `[[ .. ]]`.
    fn double_brackets(&mut self) -> Option<bool> {
        let (mut any, mut all, mut words) = (Some(false), Some(true), Vec::new());
        let mut is_grouped = false;
        self.is_unsplit = true;
        loop {
            self.letters.skip_blanks(true);
            let Some((letter, line)) = self.letters.next() else { break };
            if self.letters.take("]]") {
                break;
            } else if self.letters.take("&&") {
                all = and(all, test(&std::mem::take(&mut words), holds_in_double_brackets));
            } else if self.letters.take("||") {
                any = or(any, and(all, test(&std::mem::take(&mut words), holds_in_double_brackets)));
                all = Some(true);
            } else if SEPARATORS.contains(&letter) || "<>".contains(letter) {
                is_grouped |= "()".contains(letter);
                self.letters.at += 1;
                words.push(Word::new(letter, line));
            } else if words.last().is_some_and(|word: &Word| word.text == "=~") {
                words.push(Word::new(self.letters.take_until(char::is_whitespace), line));
            } else {
                words.extend(self.word_or_letter());
            }
        }
        self.is_unsplit = false;
        let result = or(any, and(all, test(&words, holds_in_double_brackets)));
        if is_grouped { None } else { result }
    }
}
