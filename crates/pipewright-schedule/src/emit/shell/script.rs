//! Reads the commands of a script, one after the other.

use std::collections::HashMap;
use std::rc::Rc;

use crate::emit::read_error::ReadError;
use crate::emit::shell::branches::{CompoundKind, FirstReading, Function, List, OpenCompound, Runs};
use crate::emit::shell::changes::{Change, DeclaredType};
use crate::emit::shell::condition::result_of;
use crate::emit::shell::letters::{HereDocument, Letters, is_name};
use crate::emit::shell::variables::{ARGUMENTS, Assigned, OldValue, Variables};
use crate::emit::shell::word::{Word, shortened};

/// The most letters of the bodies of functions that are called.
const MOST_CALLED: usize = 1 << 20;
/// The most calls of functions inside each other.
const MOST_CALLS: usize = 32;
/// The largest script that is read, in bytes.
const MOST_BYTES: usize = 1 << 20;
/// The letters that end a command, unless it is a line of options alone.
pub(super) const SEPARATORS: [char; 6] = ['\n', ';', '&', '|', '(', ')'];
/// Commands that print, compare or set variables. Their words are not options of a training.
const OTHERS: [&str; 17] = [
    "echo", "printf", "cat", "tee", "grep", "sed", "awk", "logger", "[", "test", ":", "true", "false",
    "read", "let", "set", "unset",
];
/// Commands that run other files or texts.
const UNREAD: [&str; 3] = ["source", ".", "eval"];

/// A command of a script.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Command {
    /// The words.
    pub(crate) words: Vec<Word>,
    /// The line of its first letter, counted from 1.
    pub(crate) line: usize,
    /// Whether it is a line of options alone, as in a file of arguments.
    pub(crate) is_plain: bool,
    /// The line of the condition or the loop that decides whether the command runs; `None` if it certainly runs.
    pub(crate) depends_on: Option<usize>,
}

impl Command {
    /// Returns a sentence if the command may set variables by commands that are not read.
    pub(crate) fn unread_settings(&self) -> Option<String> {
        let is_known = |word: &&Word| UNREAD.contains(&word.text.as_str());
        self.words.first().filter(is_known)?;
        let words: Vec<&str> = self.words.iter().map(|word| word.text.as_str()).collect();
        Some(format!(
            "`{}` of line {} is not read; if it sets a variable of the command, write the value into the script",
            shortened(&words.join(" ")),
            self.line
        ))
    }
}

/// Returns the commands that may run, in order. Commands that print or compare are left out. Without a command that has options, each
/// array or text with options counts as one: parts of scripts can be read as they are.
///
/// # Errors
/// When the script is too long, or its functions call each other too often.
pub(crate) fn commands(script: &str) -> Result<Vec<Command>, ReadError> {
    if script.len() > MOST_BYTES {
        let what = format!(
            "the script has {} bytes, and at most {MOST_BYTES} are read; write the options alone",
            script.len()
        );
        return Err(ReadError::new(what));
    }
    let mut reader = Reader { letters: Letters::of_script(script), ..Reader::default() };
    loop {
        while !reader.letters.is_at_end() && reader.refusal.is_none() {
            reader.command();
        }
        if reader.first_reading.is_none() || reader.refusal.is_some() {
            break;
        }
        // The script ends in the loop.
        reader.read_again();
    }
    if let Some(refusal) = reader.refusal {
        return Err(refusal);
    }
    let has_option = |command: &Command| command.words.iter().any(Word::is_option);
    if reader.commands.iter().any(has_option) {
        return Ok(reader.commands);
    }
    let lists = reader.variables.into_lists().into_iter();
    let lists = lists.map(|list| {
        let line = list.first().map_or(1, |word| word.line);
        let words = list.into_iter().flat_map(Word::split).collect();
        Command { words, line, is_plain: true, depends_on: None }
    });
    Ok(lists.filter(has_option).collect())
}

