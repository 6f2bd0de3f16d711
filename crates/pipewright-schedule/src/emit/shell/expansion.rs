//! Reads words: quotes, and the values of variables, lists, defaults and sums.

use crate::emit::shell::arithmetic::{evaluate, number};
use crate::emit::shell::letters::{Letters, is_of_name};
use crate::emit::shell::script::Reader;
use crate::emit::shell::variables::{ARGUMENTS, Assigned, Variable};
use crate::emit::shell::word::{Doubt, Word, Words, concatenated, join, shortened};

/// The most letters of all expansions.
pub(super) const MOST_EXPANDED: usize = 1 << 21;
/// The most defaults inside each other, as in `${A:-${B:-8}}`.
const MOST_DEPTH: usize = 16;
/// The operators behind the name of a variable.
const OPERATORS: [&str; 8] = [":-", ":=", ":+", ":?", "-", "=", "+", "?"];

impl Reader {
    /// Reads a word, or skips a letter that begins none.
    pub(super) fn word_or_letter(&mut self) -> Vec<Word> {
        let start = self.letters.at;
        let words = self.word();
        self.letters.at += usize::from(self.letters.at == start);
        words
    }

    /// Reads a word, which expansions may make several or none.
    pub(super) fn word(&mut self) -> Vec<Word> {
        let mut words = Words { are_pieces: self.is_unsplit, ..Words::default() };
        while let Some((letter, line)) = self.letters.next() {
            match letter {
                '\\' => self.escaped(&mut words, line),
                '\'' => words.append(self.single_quoted(line)),
                '"' => self.double_quoted(&mut words, line),
                '$' | '`' => {
                    let elements = self.expansion(false, line);
                    if self.is_unsplit {
                        words.add_quoted(elements);
                    } else {
                        words.add_split(elements);
                    }
                }
                '<' | '>' => break,
                letter if letter.is_whitespace() || self.ends_command(letter) => break,
                letter => {
                    words.push(letter, line);
                    self.letters.at += 1;
                }
            }
        }
        words.finish()
    }

    /// Reads a letter after a backslash. A line that ends in a backslash continues.
    fn escaped(&mut self, words: &mut Words, line: usize) {
        self.letters.at += 1;
        if let Some((next, _)) = self.letters.next() {
            self.letters.at += 1;
            if next != '\n' {
                words.push(next, line);
            }
        }
    }

    fn single_quoted(&mut self, line: usize) -> Word {
        self.letters.at += 1;
        let text = self.letters.take_until(|letter| letter == '\'');
        self.letters.at += 1;
        Word { is_quoted: true, ..Word::new(text, line) }
    }

    /// Reads a text in double quotes. The elements of a list are words of their own.
    fn double_quoted(&mut self, words: &mut Words, line: usize) {
        self.letters.at += 1;
        let mut has_empty_list = false;
        while let Some((letter, line)) = self.letters.next().filter(|(letter, _)| *letter != '"') {
            if letter == '$' || letter == '`' {
                let elements = self.expansion(true, line);
                has_empty_list |= elements.iter().all(|word| matches!(word.doubt, Doubt::Absent(_)));
                words.add_quoted(elements);
                continue;
            }
            self.letters.at += 1;
            match (letter, self.letters.peek()) {
                ('\\', Some('\n')) => self.letters.at += 1,
                ('\\', Some(next @ ('$' | '`' | '"' | '\\'))) => {
                    words.push(next, line);
                    self.letters.at += 1;
                }
                _ => words.push(letter, line),
            }
        }
        self.letters.at += 1;
        if !has_empty_list {
            words.current.get_or_insert_with(|| Word::new("", line)).is_quoted = true;
        }
    }

