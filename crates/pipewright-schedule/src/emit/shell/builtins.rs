//! Changes of variables by the shell's own commands.

use std::rc::Rc;

use crate::emit::shell::branches::Runs;
use crate::emit::shell::letters::is_name;
use crate::emit::shell::script::Reader;
use crate::emit::shell::variables::{ARGUMENTS, Assigned};
use crate::emit::shell::word::{Word, shortened};

/// Commands whose arguments are assignments.
const DECLARES: [&str; 5] = ["export", "local", "declare", "readonly", "typeset"];
/// The ones whose variables belong to the function that is called.
const LOCALS: [&str; 3] = ["local", "declare", "typeset"];

impl Reader {
    /// Returns whether the arguments of a command are assignments.
    pub(super) fn declares(&self, words: &[Word]) -> bool {
        words.first().and_then(Word::known).is_some_and(|name| DECLARES.contains(&name))
    }

    /// Sets a variable by `declare` and the like. `words` are the command and its flags.
    pub(super) fn declare(&mut self, words: &[Word], name: &str, given: Assigned, runs: Runs) {
        if runs == Runs::No {
            return;
        }
        let line = words.first().map_or(1, |word| word.line);
        let flags = words.iter().skip(1).map(|word| word.text.as_str()).filter(|text| text.starts_with('-'));
        let flags: String = flags.collect();
        // These change the text of each value.
        let is_changed = flags.contains(['i', 'l', 'n', 'u']);
        let is_number = given.words.iter().all(|word| word.text.parse::<i64>().is_ok());
        if LOCALS.contains(&words[0].text.as_str()) && !flags.contains('g') && !given.adds {
            self.make_local(name);
        }
        self.set(name, given, runs);
        if is_changed && !is_number {
            let reason = format!(
                "`{}` is declared with `{}` in line {line}, which is not read",
                shortened(name),
                shortened(&flags)
            );
            self.doubt_if_run(name, &reason.into());
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
            "shift" => self.forget_arguments(),
            "set" if arguments.iter().any(|word| word.text == "--") => self.forget_arguments(),
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
                    self.declare(
                        words,
                        name,
                        Assigned { words: vec![value], is_list: false, adds: false },
                        runs,
                    );
                }
                _ if LOCALS.contains(&words[0].text.as_str()) && is_name(&word.text) => {
                    self.make_local(&word.text);
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
        } else {
            self.doubt_if_run(name, &reason(name));
        }
    }

    fn forget_arguments(&mut self) {
        let before = self.variables.remove(ARGUMENTS);
        self.keep(ARGUMENTS, before);
    }
}