/// A script that is being read.
#[derive(Default)]
pub(super) struct Reader {
    pub(super) letters: Letters,
    pub(super) variables: Variables,
    /// The types of variables.
    pub(super) types: HashMap<String, DeclaredType>,
    pub(super) functions: HashMap<String, Function>,
    /// The changes that the end of a subshell or a function may undo.
    pub(super) changes: Vec<Change>,
    pub(super) commands: Vec<Command>,
    pub(super) branches: Vec<OpenCompound>,
    /// Commands do not run while at least so many branches are open.
    pub(super) left: Option<usize>,
    /// The indexes of the branches that are calls.
    pub(super) calls: Vec<usize>,
    /// The number of loops around the next command.
    pub(super) loops: usize,
    /// The loop around the next command if it is read for the first time.
    pub(super) first_reading: Option<FirstReading>,
    pub(super) list: List,
    pub(super) documents: Vec<HereDocument>,
    /// The letters of the bodies of functions that were called.
    pub(super) called: usize,
    /// The letters of all expansions.
    pub(super) expanded: usize,
    /// The number of defaults around this text.
    pub(super) depth: usize,
    /// Whether this line has options alone, in which separators are letters.
    pub(super) is_plain: bool,
    /// Whether blanks of values do not separate words, as in `[[ .. ]]`.
    pub(super) is_unsplit: bool,
    pub(super) refusal: Option<ReadError>,
}

impl Reader {
    /// Returns whether a letter ends a command.
    pub(super) fn ends_command(&self, letter: char) -> bool {
        letter == '\n' || (!self.is_plain && SEPARATORS.contains(&letter))
    }

    /// Returns whether the next command runs.
    pub(super) fn runs(&self) -> Runs {
        let branch = self.branches.last();
        if self.left.is_some_and(|branches| self.branches.len() >= branches) {
            Runs::No
        } else if let Some(first) = &self.first_reading {
            let is_definition = branch.is_some_and(|branch| branch.outer == Runs::No);
            if is_definition { Runs::No } else { Runs::Maybe(first.line) }
        } else {
            let of_branch = branch.map_or(Runs::Yes, OpenCompound::runs);
            of_branch.only_if(self.list.condition(), self.list.line)
        }
    }

    /// Reads one command, a word of the language, or a separator.
    fn command(&mut self) {
        self.letters.skip_blanks(false);
        let Some((letter, line)) = self.letters.next() else { return };
        if self.redirection_is_next() {
            // A redirection may come before the name of a command.
        } else if self.ends_command(letter) {
            return self.separator(letter, line);
        } else if self.keyword(line) {
            return;
        }
        self.simple_command(line);
    }

    /// Reads the words of a command, and does what it does to variables.
    fn simple_command(&mut self, line: usize) {
        self.is_plain = self.letters.starts_with("--");
        let is_plain = self.is_plain;
        let runs = self.runs();
        let mut words: Vec<Word> = Vec::new();
        let mut assigned: Vec<(String, OldValue)> = Vec::new();
        let mut is_certain = true;
        while let Some(letter) = self.letters.peek() {
            if self.redirection_is_next() {
                self.redirection(&mut words);
            } else if self.ends_command(letter) {
                break;
            } else if words.is_empty()
                && let Some((name, given)) = self.assignment()
            {
                is_certain &= given.words.iter().all(|word| !word.doubt.is_unknown());
                if let Some(before) = self.replace(&name, given, runs) {
                    assigned.push((name, before));
                }
            } else if self.declares(&words)
                && let Some((name, given)) = self.assignment()
            {
                self.declare(&words, &name, given, runs);
            } else {
                // Assignments before a command are for the command alone.
                let reason: Rc<str> = format!("the value before line {line} is not kept").into();
                for (name, before) in assigned.drain(..).rev() {
                    self.variables.restore(&name, before, &reason);
                }
                words.extend(self.word_or_letter());
            }
            self.letters.skip_blanks(false);
        }
        assigned.into_iter().for_each(|(name, before)| self.keep(&name, before));
        if !is_plain && words.len() == 1 && self.letters.starts_with("(") {
            let name = words.swap_remove(0).text;
            return self.define(name, line);
        }
        if let Some(name) = words.first().and_then(Word::known)
            && let Some(&function) = self.functions.get(name)
            && runs != Runs::No
        {
            return self.call(function, words, line);
        }
        let result = if words.is_empty() { is_certain.then_some(true) } else { test(&words, result_of) };
        self.run_builtin(&words, runs, line);
        let is_other = words.first().is_none_or(|word| OTHERS.contains(&word.text.as_str()));
        if runs != Runs::No && !is_other {
            let words = words.into_iter().flat_map(Word::split).collect();
            let depends_on = if let Runs::Maybe(line) = runs { Some(line) } else { None };
            self.commands.push(Command { words, line, is_plain, depends_on });
        }
        self.end_command(result, line);
    }

