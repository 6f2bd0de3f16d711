//! The class `Profile`.

use std::path::PathBuf;
use std::sync::Arc;

use pipewright_schedule::profile::Profile;
use pipewright_system::bounded_file::{SMALL_TEXT, read_text};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyType};

use crate::errors::{exception, os_error, type_error, value_error};
use crate::interrupt::interruptible;

/// The measured costs of a model's layers and of the links between ranks, in seconds and bytes.
///
/// It has the keys of the files that `pipewright profile` writes: `link`, `layers`, and `device`, `node`,
/// `rows` and others if they are known.
///
/// Args:
///     source: The path of a file, its text in TOML or JSON, or the same keys as a dictionary. A text has a
///         line end or begins with `{`.
///
/// Raises:
///     ProfileError: If a key is missing or unknown, or for invalid values, with every problem as `problems`.
///     OSError: If the file cannot be read.
#[pyclass(frozen, eq, module = "pipewright_pp", name = "Profile")]
#[derive(Debug, PartialEq)]
pub(crate) struct PyProfile(Arc<Profile>);

#[pymethods]
impl PyProfile {
    #[new]
    fn new(py: Python<'_>, source: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (text, path) = text_of("a profile", source)?;
        let is_json = text.trim_start().starts_with('{');
        let read = if is_json {
            serde_json::from_str(&text).map_err(|error| error.to_string())
        } else {
            toml::from_str(&text).map_err(|error| error.to_string().trim_end().to_owned())
        };
        let place = path.map_or_else(String::new, |path| format!("{}: ", path.display()));
        let profile: Profile = read.map_err(|problem| refused(py, &place, vec![problem]))?;
        let problems: Vec<String> = profile.problems().iter().map(ToString::to_string).collect();
        if problems.is_empty() { Ok(Self(Arc::new(profile))) } else { Err(refused(py, &place, problems)) }
    }

    /// The number of layers, with repetitions.
    #[getter]
    fn layer_count(&self) -> u64 {
        self.0.layer_count()
    }

    /// Returns the profile as a dictionary, with the keys of its file.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let json = serde_json::to_string(self.0.as_ref()).map_err(value_error)?;
        py.import("json")?.call_method1("loads", (json,))
    }

    /// Returns the profile as the text of a TOML file, which the command line reads.
    fn to_toml(&self) -> PyResult<String> {
        toml::to_string(self.0.as_ref()).map_err(value_error)
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyType>, (String,))> {
        Ok((py.get_type::<Self>(), (self.to_toml()?,)))
    }

    fn __copy__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __deepcopy__(slf: Py<Self>, _memo: &Bound<'_, PyAny>) -> Py<Self> {
        slf
    }

    fn __repr__(&self) -> String {
        let name = self.0.device.as_ref().map(|device| device.name.as_str()).filter(|name| !name.is_empty());
        format!("<Profile of {} layers on {}>", self.0.layer_count(), name.unwrap_or("an unnamed device"))
    }
}

/// Reads a profile that is given as [`PyProfile`], or in a form from which one can be made.
pub(crate) fn profile_of(value: &Bound<'_, PyAny>) -> PyResult<Arc<Profile>> {
    match value.cast::<PyProfile>() {
        Ok(profile) => Ok(Arc::clone(&profile.get().0)),
        Err(_) => Ok(PyProfile::new(value.py(), value)?.0),
    }
}

/// Returns the text of an argument, such as "a profile", and the file that it was read from.
pub(crate) fn text_of(what: &str, source: &Bound<'_, PyAny>) -> PyResult<(String, Option<PathBuf>)> {
    let py = source.py();
    if source.is_instance_of::<PyDict>() {
        let json = py.import("json")?.call_method1("dumps", (source,));
        let json = json.map_err(|error| type_error(format!("{what}: {}", error.value(py))))?;
        return Ok((json.extract()?, None));
    }
    let text = source.cast::<PyString>().ok().map(ToString::to_string);
    if let Some(text) = text.filter(|text| text.contains('\n') || text.trim_start().starts_with('{')) {
        return Ok((text, None));
    }
    let path: PathBuf = source
        .extract()
        .map_err(|_| type_error(format!("{what} is a path, a text in TOML or JSON, or a dictionary")))?;
    let file = path.clone();
    let read = interruptible(py, move |_| read_text(&file, SMALL_TEXT))?;
    let text = read.map_err(|error| os_error(py, &path, &error))?;
    Ok((text, Some(path)))
}

fn refused(py: Python<'_>, place: &str, problems: Vec<String>) -> PyErr {
    let message = format!("{place}{}", problems.join("\n"));
    exception(py, "ProfileError", &message, |fields| fields.set_item("problems", problems))
}
