//! Turns the errors of the libraries into the exceptions of `pipewright_pp.errors`, with their fields.

use std::error::Error;
use std::fmt::Display;
use std::io;
use std::path::Path;

use pipewright_schedule::communicator::{Streams, UnknownStreams, Verdict};
use pipewright_schedule::costs::CostsError;
use pipewright_schedule::csv::CsvError;
use pipewright_schedule::error_text::with_causes;
use pipewright_schedule::level::UnknownLevel;
use pipewright_schedule::lower::SourceError;
use pipewright_schedule::recompute::RecomputeError;
use pipewright_schedule::simulate::SimulateError;
use pipewright_schedule::{GenerateError, GenerateErrorKind, LowerError, ScheduleError, Violations};
use pipewright_system::schedule_memory::OutOfMemory;
use pyo3::exceptions::{PyOSError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

/// An error that is an exception in Python.
pub(crate) trait Raised {
    /// Returns the exception.
    fn raised(&self, py: Python<'_>) -> PyErr;
}

/// Returns the exception of `pipewright_pp.errors` called `class`; `fields` sets its fields.
pub(crate) fn exception(
    py: Python<'_>,
    class: &str,
    message: &str,
    fields: impl FnOnce(&Bound<'_, PyDict>) -> PyResult<()>,
) -> PyErr {
    let made = || {
        let keywords = PyDict::new(py);
        fields(&keywords)?;
        py.import("pipewright_pp.errors")?.getattr(class)?.call((message,), Some(&keywords))
    };
    made().map_or_else(|error| error, PyErr::from_value)
}

/// Returns the exception called `class` for an error without fields.
pub(crate) fn plain(py: Python<'_>, class: &str, error: &(dyn Error + 'static)) -> PyErr {
    exception(py, class, &with_causes(error), |_| Ok(()))
}

/// Returns the exception for a mistake of this package.
pub(crate) fn internal(py: Python<'_>, what: &str) -> PyErr {
    exception(py, "InternalError", &format!("a bug of pipewright_pp: {what}; please report it"), |_| Ok(()))
}

/// Returns Python's `ValueError` for an argument.
pub(crate) fn value_error(message: impl Display) -> PyErr {
    PyValueError::new_err(message.to_string())
}

/// Returns Python's `TypeError` for an argument.
pub(crate) fn type_error(message: impl Display) -> PyErr {
    PyTypeError::new_err(message.to_string())
}

/// Returns Python's `OSError` for a file; a missing one is a `FileNotFoundError`.
pub(crate) fn os_error(py: Python<'_>, path: &Path, error: &io::Error) -> PyErr {
    let path = path.display().to_string();
    let Some(number) = error.raw_os_error() else {
        return PyOSError::new_err(format!("{path}: {error}"));
    };
    let text = py.import("os").and_then(|os| os.getattr("strerror")?.call1((number,))?.extract::<String>());
    PyOSError::new_err((number, text.unwrap_or_else(|_| error.to_string()), path))
}

impl Raised for GenerateError {
    fn raised(&self, py: Python<'_>) -> PyErr {
        exception(py, "ScheduleError", &self.to_string(), |fields| match &self.kind {
            GenerateErrorKind::UnknownSchedule { suggestion, .. } => {
                fields.set_item("suggestion", suggestion)
            }
            _ => Ok(()),
        })
    }
}

impl Raised for ScheduleError {
    fn raised(&self, py: Python<'_>) -> PyErr {
        plain(py, "ParseError", self)
    }
}

/// Returns the exception for a text that is not a schedule, which was read from `path` if that is given.
pub(crate) fn csv_error(py: Python<'_>, path: Option<&Path>, error: &CsvError) -> PyErr {
    let CsvError { at, problem } = error;
    let path = path.map(|path| path.display().to_string());
    let message = match (&path, at) {
        (Some(path), Some((line, column))) => format!("{path}:{line}:{column}: {problem}"),
        (Some(path), None) => format!("{path}: {problem}"),
        (None, _) => error.to_string(),
    };
    exception(py, "ParseError", &message, |fields| {
        fields.set_item("path", path)?;
        fields.set_item("line", at.map(|(line, _)| line))?;
        fields.set_item("column", at.map(|(_, column)| column))
    })
}

impl Raised for Violations {
    fn raised(&self, py: Python<'_>) -> PyErr {
        exception(py, "ValidationError", &self.to_string(), |fields| {
            let listed = self.listed().iter();
            let listed = listed.map(|one| (one.rank.get(), one.position, one.problem.clone()));
            fields.set_item("violations", violations(py, listed)?)?;
            fields.set_item("omitted", self.omitted())
        })
    }
}

/// Returns a list of `pipewright_pp.errors.Violation`.
fn violations<'py>(
    py: Python<'py>,
    places: impl Iterator<Item = (u32, usize, String)>,
) -> PyResult<Bound<'py, PyList>> {
    let class = py.import("pipewright_pp.errors")?.getattr("Violation")?;
    let list = PyList::empty(py);
    for place in places {
        list.append(class.call1(place)?)?;
    }
    Ok(list)
}