    /// Reads the definition of a function, whose name is read.
    pub(super) fn define(&mut self, name: String, line: usize) {
        if self.letters.take("(") {
            self.letters.skip_blanks(false);
            self.letters.take(")");
        }
        self.letters.skip_blanks(true);
        let in_parentheses = self.letters.peek() == Some('(');
        if !in_parentheses && self.letters.peek() != Some('{') {
            return;
        }
        self.letters.at += 1;
        let runs = self.runs();
        if runs != Runs::No {
            let is_certain = runs == Runs::Yes;
            let function = Function { start: self.letters.at, in_parentheses, is_certain };
            let before = self.functions.insert(name.clone(), function);
            self.changes.push(Change::Function(name, before));
        }
        self.open(CompoundKind::Definition(in_parentheses), line);
    }

    /// Begins the body of a function with the words of its call.
    fn call(&mut self, function: Function, words: Vec<Word>, line: usize) {
        let Function { start, in_parentheses, is_certain } = function;
        let is_too_much = self.calls.len() >= MOST_CALLS || self.called > MOST_CALLED;
        if let Some(first) = &mut self.first_reading {
            if is_too_much || !first.called.insert(start) {
                return self.end_command(None, line);
            }
        } else if is_too_much {
            let what = "the functions of the script call each other too often; write the command of the training alone";
            self.refusal = Some(ReadError::new(what).at(line));
            return;
        }
        let back = self.letters.at;
        self.open(CompoundKind::Call { back, start, in_parentheses }, line);
        let words = words.into_iter().skip(1).filter(|word| !word.vanishes()).collect();
        let before = self.variables.set(ARGUMENTS, Assigned::list(words), None);
        self.changes.push(Change::Local(ARGUMENTS.to_owned(), before));
        self.called += 1;
        self.letters.at = start;
        if let Some(branch) = self.branches.last_mut().filter(|_| !is_certain) {
            branch.doubt();
        }
    }

    /// Reads `A=..`, `A+=..`, `A[0]=..` or `A=( .. )`, if it is next.
    fn assignment(&mut self) -> Option<(String, Assigned)> {
        let start = self.letters.at;
        let name = self.letters.take_name();
        let line = self.letters.line();
        let subscript = if self.letters.peek() == Some('[') { self.letters.take_subscript() } else { None };
        let adds = self.letters.starts_with("+=");
        if !is_name(&name) || !(adds || self.letters.starts_with("=")) {
            self.letters.at = start;
            return None;
        }
        self.letters.at += 1 + usize::from(adds);
        let index = subscript.map(|subscript| self.sum(&format!("({subscript})"), line));
        let is_list = self.letters.take("(");
        let words = if is_list { self.list_of_words() } else { self.value() };
        Some((name, Assigned { words, is_list, adds, index }))
    }

    /// Reads the elements of a list up to its parenthesis.
    fn list_of_words(&mut self) -> Vec<Word> {
        let mut words = Vec::new();
        self.letters.skip_blanks(true);
        while self.letters.peek().is_some_and(|letter| letter != ')') {
            let (start, line) = (self.letters.at, self.letters.line());
            let has_index = self.letters.peek() == Some('[') && self.letters.take_subscript().is_some();
            if has_index && self.letters.take("=") {
                let reason = format!("an element of line {line} has an index, which is not read");
                words.push(Word::unknown(line, &reason));
                words.extend(self.word());
            } else {
                self.letters.at = start;
                words.extend(self.word_or_letter());
            }
            self.letters.skip_blanks(true);
        }
        self.letters.take(")");
        words
    }

    /// Reads the pieces of the value of a variable, in which blanks of values separate no words.
    fn value(&mut self) -> Vec<Word> {
        let line = self.letters.line();
        let before = std::mem::replace(&mut self.is_unsplit, true);
        let words = self.word();
        self.is_unsplit = before;
        if words.is_empty() { vec![Word::new("", line)] } else { words }
    }
}

/// Returns the result of a test, unless it needs a command or a file. A variable without a value is empty.
pub(super) fn test(words: &[Word], result_of: impl Fn(&[&str]) -> Option<bool>) -> Option<bool> {
    if words.iter().any(|word| word.doubt.is_unknown()) {
        return None;
    }
    let words = words.iter().filter(|word| !word.vanishes());
    result_of(&words.map(|word| word.text.as_str()).collect::<Vec<_>>())
}
