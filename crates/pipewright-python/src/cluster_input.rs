//! Reads the arguments of predictions and plans for clusters: the model, the machine and the layout.

use std::path::PathBuf;

use pipewright_cluster::catalogue::{by_name, from_toml};
use pipewright_cluster::layout::Layout;
use pipewright_cluster::machine::Machine;
use pipewright_cluster::published;
use pipewright_document::{Problem, Problems, Reader, Source, Table};
use pipewright_schedule::error_text::with_causes;
use pipewright_shapes::model::Model;
use pipewright_shapes::reader;
use pipewright_system::model_folder::snapshot;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyFloat, PyInt};
use serde_json::{Map, Value};

use crate::errors::exception;
use crate::profile::text_of;

/// Reads the model of a `config.json`: a path, a folder, also in the cache of the Hugging Face hub, a text or a dictionary.
pub(crate) fn model_of(config: &Bound<'_, PyAny>) -> PyResult<Model> {
    let folder = config.extract::<PathBuf>().ok().filter(|path| path.is_dir());
    let folder = folder.map(|folder| snapshot(&folder)).transpose();
    let folder = folder.map_err(|error| refused(config.py(), vec![error.to_string()]))?;
    let file = folder.map(|folder| folder.join("config.json").into_pyobject(config.py())).transpose()?;
    let (text, path) = text_of("a model", file.as_ref().unwrap_or(config))?;
    let place = path.map_or_else(String::new, |path| format!("{}: ", path.display()));
    let described = reader::read(&text);
    Ok(described.map_err(|error| refused(config.py(), vec![format!("{place}{error}")]))?.model)
}

/// Returns the machine of a name, or of a cluster file.
pub(crate) fn machine_of(machine: &Bound<'_, PyAny>) -> PyResult<Machine> {
    let py = machine.py();
    let name = machine.extract::<String>().ok();
    match name.filter(|name| !name.contains(['/', '\\']) && !name.ends_with(".toml")) {
        Some(name) => by_name(&name).map_err(|error| refused(py, vec![with_causes(&error)])),
        None => {
            let (text, path) = text_of("a machine", machine)?;
            let name = path.map_or_else(String::new, |path| path.display().to_string());
            let read = from_toml(Source { name, text });
            read.map_err(|Problems(problems)| refused(py, problems.iter().map(Problem::text).collect()))
        }
    }
}

/// Reads the configuration of a run.
pub(crate) fn layout_of(layout: &Bound<'_, PyAny>) -> PyResult<Layout> {
    read_layout(layout, |keys| {
        keys.require(&["gpus", "mbs", "gbs", "seq", "precision"]);
        published::layout(keys)
    })
}

/// Reads keys of a configuration: a dictionary, a text in TOML or JSON, or a file.
pub(crate) fn read_layout<T>(
    layout: &Bound<'_, PyAny>,
    read: impl FnOnce(&mut Reader<'_>) -> Option<T>,
) -> PyResult<T> {
    let py = layout.py();
    for (key, value) in layout.cast::<PyDict>().into_iter().flatten() {
        // The text below cannot have such numbers.
        let is_large = value.is_instance_of::<PyInt>() && value.extract::<i64>().is_err();
        let is_no_number = value.is_instance_of::<PyFloat>() && !value.extract::<f64>()?.is_finite();
        let expected = if is_large { "a smaller number" } else { "a number" };
        if is_large || is_no_number {
            return Err(refused(
                py,
                vec![format!("layout: the value of `{key}` is {value}; use {expected}")],
            ));
        }
    }
    let (text, path) = text_of("a layout", layout)?;
    let name = path.map_or_else(|| "layout".to_owned(), |path| path.display().to_string());
    let is_json = text.trim_start().starts_with('{');
    let text =
        if is_json { toml_of(&name, &text).map_err(|problem| refused(py, vec![problem]))? } else { text };
    let source = Source { name: name.clone(), text };
    let read = Table::read(source, published::MAX_FILE, |table, problems| {
        let mut keys = Reader::new("the layout", table, problems);
        let value = read(&mut keys);
        keys.finish();
        value
    });
    let sentence = |problem: &Problem| {
        if !is_json {
            return problem.text();
        }
        // The caller's text has other lines.
        let help = problem.help.as_ref().map_or_else(String::new, |help| format!("; {help}"));
        format!("{name}: {}{help}", problem.sentence)
    };
    read.map_err(|Problems(problems)| refused(py, problems.iter().map(sentence).collect()))
}

/// Returns the TOML of a layout in JSON. Its problem has `name` in front, and the line of a text that is not JSON.
fn toml_of(name: &str, text: &str) -> Result<String, String> {
    let keys: Map<String, Value> = serde_json::from_str(text).map_err(|error| {
        let sentence = error.to_string();
        let sentence = sentence.rsplit_once(" at line ").map_or(sentence.as_str(), |(sentence, _)| sentence);
        format!("{name}:{}:{}: {sentence}", error.line(), error.column())
    })?;
    let document = keys.into_iter().map(|(key, value)| match value {
        Value::Null => Err(format!("{name}: `{key}` is None; leave the key out")),
        value => match toml::Value::try_from(value) {
            Ok(value) => Ok((key, value)),
            Err(error) => Err(format!("{name}: the value of `{key}` cannot be used: {error}")),
        },
    });
    let document = document.collect::<Result<toml::Table, _>>()?;
    toml::to_string(&document).map_err(|error| format!("{name}: {error}"))
}

/// Raises `ClusterError` if a layout does not fit a model.
pub(crate) fn check(py: Python<'_>, layout: &Layout, model: &Model) -> PyResult<()> {
    layout.check(model).map_err(|error| refused(py, vec![format!("layout: {error}")]))
}

/// Returns the `ClusterError` of some problems.
pub(crate) fn refused(py: Python<'_>, problems: Vec<String>) -> PyErr {
    exception(py, "ClusterError", &problems.join("\n"), |fields| fields.set_item("problems", problems))
}