    /// Reads an expansion, and returns its words: the elements of a list, or one.
    fn expansion(&mut self, in_quotes: bool, line: usize) -> Vec<Word> {
        let unknown = |reason: String| vec![Word::unknown(line, &reason)];
        let is_command = self.letters.peek() == Some('`');
        self.letters.at += 1;
        if is_command {
            let command = shortened(&self.letters.take_until(|letter| letter == '`'));
            self.letters.at += 1;
            return unknown(format!("`{command}` of line {line} is not run"));
        }
        match self.letters.peek() {
            Some('(') if self.letters.starts_with("((") => {
                let sum = self.letters.take_enclosed('(', ')');
                vec![self.sum(&sum, line)]
            }
            Some('(') => {
                let command = shortened(&self.letters.take_enclosed('(', ')'));
                unknown(format!("`$({command})` of line {line} is not run"))
            }
            Some('{') => {
                let inside = self.letters.take_enclosed('{', '}');
                self.parameter(&inside, in_quotes, line)
            }
            Some('\'') if !in_quotes => vec![self.single_quoted(line)],
            Some('"') if !in_quotes => Vec::new(),
            Some(letter) if letter.is_ascii_alphabetic() || letter == '_' => {
                let name = self.letters.take_name();
                self.parameter(&name, in_quotes, line)
            }
            Some(letter) if letter.is_ascii_digit() || "@*#?!$-".contains(letter) => {
                self.letters.at += 1;
                self.parameter(&letter.to_string(), in_quotes, line)
            }
            _ => vec![Word::new("$", line)],
        }
    }

    /// Returns the value of `$((..))`, whose text has its inner parentheses.
    pub(super) fn sum(&mut self, sum: &str, line: usize) -> Word {
        self.doubt_names_of(sum, line);
        let expanded = if sum.contains("${") { self.text_of(sum, true, line) } else { None };
        let text = expanded.as_ref().map_or(sum, |word| word.known().unwrap_or_default());
        let known = |name: &str| number(self.variables.known(name)?);
        match evaluate(text, &known) {
            Some(number) => Word::new(number.to_string(), line),
            None => {
                let reason = format!("`$({})` of line {line} has a value that is not known", shortened(sum));
                Word::unknown(line, &reason)
            }
        }
    }

