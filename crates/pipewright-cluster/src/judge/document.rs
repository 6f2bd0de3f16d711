//! Documents as lists of options: a key is the path to a value, such as `model.tensor_model_parallel_size`.

use pipewright_document::{Source, Table, Value};
use pipewright_schedule::emit::{CHECKPOINTING, NestedOptions, Options, ReadError};
use saphyr_parser::{Event, Parser, ScalarStyle};

use crate::published::MAX_FILE;

/// Reads YAML. Empty values are left out.
pub(super) fn yaml(text: &str) -> Result<Options, ReadError> {
    let at = |line: usize, reason: &str| ReadError { line: Some(line), reason: reason.to_owned() };
    let mut nested = NestedOptions::default();
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|error| at(error.marker().line(), error.info()))?;
        let line = span.start.line();
        match event {
            Event::MappingStart(..) => nested.open(false, line)?,
            Event::SequenceStart(..) => nested.open(true, line)?,
            Event::MappingEnd | Event::SequenceEnd => nested.close(),
            Event::Scalar(value, style, ..) => {
                let is_null = ["", "null", "~", "Null", "NULL"].contains(&value.as_ref());
                nested.scalar(&value, is_null && style == ScalarStyle::Plain, line)?;
            }
            Event::Alias(_) => return Err(at(line, "aliases are not read; write the value")),
            _ => {}
        }
    }
    Ok(nested.finish())
}

/// Reads torchtitan's TOML, whose choice of activation checkpointing becomes the option of the command line.
pub(super) fn toml(text: &str) -> Result<Options, ReadError> {
    let mut problems = Vec::new();
    let table = Table::parse(Source::from(text), MAX_FILE, &mut problems);
    if let Some(problem) = problems.first() {
        let line = problem.place.line_and_column().map(|(line, _)| line);
        return Err(ReadError { line, reason: problem.sentence.clone() });
    }
    let mut nested = NestedOptions::default();
    if let Some(table) = &table {
        add_table(table, 1, &mut nested)?;
    }
    let mut options = nested.finish();
    for option in &mut options.list {
        if option.name == "activation_checkpoint.mode" {
            option.key = format!("{CHECKPOINTING}{}", option.values.join(" ").replace('_', "-"));
        }
    }
    Ok(options)
}

fn add_table(table: &Table, line: usize, nested: &mut NestedOptions) -> Result<(), ReadError> {
    nested.open(false, line)?;
    for (key, entry) in &table.entries {
        let line = entry.key_place.line_and_column().map_or(1, |(line, _)| line);
        nested.scalar(key, false, line)?;
        if let Some(inner) = entry.value.as_table() {
            add_table(inner, line, nested)?;
        } else if let Some(values) = entry.value.as_list() {
            nested.open(true, line)?;
            values.iter().try_for_each(|value| nested.scalar(&shown(value), false, line))?;
            nested.close();
        } else {
            nested.scalar(&shown(&entry.value), false, line)?;
        }
    }
    nested.close();
    Ok(())
}

fn shown(value: &Value) -> String {
    match value.as_list() {
        Some(values) => values.iter().map(shown).collect::<Vec<_>>().join(","),
        None => value.as_text().map_or_else(|| value.shown(), str::to_owned),
    }
}
