//! The variables of a script, and what is certain about their values.

use std::collections::HashMap;
use std::rc::Rc;

use crate::emit::shell::word::{Doubt, Word};

/// The name of the list of arguments.
pub(super) const ARGUMENTS: &str = "@";

#[derive(Debug)]
struct Variable {
    /// The elements of a list, or one word.
    words: Vec<Word>,
    /// The number of variables that had a value before it.
    order: usize,
}

/// All variables.
#[derive(Debug, Default)]
pub(super) struct Variables {
    by_name: HashMap<String, Variable>,
    count: usize,
}

/// The value of an assignment.
#[derive(Debug)]
pub(super) struct Given {
    pub(super) words: Vec<Word>,
    pub(super) is_list: bool,
    /// Whether it is added to the value before it.
    pub(super) adds: bool,
}

/// The value of a variable before it was changed.
#[derive(Debug)]
pub(super) enum Before {
    /// The value was replaced.
    Value(Option<Vec<Word>>),
    /// The value was changed in place, and is not known any more.
    Lost,
}

impl Variables {
    pub(super) fn get(&self, name: &str) -> Option<&[Word]> {
        self.by_name.get(name).map(|variable| variable.words.as_slice())
    }

    /// Returns the text of a variable that is one word, if it is certain.
    pub(super) fn known(&self, name: &str) -> Option<&str> {
        self.get(name)?.first()?.known()
    }

    /// Returns the values in the order in which variables first had one.
    pub(super) fn into_lists(self) -> Vec<Vec<Word>> {
        let mut variables: Vec<Variable> = self.by_name.into_values().collect();
        variables.sort_by_key(|variable| variable.order);
        variables.into_iter().map(|variable| variable.words).collect()
    }

    /// Sets a variable. `doubt` is the reason if it is not certain that the command runs.
    pub(super) fn set(&mut self, name: &str, given: Given, doubt: Option<&Rc<str>>) -> Before {
        let Given { mut words, is_list, adds } = given;
        let order = self.count;
        let Some(variable) = self.by_name.get_mut(name) else {
            doubt.into_iter().for_each(|reason| mark(&mut words, reason));
            self.by_name.insert(name.to_owned(), Variable { words, order });
            self.count += 1;
            return Before::Value(None);
        };
        let known = &mut variable.words;
        if let Some(reason) = doubt {
            mark(&mut words, reason);
            mark(known, reason);
            let has_options = known.iter().chain(&words).any(|word| word.text.contains("--"));
            match known.first_mut().filter(|_| adds && !is_list) {
                Some(first) => words.into_iter().for_each(|word| first.append(word)),
                // Options of both values may count.
                None if is_list || has_options => known.extend(words),
                None => *known = words,
            }
            return Before::Lost;
        }
        match known.first_mut() {
            _ if adds && is_list => known.extend(words),
            Some(first) if adds => words.into_iter().for_each(|word| first.append(word)),
            _ => return Before::Value(Some(std::mem::replace(known, words))),
        }
        Before::Lost
    }

    /// Removes a variable.
    pub(super) fn remove(&mut self, name: &str) -> Before {
        Before::Value(self.by_name.remove(name).map(|variable| variable.words))
    }

    /// Marks the value of a variable as not known.
    pub(super) fn doubt(&mut self, name: &str, reason: &Rc<str>) -> Before {
        match self.by_name.get_mut(name) {
            Some(variable) => mark(&mut variable.words, reason),
            None => {
                let word = Word { doubt: Doubt::Unknown(reason.clone()), ..Word::new("?", 0) };
                self.set(name, Given { words: vec![word], is_list: false, adds: false }, None);
            }
        }
        Before::Lost
    }

    /// Gives a variable the value that it had before.
    pub(super) fn restore(&mut self, name: &str, before: Before, reason: &Rc<str>) {
        match before {
            Before::Value(Some(words)) => {
                self.set(name, Given { words, is_list: true, adds: false }, None);
            }
            Before::Value(None) => drop(self.by_name.remove(name)),
            Before::Lost => drop(self.doubt(name, reason)),
        }
    }
}

fn mark(words: &mut [Word], reason: &Rc<str>) {
    words.iter_mut().for_each(|word| word.doubt = Doubt::Unknown(reason.clone()));
}
