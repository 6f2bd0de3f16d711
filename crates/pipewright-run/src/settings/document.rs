//! The raw configuration: every key as it was written, in the file or after `--set`, with its place.
//!
//! Arguments override the file. [`crate::settings::section`] checks the values of the keys.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use pipewright_models::ModelConfig;
use serde::Deserialize;
use toml::de::{DeTable, DeValue, ValueDeserializer};
use toml::{Spanned, Value};

use crate::settings::keys::{keys_of, suggest_key, suggest_section};
use crate::settings::place::{Place, Source};
use crate::settings::problem::{Problem, ProblemKind};

/// All keys that were written, and all problems found so far.
#[derive(Debug, Default)]
pub(super) struct Document {
    entries: BTreeMap<(String, String), Entry>,
    pub(super) problems: Vec<Problem>,
    /// Sentences about keys that have no effect, which is not a mistake.
    pub(super) notes: Vec<String>,
}

/// One key that was written.
#[derive(Debug)]
pub(super) struct Entry {
    /// Where the value is written.
    pub(super) place: Place,
    /// The value.
    pub(super) value: Value,
}

impl Document {
    /// Collects the keys of a file and of `--set` arguments.
    pub(super) fn new(file: Option<Source>, arguments: &[String]) -> Self {
        let mut document = Self::default();
        if let Some(source) = file {
            document.add_file(source);
        }
        for argument in arguments {
            document.add_argument(argument);
        }
        document
    }

    /// Returns the entry that was written for a key.
    pub(super) fn entry(&self, section: &str, key: &str) -> Option<&Entry> {
        // The map's key is a pair of owned strings. There are few look-ups, so copying the strings does not
        // matter.
        self.entries.get(&(section.to_owned(), key.to_owned()))
    }

    /// Returns the keys that were written in a section, with their places.
    pub(super) fn written(&self, section: &str) -> impl Iterator<Item = (&str, &Place)> {
        let entries = self.entries.iter().filter(move |((owner, _), _)| owner == section);
        entries.map(|((_, key), entry)| (key.as_str(), &entry.place))
    }

    /// Returns the keys that were written in a section, with their values.
    pub(super) fn values(&self, section: &str) -> impl Iterator<Item = (&str, &Value)> {
        let entries = self.entries.iter().filter(move |((owner, _), _)| owner == section);
        entries.map(|((_, key), entry)| (key.as_str(), &entry.value))
    }

    /// Removes the entry that was written for a key.
    pub(super) fn remove(&mut self, section: &str, key: &str) {
        self.entries.remove(&(section.to_owned(), key.to_owned()));
    }

    fn add_file(&mut self, source: Source) {
        let source = Arc::new(source);
        let place = |span: Range<usize>| Place::File { source: Arc::clone(&source), span };
        let (table, errors) = DeTable::parse_recoverable(&source.text);
        if !errors.is_empty() {
            self.problems.extend(errors.iter().map(|error| Problem {
                place: place(error.span().unwrap_or(0..0)),
                kind: ProblemKind::Syntax { message: error.message().to_owned() },
            }));
            return;
        }
        for (name, value) in table.into_inner() {
            let (span, section) = (name.span(), name.into_inner().into_owned());
            match value.into_inner() {
                DeValue::Table(keys) => self.add_section(&section, place(span), keys, place),
                _ => self.problems.push(Problem {
                    place: place(span),
                    kind: ProblemKind::OutsideSections {
                        suggestion: suggest_key("", &section),
                        key: section,
                    },
                }),
            }
        }
    }

    fn add_section(
        &mut self,
        section: &str,
        name_place: Place,
        keys: DeTable<'_>,
        place: impl Fn(Range<usize>) -> Place,
    ) {
        if keys_of(section).is_none() {
            let kind = ProblemKind::UnknownSection {
                section: section.to_owned(),
                suggestion: suggest_section(section),
            };
            self.problems.push(Problem { place: name_place, kind });
            return;
        }
        for (key, value) in keys {
            let (key_place, value_place) = (place(key.span()), place(value.span()));
            self.add(section, &key.into_inner(), value, key_place, value_place);
        }
    }

