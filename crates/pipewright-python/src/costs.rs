//! The class `Costs`.

use pipewright_schedule::Costs;
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::arguments::named;
use crate::errors::{type_error, value_error};

/// The costs of actions, in any one unit.
///
/// Each time is of one stage: one number for all stages, or a list with one number per stage. `Costs.of_model` takes the
/// times of the whole model, and each schedule divides them by its stages. Without `backward`, a whole
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
///     >>> pw.Costs.of_model(forward=8, backward=16, hop=0.1)
///     Costs.of_model("F=8,B=16,hop=0.1")
#[pyclass(frozen, eq, module = "pipewright_pp", name = "Costs")]
#[derive(Debug, Clone, Default)]
pub(crate) struct PyCosts {
    /// The text that the costs were read from.
    pub(crate) text: String,
    costs: Costs,
    /// Whether the times are of the whole model.
    is_of_model: bool,
}

/// Two texts of the same costs are equal.
impl PartialEq for PyCosts {
    fn eq(&self, other: &Self) -> bool {
        (&self.costs, self.is_of_model) == (&other.costs, other.is_of_model)
    }
}

impl PyCosts {
    /// Returns the costs of each stage of a schedule with `stages` stages.
    pub(crate) fn of_stages(&self, stages: u32) -> Costs {
        if self.is_of_model { self.costs.shared(stages) } else { self.costs.clone() }
    }

    /// Returns the costs of each stage of a schedule with `stages` stages in which a rank has `stages_per_rank`. Times that
    /// are not of the whole model are of a rank.
    pub(crate) fn shared(&self, stages: u32, stages_per_rank: u32) -> Costs {
        self.costs.shared(if self.is_of_model { stages } else { stages_per_rank })
    }

    /// The function that makes the costs of their text.
    fn maker(&self) -> &'static str {
        if self.is_of_model { "of_model" } else { "parse" }
    }

    /// Whether the times are of the whole model.
    pub(crate) fn is_of_model(&self) -> bool {
        self.is_of_model
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
        Self::parse(py, &text_of(forward, input_backward, weight_backward, backward, hop, attention)?)
    }

    /// Makes the costs of actions from the times that the whole model takes for one microbatch. Each schedule divides them by
    /// the number of its stages, so that schedules with different numbers of stages train the same model. Each time is a
    /// number, or all costs are a text such as `F=8,B=16,hop=0.1`.
    ///
    /// Example:
    ///     >>> import pipewright_pp as pw
    ///     >>> costs = pw.Costs.of_model(forward=8, backward=16)
    ///     >>> [pw.schedule(name, ranks=4, microbatches=8).simulate(costs).makespan for name in ["1f1b", "interleaved1f1b"]]
    ///     [66.0, 57.0]
    #[staticmethod]
    #[pyo3(signature = (text=None, *, forward=None, input_backward=None, weight_backward=None, backward=None, hop=None, attention=None))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn of_model(
        py: Python<'_>,
        text: Option<String>,
        forward: Option<&Bound<'_, PyAny>>,
        input_backward: Option<&Bound<'_, PyAny>>,
        weight_backward: Option<&Bound<'_, PyAny>>,
        backward: Option<&Bound<'_, PyAny>>,
        hop: Option<f64>,
        attention: Option<f64>,
    ) -> PyResult<Self> {
        let given = text_of(forward, input_backward, weight_backward, backward, hop, attention)?;
        let text = match text {
            Some(_) if !given.is_empty() => {
                return Err(value_error("costs are given as a text and by name; leave one of them out"));
            }
            text => text.unwrap_or(given),
        };
        let made = Self { is_of_model: true, ..Self::parse(py, &text)? };
        match made.costs.stages.as_slice() {
            [_] => Ok(made),
            _ => {
                Err(value_error("the costs of a model have one number for each time, not one for each stage"))
            }
        }
    }

    /// Reads costs as the command line does: `F=1,I=1,W=1,hop=0.1`, with `F=1:1:2` for a time per stage.
    #[staticmethod]
    fn parse(py: Python<'_>, text: &str) -> PyResult<Self> {
        Ok(Self { text: text.to_owned(), costs: named(py, text)?, is_of_model: false })
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, (&str,))> {
        Ok((py.get_type::<Self>().getattr(self.maker())?, (&self.text,)))
    }

    fn __copy__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __deepcopy__(slf: Py<Self>, _memo: &Bound<'_, PyAny>) -> Py<Self> {
        slf
    }

    fn __repr__(&self) -> String {
        format!("Costs.{}(\"{}\")", self.maker(), self.text)
    }
}

/// Returns the text of costs that are given by name.
fn text_of(
    forward: Option<&Bound<'_, PyAny>>,
    input_backward: Option<&Bound<'_, PyAny>>,
    weight_backward: Option<&Bound<'_, PyAny>>,
    backward: Option<&Bound<'_, PyAny>>,
    hop: Option<f64>,
    attention: Option<f64>,
) -> PyResult<String> {
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
    Ok(parts.join(","))
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