    /// Returns the words of `${inside}`.
    fn parameter(&mut self, inside: &str, in_quotes: bool, line: usize) -> Vec<Word> {
        let not_read = || {
            let reason = format!("`${{{}}}` of line {line} is not read", shortened(inside));
            vec![Word::unknown(line, &reason)]
        };
        let end = inside.find(|letter| !is_of_name(letter)).unwrap_or(inside.len());
        let end = if end == 0 { inside.chars().next().map_or(0, char::len_utf8) } else { end };
        let (name, rest) = inside.split_at(end);
        let (subscript, rest) = match rest.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some((subscript, rest)) => (subscript, rest),
            None => ("", rest),
        };
        let is_prefix = ["#", "!"].contains(&name) && !rest.is_empty();
        if is_prefix || ["?", "!", "$", "-", ""].contains(&name) {
            return not_read();
        }
        let is_list = ["@", "*"].contains(&name) || ["@", "*"].contains(&subscript);
        let index = match subscript {
            "" | "@" | "*" => 0,
            subscript => match subscript.parse::<usize>() {
                Ok(index) => index,
                Err(_not_a_number) => return not_read(),
            },
        };
        let value = self.value_of(name, is_list, index, in_quotes, line);
        let operator = OPERATORS.into_iter().find(|operator| rest.starts_with(operator));
        let words = match operator {
            None if rest.is_empty() => value.unwrap_or_else(|| vec![unset(name, is_list, line)]),
            None => return not_read(),
            Some(operator) => {
                let text = &rest[operator.len()..];
                match self.with_operator(name, value, operator, text, in_quotes, line) {
                    Some(words) => words,
                    None => return not_read(),
                }
            }
        };
        // A text has the elements of a list with blanks between them.
        let is_joined = is_list && (self.is_unsplit || (in_quotes && (name == "*" || subscript == "*")));
        if is_joined { vec![join(words, line)] } else { words }
    }

    /// Returns the words of a variable: all, or the one with an index. `None` if the file does not set it.
    fn value_of(
        &mut self,
        name: &str,
        is_list: bool,
        index: usize,
        in_quotes: bool,
        line: usize,
    ) -> Option<Vec<Word>> {
        let arguments = self.variables.get(ARGUMENTS);
        let unknown = |reason: String| Some(vec![Word::unknown(line, &reason)]);
        let number = name.parse::<usize>().ok();
        let variable = match (name, number) {
            ("#", _) => {
                return match arguments.and_then(Variable::count) {
                    Some(count) => Some(vec![Word::new(count.to_string(), line)]),
                    None => {
                        unknown(format!("`$#` of line {line} is a number of arguments that is not known"))
                    }
                };
            }
            (_, Some(0)) => return unknown(format!("`$0` of line {line} is the name of the script")),
            ("@" | "*", _) | (_, Some(_)) => arguments?,
            _ => self.variables.get(name)?,
        };
        let index = number.map_or(index, |number| number - 1);
        let Some(words) = variable.words((!is_list).then_some(index)) else {
            return unknown(format!("`{}` of line {line} has elements that are not known", shortened(name)));
        };
        if self.expanded <= MOST_EXPANDED {
            self.expanded += words.iter().map(|word| 1 + word.text.len()).sum::<usize>();
        }
        if self.expanded > MOST_EXPANDED {
            return unknown(format!("the values up to line {line} are too long"));
        }
        let words = variable.copy(words);
        let is_text = !variable.is_list && in_quotes && !self.is_unsplit;
        Some(if is_text || (words.is_empty() && !is_list) { vec![concatenated(words, line)] } else { words })
    }

    /// Returns the words of `${name:-text}` and the like; `None` if there are too many inside each other.
    fn with_operator(
        &mut self,
        name: &str,
        value: Option<Vec<Word>>,
        operator: &str,
        text: &str,
        in_quotes: bool,
        line: usize,
    ) -> Option<Vec<Word>> {
        let unknown = value.iter().flatten().find(|word| word.doubt.is_unknown());
        if let Some(doubt) = unknown.map(|word| word.doubt.clone()) {
            if operator.ends_with('+') {
                return Some(vec![Word { doubt, ..self.text_of(text, in_quotes, line)? }]);
            }
            return value;
        }
        let is_empty = |words: &Vec<Word>| words.first().is_none_or(|word| word.text.is_empty());
        let is_used = |words: &Vec<Word>| !(operator.starts_with(':') && is_empty(words));
        let value = value.filter(is_used);
        match (operator.trim_start_matches(':'), value) {
            ("+", None) => Some(vec![Word::new("", line)]),
            ("+", Some(_)) | ("-", None) => Some(vec![self.text_of(text, in_quotes, line)?]),
            ("=", None) => {
                let word = self.text_of(text, in_quotes, line)?;
                let runs = self.runs();
                self.set(name, Assigned::text(word.clone()), runs);
                Some(vec![word])
            }
            (_, None) => Some(vec![unset(name, false, line)]),
            (_, Some(words)) => Some(words),
        }
    }

    /// Returns a text with its expansions, such as the one after `:-`; `None` if there are too many inside each other.
    fn text_of(&mut self, text: &str, in_quotes: bool, line: usize) -> Option<Word> {
        if self.depth >= MOST_DEPTH {
            return None;
        }
        self.depth += 1;
        let outer = std::mem::replace(&mut self.letters, Letters::of_text(text, line));
        let mut words = Words::default();
        words.append(Word::new("", line));
        while let Some((letter, line)) = self.letters.next() {
            match letter {
                '\\' => self.escaped(&mut words, line),
                '\'' if !in_quotes => words.append(self.single_quoted(line)),
                '"' => self.double_quoted(&mut words, line),
                '$' | '`' => {
                    let elements = self.expansion(true, line);
                    words.append(self.as_text(elements, line));
                }
                letter => {
                    words.push(letter, line);
                    self.letters.at += 1;
                }
            }
        }
        self.letters = outer;
        self.depth -= 1;
        Some(self.as_text(words.finish(), line))
    }

    /// Joins the elements of a list by blanks. In the value of a variable, they are the pieces of a text.
    fn as_text(&self, words: Vec<Word>, line: usize) -> Word {
        if self.is_unsplit { concatenated(words, line) } else { join(words, line) }
    }
}

/// Returns the word of a variable that the file does not set.
fn unset(name: &str, is_list: bool, line: usize) -> Word {
    let shown = shortened(name);
    let reason = match name {
        "@" | "*" => format!("`${name}` of line {line} has the arguments of the script"),
        _ if name.starts_with(|letter: char| letter.is_ascii_digit()) => {
            format!("`${shown}` of line {line} is an argument of the script")
        }
        _ => format!("`{shown}` of line {line} has no value in the file"),
    };
    let doubt = if is_list { Doubt::Absent(reason.into()) } else { Doubt::Unset(reason.into()) };
    Word { doubt, ..Word::new("", line) }
}
