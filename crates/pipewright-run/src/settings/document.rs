//! The raw configuration: every key as it was written, in the file or after `--set`, with its place.
//!
//! Arguments override the file. [`crate::settings::section`] checks the values of the keys.

use std::collections::BTreeMap;

use pipewright_document::{Entry, Place, Problem, Source, Table, Value};
use pipewright_models::ModelConfig;

use crate::settings::keys::{
    advice_for_key, advice_for_section, find, keys_of, section_names, sections, suggestion,
};

/// All keys that were written, and all problems found so far.
#[derive(Debug)]
pub(super) struct Document {
    /// The keys that were written, by section.
    pub(super) sections: BTreeMap<&'static str, Table>,
    pub(super) problems: Vec<Problem>,
    /// Sentences about keys that have no effect, which is not a mistake.
    pub(super) notes: Vec<String>,
}

impl Document {
    /// Collects the keys of a file and of `--set` arguments.
    pub(super) fn new(file: Source, arguments: &[String]) -> Self {
        let tables = sections().iter().map(|section| (section.name, Table::new(Place::Default)));
        let mut document = Self { sections: tables.collect(), problems: Vec::new(), notes: Vec::new() };
        let file = Table::parse(file, usize::MAX, &mut document.problems);
        for (name, entry) in file.into_iter().flat_map(|file| file.entries) {
            document.add_section(&name, entry);
        }
        for argument in arguments {
            document.add_argument(argument);
        }
        document
    }

    /// Returns the value that was written for a key.
    pub(super) fn value(&self, section: &str, key: &str) -> Option<&Value> {
        self.sections.get(section)?.get(key)
    }

    /// Removes the keys of a section that are written in the file and that `is_removed` accepts.
    pub(super) fn remove_of_file(&mut self, section: &str, is_removed: impl Fn(&str) -> bool) {
        if let Some(table) = self.sections.get_mut(section) {
            table.entries.retain(|key, entry| entry.value.place.is_argument() || !is_removed(key));
        }
    }

    fn report(&mut self, place: Place, sentence: String, help: String) {
        self.problems.push(Problem::new(place, sentence).help(help));
    }

    fn add_section(&mut self, name: &str, entry: Entry) {
        let Some(table) = entry.value.as_table() else {
            let help = suggestion("", name).map_or_else(
                || format!("put it below one of {}", section_names()),
                |meant| format!("did you mean {meant}?"),
            );
            return self.report(entry.key_place, format!("`{name}` is outside of any section"), help);
        };
        if keys_of(name).is_none() {
            return self.report_unknown_section(entry.key_place, name);
        }
        for (key, entry) in &table.entries {
            self.add(name, key, entry.clone());
        }
    }

    fn add_argument(&mut self, argument: &str) {
        let place = Place::Set { argument: argument.to_owned() };
        let parts = argument.split_once('=').and_then(|(path, text)| {
            let (section, key) = path.trim().split_once('.')?;
            Some((section, key, text.trim()))
        });
        let Some((section, key, text)) = parts else {
            let help = "write for example --set pipeline.ranks=4";
            return self.report(place, "not of the form section.key=value".to_owned(), help.to_owned());
        };
        if keys_of(section).is_none() {
            return self.report_unknown_section(place, section);
        }
        if let Some(value) = Value::of_argument(key, text, &place, &mut self.problems) {
            self.add(section, key, Entry { key_place: place, value });
        }
    }

    fn report_unknown_section(&mut self, place: Place, name: &str) {
        self.report(place, format!("unknown section `{name}`"), advice_for_section(name));
    }

    fn add(&mut self, section: &str, key: &str, entry: Entry) {
        // A `config.json` may be pasted into [model]: its keys are known, even if they have no effect.
        let is_pasted = section == "model" && ModelConfig::is_known_key(key);
        if !is_pasted && find(section, key).is_none() {
            let sentence = format!("unknown key `{key}` in [{section}]");
            return self.report(entry.key_place, sentence, advice_for_key(section, key));
        }
        if let Some(table) = self.sections.get_mut(section) {
            table.entries.insert(key.to_owned(), entry);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(arguments: &[&str], expected: &[&str]) {
        let text = "[run]\nsteps = 5\n".to_owned();
        let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        let document = Document::new(Source { name: "a.toml".into(), text }, &arguments);
        let entries = document.sections.iter().flat_map(|(section, table)| {
            let entry = |(key, entry): (&String, &Entry)| {
                format!("{}: {section}.{key} = {}", entry.value.place, entry.value.to_toml())
            };
            table.entries.iter().map(entry).collect::<Vec<_>>()
        });
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
