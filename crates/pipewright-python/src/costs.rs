//! The class `Costs`.

use pipewright_schedule::Costs;
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::arguments::named;
use crate::errors::type_error;

/// The costs of actions, in any one unit.
///
/// Each time is one number for all stages, or a list with one number per stage. Without `backward`, a whole
/// backward takes `input_backward + weight_backward`; without these two, each is half of `backward` if that
/// is given, else 1.
///
/// Args:
///     forward: The time of `F`, by default 1.
///     input_backward: The time of `I`.
///     weight_backward: The time of `W`.
///     backward: The time of `B`.
///     hop: The time of each message between ranks.
///     attention: The share of `F` and `I` that grows from slice to slice, from 0 to 1.
///
/// Raises:
///     CostsError: If a cost is negative or not a number, or if lists differ in length.
///
/// Example:
///     >>> import pipewright_pp as pw
///     >>> pw.Costs(forward=1, backward=2, hop=0.1)
///     Costs.parse("F=1,B=2,hop=0.1")
#[pyclass(frozen, eq, module = "pipewright_pp", name = "Costs")]
#[derive(Debug, Clone)]
pub(crate) struct PyCosts {
    /// The text that the costs were read from.
    pub(crate) text: String,
    pub(crate) costs: Costs,
}

/// Two texts of the same costs are equal.
impl PartialEq for PyCosts {
    fn eq(&self, other: &Self) -> bool {
        self.costs == other.costs
    }
}

#[pymethods]
impl PyCosts {
    #[new]
    #[pyo3(signature = (*, forward=None, input_backward=None, weight_backward=None, backward=None, hop=None, attention=None))]
    fn new(
        py: Python<'_>,
        forward: Option<&Bound<'_, PyAny>>,
        input_backward: Option<&Bound<'_, PyAny>>,
        weight_backward: Option<&Bound<'_, PyAny>>,
        backward: Option<&Bound<'_, PyAny>>,
        hop: Option<f64>,
        attention: Option<f64>,
    ) -> PyResult<Self> {
        let times = [
            ("F", "forward", forward),
            ("I", "input_backward", input_backward),
            ("W", "weight_backward", weight_backward),
            ("B", "backward", backward),
        ];
        let mut parts = Vec::new();
        for (cost, name, value) in times {
            if let Some(value) = value {
                parts.push(format!("{cost}={}", times_of(name, value)?));
            }
        }
        let shares = [("hop", hop), ("attention", attention)];
        parts.extend(shares.into_iter().filter_map(|(cost, value)| Some(format!("{cost}={}", value?))));
        Self::parse(py, &parts.join(","))
    }

    /// Reads costs as the command line does: `F=1,I=1,W=1,hop=0.1`, with `F=1:1:2` for a time per stage.
    #[staticmethod]
    fn parse(py: Python<'_>, text: &str) -> PyResult<Self> {
        Ok(Self { text: text.to_owned(), costs: named(py, text)? })
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, (&str,))> {
        Ok((py.get_type::<Self>().getattr("parse")?, (&self.text,)))
    }

    fn __copy__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __deepcopy__(slf: Py<Self>, _memo: &Bound<'_, PyAny>) -> Py<Self> {
        slf
    }

    fn __repr__(&self) -> String {
        format!("Costs.parse(\"{}\")", self.text)
    }
}

/// Returns the times of stages as in the text of costs.
fn times_of(name: &str, value: &Bound<'_, PyAny>) -> PyResult<String> {
    if let Ok(time) = value.extract::<f64>() {
        return Ok(time.to_string());
    }
    let times: Vec<f64> = value.extract().map_err(|_| {
        type_error(format!("{name} is neither a number nor a list of numbers, one for each stage"))
    })?;
    Ok(times.iter().map(ToString::to_string).collect::<Vec<_>>().join(":"))
}

/// Reads costs that are given as [`PyCosts`] or as their text.
pub(crate) fn costs_of(value: Option<&Bound<'_, PyAny>>) -> PyResult<Option<PyCosts>> {
    let Some(value) = value else { return Ok(None) };
    if let Ok(costs) = value.cast::<PyCosts>() {
        return Ok(Some(costs.get().clone()));
    }
    match value.cast::<PyString>() {
        Ok(text) => PyCosts::parse(value.py(), &text.to_string()).map(Some),
        Err(_) => Err(type_error("costs are neither `Costs` nor a text such as `F=1,I=1,W=1,hop=0.1`")),
    }
}
