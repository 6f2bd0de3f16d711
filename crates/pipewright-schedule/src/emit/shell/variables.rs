//! The variables of a script, and what is certain about their values.

use std::collections::HashMap;
use std::rc::Rc;

use crate::emit::shell::word::{Doubt, Word, concatenated};

/// The name of the list of arguments.
pub(super) const ARGUMENTS: &str = "@";
/// The most words and letters of a value that is kept while it is changed in place.
const MOST_KEPT: usize = 256;

/// A variable. A text may have several pieces, and some of them may be doubtful; each but the first begins with a blank.
#[derive(Debug, Clone)]
pub(super) struct Variable {
    /// The elements of a list, or the pieces of a text.
    words: Vec<Word>,
    pub(super) is_list: bool,
    /// Why the whole value is not known.
    doubt: Option<Rc<str>>,
    /// Whether a word may have two dashes, as options have.
    has_dashes: bool,
    /// The first words that are one word each in any run.
    single: usize,
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
#[derive(Debug, Default)]
pub(super) struct Assigned {
    pub(super) words: Vec<Word>,
    pub(super) is_list: bool,
    /// Whether it is added to the value before it.
    pub(super) adds: bool,
    /// The index of the element of a list that is set, as in `A[0]=8`.
    pub(super) index: Option<Word>,
}

/// The value of a variable before it was changed.
#[derive(Debug)]
pub(super) enum OldValue {
    /// The value was replaced, or kept.
    Value(Option<Variable>),
    /// The value was changed in place, and is not known any more.
    Lost,
}

impl Assigned {
    /// Returns the value of a text that replaces the value before it.
    pub(super) fn text(word: Word) -> Self {
        Self { words: vec![word], ..Self::default() }
    }

    /// Returns the value of a list that replaces the value before it.
    pub(super) fn list(words: Vec<Word>) -> Self {
        Self { words, is_list: true, ..Self::default() }
    }
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
        let Assigned { mut words, is_list, adds, index } = given;
        if let Some(reason) = doubt {
            words.iter_mut().for_each(|word| word.may_be_missing(reason));
        }
        let is_new = !self.by_name.contains_key(name);
        let order = self.count;
        self.count += usize::from(is_new);
        let variable = self.by_name.entry(name.to_owned()).or_insert_with(|| Variable::empty(order));
        let before = match (&index, doubt) {
            _ if is_new => OldValue::Value(None),
            (None, None) if !adds => {
                let new = Variable { is_list, ..Variable::empty(variable.order) };
                OldValue::Value(Some(std::mem::replace(variable, new)))
            }
            _ => variable.kept(),
        };
        match (index, doubt) {
            (Some(index), _) => variable.set_element(&index, words, adds, doubt),
            (None, Some(reason)) if !adds && !is_new => variable.may_become(words, is_list, reason),
            (None, _) => variable.add(words, is_list),
        }
        before
    }

    /// Removes a variable.
    pub(super) fn remove(&mut self, name: &str) -> OldValue {
        OldValue::Value(self.by_name.remove(name))
    }

