//! Options that a reader takes, so that the others are known.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};

use pipewright_schedule::emit::{GivenOption, Options, ReadError};

use crate::judge::given_run::{GivenRun, RunContext};

/// The words of options that change the layout.
const LAYOUT_WORDS: [&str; 7] = ["parallel", "pipeline", "recompute", "shard", "offload", "virtual", "fsdp"];

/// The options of a file, with the keys that were asked for.
pub(super) struct Taken<'a> {
    pub(super) options: &'a Options,
    asked: RefCell<Vec<&'static str>>,
    notes: RefCell<Vec<String>>,
}

impl<'a> Taken<'a> {
    pub(super) fn new(options: &'a Options) -> Self {
        Self { options, asked: RefCell::default(), notes: RefCell::default() }
    }

    fn ask(&self, key: &'static str) {
        self.asked.borrow_mut().push(key);
    }

    /// Adds a sentence about what the prediction does not count.
    pub(super) fn note(&self, note: impl Into<String>) {
        self.notes.borrow_mut().push(note.into());
    }

    pub(super) fn number(&self, key: &'static str) -> Result<Option<u32>, ReadError> {
        self.ask(key);
        self.options.number(key, 1)
    }

    /// Returns a number that may be 0.
    pub(super) fn count(&self, key: &'static str) -> Result<Option<u32>, ReadError> {
        self.ask(key);
        self.options.number(key, 0)
    }

    pub(super) fn has(&self, key: &'static str) -> bool {
        self.ask(key);
        self.options.has(key)
    }

    /// Returns the values of a list, which may be separated by commas.
    ///
    /// # Errors
    /// When a value is not known.
    pub(super) fn list(&self, key: &'static str) -> Result<Vec<String>, ReadError> {
        self.ask(key);
        let values = self.options.known(key)?.map(|entry| entry.values.join(",")).unwrap_or_default();
        Ok(values.split(',').filter(|value| !value.is_empty()).map(str::to_owned).collect())
    }

    pub(super) fn word(&self, key: &'static str) -> Result<Option<String>, ReadError> {
        self.ask(key);
        Ok(self.options.word(key)?.map(|(word, _)| word.to_lowercase().replace("torch.", "")))
    }

    /// Returns the meaning of a word. Several words may mean the same.
    pub(super) fn one_of<T: Copy>(
        &self,
        key: &'static str,
        words: &[(&str, T)],
    ) -> Result<Option<T>, ReadError> {
        let Some(word) = self.word(key)? else { return Ok(None) };
        let found = words.iter().find(|(known, _)| *known == word);
        let known: Vec<&str> = words.iter().map(|(known, _)| *known).collect();
        let wrong = || self.options.wrong(key, &word, &format!("one of {}", known.join(", ")));
        found.map(|(_, value)| Some(*value)).ok_or_else(wrong)
    }

    /// Returns the tokens of a row, of the file or of the place.
    pub(super) fn sequence(&self, place: &RunContext<'_>, key: &'static str) -> Result<u32, ReadError> {
        let tokens = self.either(key, place.sequence, "--seq-len")?;
        tokens.ok_or_else(|| ReadError {
            line: None,
            reason: "the file does not say the tokens of a row; give --seq-len".to_owned(),
        })
    }

    /// Returns a number of the file or of an option, which must not differ.
    pub(super) fn either(
        &self,
        key: &'static str,
        given: Option<u32>,
        option: &str,
    ) -> Result<Option<u32>, ReadError> {
        match (self.number(key)?, given) {
            (Some(own), Some(given)) if own != given => {
                let expected = format!("{given}, as {option} says; leave {option} out");
                Err(self.options.wrong(key, &own.to_string(), &expected))
            }
            (own, given) => Ok(own.or(given)),
        }
    }

    /// Adds the other options to a run. Keys that begin with a text of `planned` are read elsewhere. The keys
    /// `unpredicted` change costs that the prediction does not have.
    ///
    /// # Errors
    /// When another key looks like one that changes the layout, or nearly is a known one.
    pub(super) fn finish(
        &self,
        planned: &[&str],
        unpredicted: &[&str],
        run: &mut GivenRun,
    ) -> Result<(), ReadError> {
        let asked: HashSet<&str> = self.asked.take().into_iter().collect();
        let is_planned = |key: &str| planned.iter().any(|start| key.starts_with(start));
        let is_read = |key: &str| asked.contains(key) || is_planned(key);
        let is_known = |key: &str| is_read(key) || unpredicted.contains(&key);
        let names: Vec<&str> = asked.iter().chain(unpredicted).chain(planned).copied().collect();
        self.options.check_by(run.system, &names, is_known)?;
        let mut last: HashMap<&str, &GivenOption> = HashMap::new();
        for entry in &self.options.list {
            last.insert(&entry.key, entry);
        }
        let mut unused: HashSet<&str> = HashSet::new();
        for entry in self.options.list.iter().filter(|entry| !last[entry.key.as_str()].is_off()) {
            let (key, name) = (entry.key.as_str(), entry.name.as_str());
            if unpredicted.contains(&key) {
                self.note(format!("`{name}` of line {} is not predicted", entry.line));
            } else if is_read(key) {
                continue;
            } else if LAYOUT_WORDS.iter().any(|word| key.contains(word)) && !key.contains("checkpoint") {
                let reason = format!(
                    "the prediction does not know `{name}` of {}, whose name says that it changes the layout; leave it out \
                     if it does not",
                    run.system
                );
                return Err(ReadError { line: Some(entry.line), reason });
            } else if unused.insert(name) {
                run.unused.push(name.to_owned());
            }
        }
        run.notes.extend(self.notes.take());
        run.notes.extend(self.options.notes.iter().cloned());
        run.notes.extend(self.options.doubtful_flags(is_read));
        Ok(())
    }
}
