//! The variables of a script, and what is certain about their values.

use std::collections::HashMap;
use std::rc::Rc;

use crate::emit::shell::word::{Doubt, Word};

/// The name of the list of arguments.
pub(super) const ARGUMENTS: &str = "@";

/// A variable. A text may have several pieces, and some of them may be doubtful; each but the first begins with a blank.
#[derive(Debug)]
pub(super) struct Variable {
    /// The elements of a list, or the pieces of a text.
    pub(super) words: Vec<Word>,
    pub(super) is_list: bool,
    /// Why the whole value is not known.
    doubt: Option<Rc<str>>,
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
pub(super) struct Assigned {
    pub(super) words: Vec<Word>,
    pub(super) is_list: bool,
    /// Whether it is added to the value before it.
    pub(super) adds: bool,
}

/// The value of a variable before it was changed.
#[derive(Debug)]
pub(super) enum OldValue {
    /// The value was replaced.
    Value(Option<Variable>),
    /// The value was changed in place, and is not known any more.
    Lost,
}

impl Variables {
    pub(super) fn get(&self, name: &str) -> Option<&Variable> {
        self.by_name.get(name)
    }

    /// Returns the text of a variable, or its first element, if it is certain.
    pub(super) fn known(&self, name: &str) -> Option<&str> {
        let variable = self.get(name).filter(|variable| variable.doubt.is_none())?;
        let is_one = variable.is_list || variable.words.len() == 1;
        variable.words.first().filter(|_| is_one)?.known()
    }

    /// Returns the values in the order in which variables first had one.
    pub(super) fn into_lists(self) -> Vec<Vec<Word>> {
        let mut variables: Vec<Variable> = self.by_name.into_values().collect();
        variables.sort_by_key(|variable| variable.order);
        variables.iter().map(|variable| variable.copy(&variable.words)).collect()
    }

    /// Sets a variable. `doubt` is the reason if it is not certain that the command runs.
    pub(super) fn set(&mut self, name: &str, given: Assigned, doubt: Option<&Rc<str>>) -> OldValue {
        let Assigned { mut words, is_list, adds } = given;
        if let Some(reason) = doubt {
            words.iter_mut().for_each(|word| word.doubt = Doubt::Unknown(reason.clone()));
        }
        let Some(variable) = self.by_name.get_mut(name) else {
            let variable = Variable { words, is_list, doubt: None, order: self.count };
            self.by_name.insert(name.to_owned(), variable);
            self.count += 1;
            return OldValue::Value(None);
        };
        if adds {
            variable.add(words, is_list);
        } else if let Some(reason) = doubt {
            variable.may_become(words, is_list, reason);
        } else {
            let new = Variable { words, is_list, doubt: None, order: variable.order };
            return OldValue::Value(Some(std::mem::replace(variable, new)));
        }
        OldValue::Lost
    }

    /// Removes a variable.
    pub(super) fn remove(&mut self, name: &str) -> OldValue {
        OldValue::Value(self.by_name.remove(name))
    }

    /// Marks the value of a variable as not known.
    pub(super) fn doubt(&mut self, name: &str, reason: &Rc<str>) -> OldValue {
        if self.get(name).is_none() {
            self.set(name, Assigned { words: vec![Word::new("?", 0)], is_list: false, adds: false }, None);
        }
        if let Some(variable) = self.by_name.get_mut(name) {
            variable.doubt = Some(reason.clone());
        }
        OldValue::Lost
    }

    /// Gives a variable the value that it had before.
    pub(super) fn restore(&mut self, name: &str, before: OldValue, reason: &Rc<str>) {
        match before {
            OldValue::Value(Some(variable)) => drop(self.by_name.insert(name.to_owned(), variable)),
            OldValue::Value(None) => drop(self.by_name.remove(name)),
            OldValue::Lost => drop(self.doubt(name, reason)),
        }
    }
}

impl Variable {
    /// Returns copies of some of the words, with the doubt of the whole value.
    pub(super) fn copy(&self, words: &[Word]) -> Vec<Word> {
        let mut words = words.to_vec();
        if let Some(reason) = &self.doubt {
            words.iter_mut().for_each(|word| word.doubt = Doubt::Unknown(reason.clone()));
        }
        words
    }

    /// Adds elements to a list, or pieces to a text. `is_list` says which of them is added.
    fn add(&mut self, words: Vec<Word>, is_list: bool) {
        if is_list {
            self.words.extend(words);
            return;
        }
        for word in words {
            let last = if self.is_list { self.words.first_mut() } else { self.words.last_mut() };
            let is_apart = !self.is_list && word.text.starts_with(char::is_whitespace);
            match last {
                Some(last) if !is_apart || last.doubt == word.doubt => last.append(word),
                _ => self.words.push(word),
            }
        }
    }

    /// Sets the value to one that it may have. A piece that is added to a text is the only one that is doubtful.
    fn may_become(&mut self, words: Vec<Word>, is_list: bool, reason: &Rc<str>) {
        let text = |words: &[Word]| words.iter().map(|word| word.text.as_str()).collect::<String>();
        if self.is_list || is_list {
            // The options of both values may count.
            self.doubt = Some(reason.clone());
            self.is_list = true;
            self.words.extend(words);
            return;
        }
        let (old, new) = (text(&self.words), text(&words));
        let line = words.first().map_or(0, |word| word.line);
        let doubtful = |text: String| Word { doubt: Doubt::Unknown(reason.clone()), ..Word::new(text, line) };
        match new.strip_prefix(&old).filter(|rest| rest.starts_with(char::is_whitespace)) {
            Some(rest) if !old.is_empty() => self.words.push(doubtful(rest.to_owned())),
            _ if old.contains("--") || new.contains("--") => {
                self.doubt = Some(reason.clone());
                self.words.push(doubtful(format!(" {new}")));
            }
            _ => self.words = vec![doubtful(new)],
        }
    }
}
