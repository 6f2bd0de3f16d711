//! Reads the commands of a script, one after the other.

use std::collections::HashMap;
use std::rc::Rc;

use crate::emit::read_error::ReadError;
use crate::emit::shell::arithmetic::names_set;
use crate::emit::shell::branches::{CompoundKind, Function, List, OpenCompound, Runs};
use crate::emit::shell::condition::result_of;
use crate::emit::shell::letters::{Letters, is_name};
use crate::emit::shell::variables::{ARGUMENTS, Assigned, OldValue, Variables};
use crate::emit::shell::word::{Doubt, Word, shortened};

/// The most letters of the bodies of functions that are called.
const MOST_CALLED: usize = 1 << 20;
/// The most calls of functions inside each other.
const MOST_CALLS: usize = 32;
/// The largest script that is read, in bytes.
const MOST_BYTES: usize = 1 << 20;
/// The letters that end a command, unless it is a line of options alone.
pub(super) const SEPARATORS: [char; 6] = ['\n', ';', '&', '|', '(', ')'];
/// Commands that print, compare or set variables. Their words are not options of a training.
const OTHERS: [&str; 16] = [
    "echo", "printf", "cat", "tee", "grep", "sed", "awk", "logger", "[", "test", ":", "true", "false",
    "read", "let", "unset",
];

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
    while !reader.letters.is_at_end() && reader.refusal.is_none() {
        reader.command();
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

/// A here-document, whose lines follow.
#[derive(Debug)]
pub(super) struct HereDocument {
    /// The line that ends it.
    pub(super) end: String,
    /// Whether tabs before its lines do not count.
    pub(super) has_tabs: bool,
}

/// A script that is being read.
#[derive(Default)]
pub(super) struct Reader {
    pub(super) letters: Letters,
    pub(super) variables: Variables,
    pub(super) functions: HashMap<String, Function>,
    commands: Vec<Command>,
    pub(super) branches: Vec<OpenCompound>,
    /// The indexes of the branches that are subshells.
    pub(super) subshells: Vec<usize>,
    /// The indexes of the branches that are calls.
    pub(super) calls: Vec<usize>,
    /// The number of loops around the next command.
    pub(super) loops: usize,
    pub(super) list: List,
    pub(super) documents: Vec<HereDocument>,
    /// The letters of the bodies of functions that were called.
    pub(super) called: usize,
    /// The letters of all loops.
    pub(super) scanned: usize,
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
        let of_branch = self.branches.last().map_or(Runs::Yes, OpenCompound::runs);
        of_branch.only_if(self.list.condition(), self.list.line)
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
                let reason = reason_of_condition(&name, runs);
                if runs != Runs::No {
                    let before = self.variables.set(&name, given, reason.as_ref());
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
            if let Some(&index) = self.subshells.last() {
                self.branches[index].functions.push((name, before));
            }
        }
        self.open(CompoundKind::Definition(in_parentheses), line);
    }

    /// Begins the body of a function with the words of its call.
    fn call(&mut self, function: Function, words: Vec<Word>, line: usize) {
        if self.calls.len() >= MOST_CALLS || self.called > MOST_CALLED {
            let what = "the functions of the script call each other too often; write the command of the training alone";
            self.refusal = Some(ReadError::new(what).at(line));
            return;
        }
        let Function { start, in_parentheses, is_certain } = function;
        let back = self.letters.at;
        let kept = self.subshells.last().map_or(0, |&index| self.branches[index].saved.len());
        self.open(CompoundKind::Call { back, start, in_parentheses, kept }, line);
        let arguments = Assigned { words: words.into_iter().skip(1).collect(), is_list: true, adds: false };
        let before = self.variables.set(ARGUMENTS, arguments, None);
        self.called += 1;
        self.letters.at = start;
        if let Some(branch) = self.branches.last_mut() {
            branch.saved.push((ARGUMENTS.to_owned(), before));
            if !is_certain {
                branch.doubt();
            }
        }
    }

    /// Ends the script, the subshell or the function, as `exit` or `return` does.
    pub(super) fn leave(&mut self, is_return: bool) {
        let index = if is_return { self.calls.last() } else { self.subshells.last() };
        match index {
            Some(&index) => self.branches[index..].iter_mut().for_each(OpenCompound::leave),
            None if is_return => {}
            None => self.letters.skip_to_end(),
        }
    }

    /// Sets a variable unless it is certain that the command does not run.
    pub(super) fn set(&mut self, name: &str, given: Assigned, runs: Runs) {
        if runs != Runs::No {
            let reason = reason_of_condition(name, runs);
            let before = self.variables.set(name, given, reason.as_ref());
            self.keep(name, before);
        }
    }

    /// Keeps the value of a variable before a change for the end of the subshell, if there is one.
    pub(super) fn keep(&mut self, name: &str, before: OldValue) {
        if let Some(&index) = self.subshells.last() {
            self.branches[index].saved.push((name.to_owned(), before));
        }
    }

    /// Makes a variable one of the function that is called, which loses its value when the function ends.
    pub(super) fn make_local(&mut self, name: &str) {
        if let Some(&index) = self.calls.last() {
            let before = self.variables.remove(name);
            self.branches[index].saved.push((name.to_owned(), before));
        }
    }

    /// Marks a variable as not known if the command may run.
    pub(super) fn doubt_if_run(&mut self, name: &str, reason: &Rc<str>) {
        if self.runs() != Runs::No && is_name(name) {
            let before = self.variables.doubt(name, reason);
            self.keep(name, before);
        }
    }

    /// Marks the variables that a sum sets.
    pub(super) fn doubt_names_of(&mut self, sum: &str, line: usize) {
        for name in names_set(sum) {
            let reason =
                format!("`{}` has the value of a sum of line {line}, which is not read", shortened(name));
            self.doubt_if_run(name, &reason.into());
        }
    }

    /// Reads `A=..`, `A+=..` or `A=( .. )`, if it is next.
    fn assignment(&mut self) -> Option<(String, Assigned)> {
        let start = self.letters.at;
        let name = self.letters.take_name();
        let adds = self.letters.starts_with("+=");
        if !is_name(&name) || !(adds || self.letters.starts_with("=")) {
            self.letters.at = start;
            return None;
        }
        self.letters.at += 1 + usize::from(adds);
        let is_list = self.letters.take("(");
        let words = if is_list { self.list_of_words() } else { self.value() };
        Some((name, Assigned { words, is_list, adds }))
    }

    /// Reads the elements of a list up to its parenthesis.
    fn list_of_words(&mut self) -> Vec<Word> {
        let mut words = Vec::new();
        self.letters.skip_blanks(true);
        while self.letters.peek().is_some_and(|letter| letter != ')') {
            words.extend(self.word_or_letter());
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

/// Returns the reason of a doubt if it is not certain that a command runs that sets a variable.
fn reason_of_condition(name: &str, runs: Runs) -> Option<Rc<str>> {
    let Runs::Maybe(line) = runs else { return None };
    let name = shortened(name);
    Some(format!("`{name}` depends on a condition or a loop of line {line}, which is not run").into())
}

/// Returns the result of a test, unless it needs a command or a file. A variable without a value is empty.
pub(super) fn test(words: &[Word], result_of: impl Fn(&[&str]) -> Option<bool>) -> Option<bool> {
    if words.iter().any(|word| word.doubt.is_unknown()) {
        return None;
    }
    let is_word = |word: &&Word| !matches!(word.doubt, Doubt::Absent(_));
    let words: Vec<&str> = words.iter().filter(is_word).map(|word| word.text.as_str()).collect();
    result_of(&words)
}
