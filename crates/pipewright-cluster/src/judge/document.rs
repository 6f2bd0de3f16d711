//! Documents as lists of options: a key is the path to a value, such as `model.tensor_model_parallel_size`.

use pipewright_document::{Source, Table, Value};
use pipewright_schedule::emit::{CHECKPOINTING, GivenOption, Options, ReadError};
use saphyr_parser::{Event, Parser, ScalarStyle};

use crate::published::MAX_FILE;

/// A mapping or a list that is open.
struct Open {
    is_list: bool,
    /// The key whose value is next, with its line.
    key: Option<(String, usize)>,
    /// The values of a list.
    values: Vec<String>,
}

/// Reads YAML. Empty values are left out, and values of lists in lists are joined by commas.
pub(super) fn yaml(text: &str) -> Result<Options, ReadError> {
    let mut list: Vec<GivenOption> = Vec::new();
    let mut open: Vec<Open> = Vec::new();
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|error| at(error.marker().line(), error.info()))?;
        let line = span.start.line();
        match event {
            Event::MappingStart(..) => open.push(Open { is_list: false, key: None, values: Vec::new() }),
            Event::SequenceStart(..) => open.push(Open { is_list: true, key: None, values: Vec::new() }),
            Event::MappingEnd | Event::SequenceEnd => {
                let Some(closed) = open.pop() else { continue };
                let joined = closed.values.join(",");
                if let Some(parent) = open.last_mut().filter(|parent| parent.is_list) {
                    parent.values.push(joined);
                } else if closed.is_list
                    && let Some((name, line)) = path(&open)
                {
                    list.push(GivenOption::new(&name, closed.values, line));
                }
                if let Some(parent) = open.last_mut() {
                    parent.key = None;
                }
            }
            Event::Scalar(value, style, ..) => {
                let Some(last) = open.last_mut() else {
                    return Err(at(line, "expected `key: value`"));
                };
                let is_null = style == ScalarStyle::Plain
                    && ["", "null", "~", "Null", "NULL"].contains(&value.as_ref());
                if last.is_list {
                    last.values.push(value.into_owned());
                } else if last.key.is_none() {
                    last.key = Some((value.into_owned(), line));
                    let names = open.iter().filter_map(|open| open.key.as_ref());
                    check_path(names.map(|(name, _)| 1 + name.len()).sum(), line)?;
                } else {
                    if let Some((name, line)) = path(&open).filter(|_| !is_null) {
                        list.push(GivenOption::new(&name, vec![value.into_owned()], line));
                    }
                    open.last_mut().expect("the mapping is open").key = None;
                }
            }
            Event::Alias(_) => return Err(at(line, "aliases are not read; write the value")),
            _ => {}
        }
        if open.len() > MOST_DEPTH {
            return Err(at(line, "too many values are inside each other"));
        }
    }
    Ok(Options { list, ..Options::default() })
}

/// The most values inside each other.
const MOST_DEPTH: usize = 64;

/// The longest path to a value, in bytes.
const LONGEST: usize = 1000;

/// Refuses a path that is so long that all options together would not fit into memory.
fn check_path(bytes: usize, line: usize) -> Result<(), ReadError> {
    if bytes > LONGEST {
        return Err(at(line, format!("the path to a value has more than {LONGEST} bytes; use shorter keys")));
    }
    Ok(())
}

/// Returns the keys of the open mappings, and the line of the last one.
fn path(open: &[Open]) -> Option<(String, usize)> {
    let keys: Option<Vec<&(String, usize)>> = open.iter().map(|open| open.key.as_ref()).collect();
    let keys = keys?;
    let names: Vec<&str> = keys.iter().map(|(name, _)| name.as_str()).collect();
    Some((names.join("."), keys.last()?.1))
}

fn at(line: usize, reason: impl Into<String>) -> ReadError {
    ReadError { line: Some(line), reason: reason.into() }
}

/// Reads torchtitan's TOML, whose choice of activation checkpointing becomes the option of the command line.
pub(super) fn toml(text: &str) -> Result<Options, ReadError> {
    let mut problems = Vec::new();
    let table = Table::parse(Source::from(text), MAX_FILE, &mut problems);
    if let Some(problem) = problems.first() {
        let line = problem.place.line_and_column().map(|(line, _)| line);
        return Err(ReadError { line, reason: problem.sentence.clone() });
    }
    let mut list = Vec::new();
    if let Some(table) = &table {
        add_table(table, "", &mut list)?;
    }
    for option in &mut list {
        if option.name == "activation_checkpoint.mode" {
            option.key = format!("{CHECKPOINTING}{}", option.values.join(" ").replace('_', "-"));
        }
    }
    Ok(Options { list, ..Options::default() })
}

fn add_table(table: &Table, before: &str, list: &mut Vec<GivenOption>) -> Result<(), ReadError> {
    for (key, entry) in &table.entries {
        let line = entry.key_place.line_and_column().map_or(1, |(line, _)| line);
        check_path(before.len() + key.len(), line)?;
        let name = format!("{before}{key}");
        if let Some(inner) = entry.value.as_table() {
            add_table(inner, &format!("{name}."), list)?;
            continue;
        }
        let values = match entry.value.as_list() {
            Some(values) => values.iter().map(shown).collect(),
            None => vec![shown(&entry.value)],
        };
        list.push(GivenOption::new(&name, values, line));
    }
    Ok(())
}

fn shown(value: &Value) -> String {
    match value.as_list() {
        Some(values) => values.iter().map(shown).collect::<Vec<_>>().join(","),
        None => value.as_text().map_or_else(|| value.shown(), str::to_owned),
    }
}
