//! Changes variables and functions, and undoes the changes at the end of a subshell or a function.

use std::collections::HashSet;
use std::rc::Rc;

use crate::emit::shell::arithmetic::{evaluate, names_set, number};
use crate::emit::shell::branches::Runs;
use crate::emit::shell::changes::{Change, DeclaredType};
use crate::emit::shell::letters::is_name;
use crate::emit::shell::script::Reader;
use crate::emit::shell::variables::{Assigned, OldValue};
use crate::emit::shell::word::{Doubt, Word, concatenated, shortened};

impl Reader {
    /// Sets a variable unless it is certain that the command does not run.
    pub(super) fn set(&mut self, name: &str, given: Assigned, runs: Runs) {
        if let Some(before) = self.replace(name, given, runs) {
            self.keep(name, before);
        }
    }

    /// Sets a variable likewise, and returns its value before.
    pub(super) fn replace(&mut self, name: &str, given: Assigned, runs: Runs) -> Option<OldValue> {
        if runs == Runs::No {
            return None;
        }
        let given = self.converted(name, given);
        let reason = reason_of_condition(name, runs);
        Some(self.variables.set(name, given, reason.as_ref()))
    }

    /// Returns the value that a variable gets, which its type may change.
    fn converted(&self, name: &str, given: Assigned) -> Assigned {
        let Some(&DeclaredType { is_number, line }) = self.types.get(name) else { return given };
        let at = given.words.first().map_or(line, |word| word.line);
        let value = |text: &str| evaluate(text, &|name| number(self.variables.known(name)?));
        let sum = || {
            let before = match self.variables.get(name).filter(|_| given.adds) {
                Some(_) => value(self.variables.known(name)?)?,
                None => 0,
            };
            value(concatenated(given.words.clone(), at).known()?)?.checked_add(before)
        };
        let is_text = !given.is_list && given.index.is_none();
        if let Some(sum) = (is_number && is_text).then(sum).flatten() {
            return Assigned::text(Word::new(sum.to_string(), at));
        }
        let reason = format!("`{}` has a type of line {line}, which is not read", shortened(name)).into();
        let doubt = Doubt::Unknown(reason);
        let words = given.words.into_iter().map(|word| Word { doubt: doubt.clone(), ..word });
        Assigned { words: words.collect(), ..given }
    }

    /// Keeps the value of a variable before a change, for the end of a subshell.
    pub(super) fn keep(&mut self, name: &str, before: OldValue) {
        self.changes.push(Change::Variable(name.to_owned(), before));
    }

    /// Gives a variable a type.
    pub(super) fn declare_type(&mut self, name: &str, declared: Option<DeclaredType>) {
        let before = match declared {
            Some(declared) => self.types.insert(name.to_owned(), declared),
            None => self.types.remove(name),
        };
        if declared.is_some() || before.is_some() {
            self.changes.push(Change::Type(name.to_owned(), before));
        }
    }

    /// Makes a variable one of the function that is called, which loses its value when the function ends.
    pub(super) fn make_local(&mut self, name: &str) {
        if !self.calls.is_empty() {
            let before = self.variables.remove(name);
            self.changes.push(Change::Local(name.to_owned(), before));
            self.declare_type(name, None);
        }
    }

    /// Marks a variable, or the one with an element, as not known if the command may run.
    pub(super) fn doubt_if_run(&mut self, name: &str, reason: &Rc<str>) {
        let name = name.split('[').next().unwrap_or_default();
        if self.runs() != Runs::No && is_name(name) {
            self.doubt(name, reason);
        }
    }

    /// Marks a variable as not known.
    pub(super) fn doubt(&mut self, name: &str, reason: &Rc<str>) {
        let before = self.variables.doubt(name, reason);
        self.keep(name, before);
    }

    /// Marks the variables that a sum sets.
    pub(super) fn doubt_names_of(&mut self, sum: &str, line: usize) {
        for name in names_set(sum) {
            let reason =
                format!("`{}` has the value of a sum of line {line}, which is not read", shortened(name));
            self.doubt_if_run(name, &reason.into());
        }
    }

    /// Ends the script, the subshell or the function, as `exit` or `return` does.
    pub(super) fn leave(&mut self, is_return: bool) {
        let branches = if is_return { self.calls.last().map(|index| index + 1) } else { Some(0) };
        if branches.is_some() {
            self.left = branches;
            self.changes.push(Change::Left);
        }
    }

    /// Undoes all changes but the first `start` ones, at the end of a subshell that began in a line.
    pub(super) fn undo(&mut self, start: usize, line: usize) {
        if start < self.changes.len() {
            let changes = self.changes.split_off(start);
            if let Some(first) = &mut self.first_reading {
                first.names.extend(changes.iter().filter_map(Change::variable).map(str::to_owned));
            }
            self.undo_all(changes, line);
        }
    }

    /// Undoes the changes of a function's own variables since the first `start` changes.
    pub(super) fn undo_locals(&mut self, start: usize, line: usize) {
        let mut locals: HashSet<String> = HashSet::new();
        let is_local = |change: &Change| match change {
            Change::Local(name, _) => {
                locals.insert(name.clone());
                true
            }
            Change::Variable(name, _) | Change::Type(name, _) => locals.contains(name),
            Change::Function(..) | Change::Left => false,
        };
        let changes = self.changes.split_off(start.min(self.changes.len()));
        let (own, others) = changes.into_iter().partition(is_local);
        self.undo_all(own, line);
        self.changes.extend::<Vec<Change>>(others);
    }

    fn undo_all(&mut self, changes: Vec<Change>, line: usize) {
        let reason = format!("a variable changes in a part of line {line}, and its value before is not kept");
        let reason: Rc<str> = reason.into();
        for change in changes.into_iter().rev() {
            match change {
                Change::Variable(name, before) | Change::Local(name, before) => {
                    self.variables.restore(&name, before, &reason);
                }
                Change::Type(name, Some(before)) => drop(self.types.insert(name, before)),
                Change::Type(name, None) => drop(self.types.remove(&name)),
                Change::Function(name, Some(before)) => drop(self.functions.insert(name, before)),
                Change::Function(name, None) => drop(self.functions.remove(&name)),
                Change::Left => self.left = None,
            }
        }
    }
}

/// Returns the reason of a doubt if it is not certain that a command runs that sets a variable.
fn reason_of_condition(name: &str, runs: Runs) -> Option<Rc<str>> {
    let Runs::Maybe(line) = runs else { return None };
    let name = shortened(name);
    Some(format!("`{name}` depends on a condition or a loop of line {line}, which is not run").into())
}
