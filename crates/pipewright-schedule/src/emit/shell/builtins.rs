//! Changes of variables by the shell's own commands.

use std::rc::Rc;

use crate::emit::shell::branches::Runs;
use crate::emit::shell::changes::DeclaredType;
use crate::emit::shell::condition::DECLARES;
use crate::emit::shell::expansion::MOST_EXPANDED;
use crate::emit::shell::letters::is_name;
use crate::emit::shell::script::Reader;
use crate::emit::shell::variables::{ARGUMENTS, Assigned};
use crate::emit::shell::word::{Word, shortened};

/// The ones whose variables belong to the function that is called.
const LOCALS: [&str; 3] = ["local", "declare", "typeset"];

impl Reader {
    /// Returns whether the arguments of a command are assignments.
    pub(super) fn declares(&self, words: &[Word]) -> bool {
        words.first().and_then(Word::known).is_some_and(|name| DECLARES.contains(&name))
    }

    /// Sets a variable by `declare` and the like. `words` are the command and its flags.
    pub(super) fn declare(&mut self, words: &[Word], name: &str, given: Assigned, runs: Runs) {
        // Bash refuses `local` outside of functions.
        if runs == Runs::No || (words[0].text == "local" && self.calls.is_empty()) {
            return;
        }
        if LOCALS.contains(&words[0].text.as_str()) {
            self.declare_name(words, name, !given.adds, runs);
        }
        self.set(name, given, runs);
    }

    /// Declares a variable without a value. `is_new` says whether the function that is called may have another one.
    fn declare_name(&mut self, words: &[Word], name: &str, is_new: bool, runs: Runs) {
        let flags = words.iter().skip(1).map(|word| word.text.as_str()).filter(|text| text.starts_with('-'));
        let flags: String = flags.collect();
        if is_new && !flags.contains('g') {
            self.make_local(name);
        }
        // These change the text of each value.
        let others = ['A', 'l', 'n', 'u'];
        if flags.contains('i') || flags.contains(others) {
            let is_number = runs == Runs::Yes && !flags.contains(others);
            self.declare_type(name, Some(DeclaredType { is_number, line: words[0].line }));
        }
    }

    /// Does what a command of the shell does to variables and functions.
    pub(super) fn run_builtin(&mut self, words: &[Word], runs: Runs, line: usize) {
        let Some((name, arguments)) = words.split_first() else { return };
        let Some(name) = name.known().filter(|_| runs != Runs::No) else { return };
        let reason = |variable: &str| -> Rc<str> {
            format!("`{}` gets its value from `{name}` of line {line}, which is not run", shortened(variable))
                .into()
        };
        match name {
            _ if DECLARES.contains(&name) => self.declare_words(words, runs),
            "read" | "mapfile" | "readarray" | "getopts" => {
                for variable in arguments.iter().map(|word| word.text.as_str()).chain(["REPLY", "MAPFILE"]) {
                    self.doubt_if_run(variable, &reason(variable));
                }
            }
            "printf" => {
                let is_flag = arguments.first().is_some_and(|word| word.text == "-v");
                if let Some(variable) = arguments.get(1).filter(|_| is_flag) {
                    self.doubt_if_run(&variable.text, &reason(&variable.text));
                }
            }
            "let" => arguments.iter().for_each(|word| self.doubt_names_of(&word.text, line)),
            "eval" => {
                for part in arguments.iter().flat_map(|word| word.text.split([' ', '\t', '\n', ';'])) {
                    if let Some((variable, _)) = part.split_once('=') {
                        let variable = variable.trim_end_matches('+');
                        self.doubt_if_run(variable, &reason(variable));
                    }
                }
            }
            "unset" => arguments.iter().for_each(|word| self.unset(&word.text, runs, &reason)),
            "shift" => self.shift(arguments, runs, line),
            "set" => self.set_arguments(arguments, runs),
            "exit" if runs == Runs::Yes => self.leave(false),
            "exec" if runs == Runs::Yes && !arguments.is_empty() => self.leave(false),
            "return" if runs == Runs::Yes => self.leave(true),
            _ => {}
        }
    }

    /// Sets the variables of words such as `"A=8"`, and makes the others local.
    fn declare_words(&mut self, words: &[Word], runs: Runs) {
        for word in words.iter().skip(1).filter(|word| !word.text.starts_with('-')) {
            match word.text.split_once('=') {
                Some((name, text)) if is_name(name) => {
                    let value = Word { text: text.to_owned(), ..word.clone() };
                    self.declare(words, name, Assigned::text(value), runs);
                }
                _ if LOCALS.contains(&words[0].text.as_str()) && is_name(&word.text) => {
                    self.declare_name(words, &word.text, true, runs);
                }
                _ => {}
            }
        }
    }

    fn unset(&mut self, text: &str, runs: Runs, reason: &dyn Fn(&str) -> Rc<str>) {
        let name = text.split('[').next().unwrap_or_default();
        if runs == Runs::Yes && is_name(text) {
            let before = self.variables.remove(name);
            self.keep(name, before);
            self.declare_type(name, None);
        } else {
            self.doubt_if_run(name, &reason(name));
        }
    }

    /// Removes the first arguments of a function, or the ones that `set` gave the script.
    fn shift(&mut self, given: &[Word], runs: Runs, line: usize) {
        let Some(arguments) = self.variables.get(ARGUMENTS) else { return };
        let by = given.first().map_or(Some(1), |word| word.known()?.parse::<usize>().ok());
        match arguments.count().zip(by).filter(|_| runs == Runs::Yes && self.expanded <= MOST_EXPANDED) {
            Some((count, by)) if by > count => {}
            Some((count, by)) => {
                let rest = arguments.words(None).unwrap_or_default()[by..].to_vec();
                self.expanded += count;
                self.set(ARGUMENTS, Assigned::list(rest), runs);
            }
            None => {
                let reason = format!("the arguments after `shift` of line {line} are not known");
                self.doubt(ARGUMENTS, &reason.into());
            }
        }
    }

    /// Sets the arguments to the words of `set` behind its flags, if there are some.
    fn set_arguments(&mut self, given: &[Word], runs: Runs) {
        let mut rest = given;
        while let Some((first, behind)) = rest.split_first() {
            rest = match first.text.as_str() {
                "--" => {
                    rest = behind;
                    break;
                }
                // Its value follows.
                flag if flag.starts_with(['-', '+']) && flag.ends_with('o') => {
                    behind.get(1..).unwrap_or_default()
                }
                flag if flag.starts_with(['-', '+']) => behind,
                _ => break,
            };
        }
        let is_given = !rest.is_empty() || given.last().is_some_and(|word| word.text == "--");
        if is_given {
            let words = rest.iter().filter(|word| !word.vanishes()).cloned().collect();
            self.set(ARGUMENTS, Assigned::list(words), runs);
        }
    }
}