    fn add_argument(&mut self, argument: &str) {
        let place = Place::Set { argument: argument.to_owned() };
        let parts = argument.split_once('=').and_then(|(path, text)| {
            let (section, key) = path.trim().split_once('.')?;
            Some((section, key, text.trim()))
        });
        let Some((section, key, text)) = parts else {
            self.problems.push(Problem { place, kind: ProblemKind::SetForm });
            return;
        };
        if keys_of(section).is_none() {
            let kind = ProblemKind::UnknownSection {
                section: section.to_owned(),
                suggestion: suggest_section(section),
            };
            self.problems.push(Problem { place, kind });
            return;
        }
        let string = || Spanned::new(0..text.len(), DeValue::String(text.into()));
        let value = DeValue::parse(text).unwrap_or_else(|_| string());
        self.add(section, key, value, place.clone(), place);
    }

    fn add(
        &mut self,
        section: &str,
        key: &str,
        value: Spanned<DeValue<'_>>,
        key_place: Place,
        value_place: Place,
    ) {
        // A `config.json` may be pasted into [model]: its keys are known, even if they have no effect.
        let is_pasted = section == "model" && ModelConfig::is_known_key(key);
        if !is_pasted && !keys_of(section).is_some_and(|keys| keys.contains(&key)) {
            let kind = ProblemKind::UnknownKey {
                section: section.to_owned(),
                key: key.to_owned(),
                suggestion: suggest_key(section, key),
            };
            self.problems.push(Problem { place: key_place, kind });
            return;
        }
        match Value::deserialize(ValueDeserializer::from(value)) {
            Ok(value) => {
                self.entries
                    .insert((section.to_owned(), key.to_owned()), Entry { place: value_place, value });
            }
            Err(error) => self.problems.push(Problem {
                place: value_place,
                kind: ProblemKind::Unrepresentable {
                    key: key.to_owned(),
                    message: error.message().to_owned(),
                },
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(arguments: &[&str], expected: &[&str]) {
        let text = "[run]\nsteps = 5\n".to_owned();
        let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        let document = Document::new(Some(Source { name: "a.toml".into(), text }), &arguments);
        let entries = document
            .entries
            .iter()
            .map(|((section, key), entry)| format!("{}: {section}.{key} = {}", entry.place, entry.value));
        let found: Vec<String> = entries.chain(document.problems.iter().map(ToString::to_string)).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn arguments_win_over_the_file() {
        check(&[], &["a.toml:2:9: run.steps = 5"]);
        check(&["run.steps=7", "run.steps=8"], &["--set run.steps=8: run.steps = 8"]);
    }

    #[test]
    fn what_is_no_toml_value_is_a_string() {
        let file = "a.toml:2:9: run.steps = 5";
        check(
            &["pipeline.schedule=1f1b"],
            &["--set pipeline.schedule=1f1b: pipeline.schedule = \"1f1b\"", file],
        );
        check(&["run.out=a b"], &["--set run.out=a b: run.out = \"a b\"", file]);
        check(&["run.out="], &["--set run.out=: run.out = \"\"", file]);
        check(
            &["run.out=1\nsteps = 2"],
            &["--set run.out=1\nsteps = 2: run.out = \"\"\"\n1\nsteps = 2\"\"\"", file],
        );
    }

    #[test]
    fn arguments_of_another_form() {
        let file = "a.toml:2:9: run.steps = 5";
        check(&["run.steps"], &[file, "--set run.steps: not of the form section.key=value"]);
        check(&["steps=3"], &[file, "--set steps=3: not of the form section.key=value"]);
        check(&["run.stpes=3"], &[file, "--set run.stpes=3: unknown key `stpes` in [run]"]);
        check(&["rum.steps=3"], &[file, "--set rum.steps=3: unknown section `rum`"]);
    }
}