/// Returns the exception for a program that is not sound on every one of the transports that were asked for.
pub(crate) fn unsound_on(py: Python<'_>, verdicts: &[(Streams, Verdict)]) -> PyErr {
    let bad = || verdicts.iter().filter(|(_, verdict)| !verdict.is_sound());
    let reasons: Vec<String> = bad().map(|(streams, verdict)| format!("{streams}: {verdict}")).collect();
    let message = format!("the program is not sound on every transport\n{}", reasons.join("\n"));
    exception(py, "ValidationError", &message, |fields| {
        let words = PyDict::new(py);
        for (streams, verdict) in verdicts {
            words.set_item(streams.name(), verdict.word())?;
        }
        let places = bad().flat_map(|(_, verdict)| {
            let crossings = verdict.crossings.iter();
            let crossings = crossings.map(|at| (at.receiver.get(), at.position, at.text()));
            crossings.chain(
                verdict
                    .cycle
                    .iter()
                    .map(|at| (at.rank.get(), at.position, format!("{} {}", at.action, at.reason))),
            )
        });
        let omitted: u64 =
            bad().map(|(_, verdict)| verdict.crossed.saturating_sub(verdict.crossings.len() as u64)).sum();
        fields.set_item("violations", violations(py, places)?)?;
        fields.set_item("omitted", omitted)?;
        fields.set_item("verdicts", words)
    })
}

impl Raised for LowerError {
    fn raised(&self, py: Python<'_>) -> PyErr {
        match self {
            Self::Unsound { violations, .. } | Self::Invalid(violations) => violations.raised(py),
            Self::Rows(error) => error.raised(py),
            Self::Stuck { blocked } => exception(py, "LowerError", &self.to_string(), |fields| {
                fields.set_item("blocked", blocked.iter().map(ToString::to_string).collect::<Vec<_>>())
            }),
            _ => plain(py, "LowerError", self),
        }
    }
}

impl Raised for SourceError {
    fn raised(&self, py: Python<'_>) -> PyErr {
        match self {
            Self::Generate(error) => error.raised(py),
            Self::Lower(error) => error.raised(py),
        }
    }
}

impl Raised for SimulateError {
    fn raised(&self, py: Python<'_>) -> PyErr {
        match self {
            Self::Costs(error) => error.raised(py),
            Self::Unsound { streams, verdict } => unsound_on(py, &[(*streams, verdict.as_ref().clone())]),
            Self::Incomplete(violations) => violations.raised(py),
            // Only sound programs are simulated.
            error => internal(py, &error.to_string()),
        }
    }
}

impl Raised for OutOfMemory {
    fn raised(&self, py: Python<'_>) -> PyErr {
        exception(py, "OutOfMemoryError", &self.to_string(), |fields| {
            fields.set_item("cells", self.cells)?;
            fields.set_item("needed", self.needed)?;
            fields.set_item("free", self.free.bytes)
        })
    }
}

impl Raised for CostsError {
    fn raised(&self, py: Python<'_>) -> PyErr {
        plain(py, "CostsError", self)
    }
}

impl Raised for UnknownLevel {
    fn raised(&self, _: Python<'_>) -> PyErr {
        value_error(self)
    }
}

impl Raised for UnknownStreams {
    fn raised(&self, _: Python<'_>) -> PyErr {
        value_error(self)
    }
}

impl Raised for RecomputeError {
    fn raised(&self, _: Python<'_>) -> PyErr {
        value_error(self)
    }
}