    /// Marks the value of a variable as not known.
    pub(super) fn doubt(&mut self, name: &str, reason: &Rc<str>) -> OldValue {
        let Some(variable) = self.by_name.get_mut(name) else {
            return self.set(name, Assigned::text(Word::unknown(0, reason)), None);
        };
        let before = variable.kept();
        variable.doubt = Some(reason.clone());
        before
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
    fn empty(order: usize) -> Self {
        Self { words: Vec::new(), is_list: false, doubt: None, has_dashes: false, single: 0, order }
    }

    /// Returns copies of some of the words, with the doubt of the whole value.
    pub(super) fn copy(&self, words: &[Word]) -> Vec<Word> {
        let mut words = words.to_vec();
        if let Some(reason) = &self.doubt {
            words.iter_mut().for_each(|word| word.doubt = Doubt::Unknown(reason.clone()));
        }
        words
    }

    /// Returns the words: all, or the element of a list with an index. `None` if the words before the element may be
    /// several or none.
    pub(super) fn words(&self, index: Option<usize>) -> Option<&[Word]> {
        match index {
            None => Some(&self.words),
            Some(0) if !self.is_list => Some(&self.words),
            Some(_) if !self.is_list => Some(&[]),
            Some(index) if index > self.single => None,
            Some(index) => match self.words.get(index) {
                Some(word) => (!word.vanishes()).then_some(std::slice::from_ref(word)),
                None => self.doubt.is_none().then_some(&[]),
            },
        }
    }

    /// Returns the number of elements of a list, if it is certain.
    pub(super) fn count(&self) -> Option<usize> {
        (self.doubt.is_none() && self.single == self.words.len()).then_some(self.single)
    }

    /// Returns the value, or that it is lost if it is long.
    fn kept(&self) -> OldValue {
        let letters = || self.words.iter().map(|word| word.text.len()).sum::<usize>();
        let is_short = self.words.len() <= MOST_KEPT && letters() <= MOST_KEPT;
        if is_short { OldValue::Value(Some(self.clone())) } else { OldValue::Lost }
    }

    fn push(&mut self, word: Word) {
        self.has_dashes |= word.text.contains("--");
        let is_single = !word.vanishes() && !word.may_be_several();
        self.single += usize::from(is_single && self.single == self.words.len());
        self.words.push(word);
    }

    /// Adds elements to a list, or pieces to a text. `is_list` says which of them is added.
    fn add(&mut self, words: Vec<Word>, is_list: bool) {
        for word in words {
            let last = if self.is_list { self.words.first_mut() } else { self.words.last_mut() };
            let is_apart = !self.is_list && word.text.starts_with(char::is_whitespace);
            match last.filter(|_| !is_list) {
                Some(last) if !is_apart || last.doubt == word.doubt => {
                    self.has_dashes |=
                        word.text.contains("--") || last.text.ends_with('-') && word.text.starts_with('-');
                    last.append(word);
                }
                _ => self.push(word),
            }
        }
        self.is_list |= is_list;
    }

    /// Sets an element, or adds to it. `doubt` is the reason if it is not certain that the command runs.
    fn set_element(&mut self, index: &Word, words: Vec<Word>, adds: bool, doubt: Option<&Rc<str>>) {
        if !self.is_list {
            let line = index.line;
            let text = (!self.words.is_empty()).then(|| concatenated(std::mem::take(&mut self.words), line));
            (self.is_list, self.single) = (true, 0);
            text.into_iter().for_each(|word| self.push(word));
        }
        let new = Word { is_quoted: true, ..concatenated(words, index.line) };
        let number = index.known().and_then(|number| number.parse::<i64>().ok());
        let place = number.zip(self.count()).and_then(|(number, count)| {
            let place = if number < 0 { number + count as i64 } else { number };
            usize::try_from(place).ok().filter(|&place| place <= count)
        });
        match (place, doubt) {
            (Some(place), None) if place == self.words.len() => self.push(new),
            (Some(place), None) => {
                self.has_dashes |= new.text.contains('-');
                let old = &mut self.words[place];
                *old = if adds { concatenated(vec![std::mem::take(old), new], index.line) } else { new };
                if old.may_be_several() {
                    self.single = self.single.min(place);
                }
            }
            (_, doubt) => {
                let reason =
                    || format!("an element of line {} has an index that is not known", index.line).into();
                let reason = doubt.cloned().unwrap_or_else(reason);
                self.may_become(vec![new], true, &reason);
            }
        }
    }

    /// Sets the value to one that it may have. A piece that is added to a text is the only one that is doubtful.
    fn may_become(&mut self, words: Vec<Word>, is_list: bool, reason: &Rc<str>) {
        if self.is_list || is_list {
            // The options of both values may count.
            self.doubt = Some(reason.clone());
            return self.add(words, true);
        }
        let line = words.first().map_or(0, |word| word.line);
        let new = concatenated(words, line).text;
        let doubtful = |text: String| Word { doubt: Doubt::Unknown(reason.clone()), ..Word::new(text, line) };
        let is_empty = self.words.iter().all(|word| word.text.is_empty());
        let rest = self.words.iter().try_fold(new.as_str(), |rest, word| rest.strip_prefix(&word.text));
        match rest.filter(|rest| !is_empty && rest.starts_with(char::is_whitespace)) {
            Some(rest) => self.push(doubtful(rest.to_owned())),
            None if self.has_dashes || new.contains("--") => {
                self.doubt = Some(reason.clone());
                self.push(doubtful(format!(" {new}")));
            }
            None => {
                (self.words, self.single) = (Vec::new(), 0);
                self.push(doubtful(new));
            }
        }
    }
}
