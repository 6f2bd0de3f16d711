//! Measured timelines: reads the traces of a step that has run.

use std::slice;
use std::sync::Arc;

use pipewright_schedule::error_text::with_causes;
use pipewright_schedule::measured::{
    TraceError, costs_of, on_one_clock, program_of, read_trace as read, replicas,
};
use pipewright_schedule::picture::TimeUnit;
use pipewright_schedule::simulate::{SimulateError, Summary, logical, timed};
use pyo3::prelude::*;

use crate::errors::{Raised, exception};
use crate::interrupt::interruptible;
use crate::timeline::{Predicted, PyTimeline};

/// Reads the trace of a step: of Pipewright (`timeline.json` of a run, `Timeline.trace`), or what
/// `pipewright_pp.torch` makes of PyTorch's.
///
/// The ranks are put on one clock: no message arrives before it is sent. The program and its median costs
/// follow from the events, and the page of `Timeline.view` compares the step with their prediction.
///
/// Args:
///     text: The text of the trace.
///
/// Raises:
///     ParseError: If the text is not a trace, or its actions do not belong to one pipeline.
#[pyfunction]
pub(crate) fn read_trace(py: Python<'_>, text: String) -> PyResult<PyTimeline> {
    let measured = interruptible(py, move |_| measured(&text))?;
    Ok(measured.map_err(|error| error.raised(py))?.into())
}

/// The error of a trace.
enum StepError {
    Trace(TraceError),
    /// The actions do not belong to one pipeline.
    Actions(String),
}

impl Raised for StepError {
    fn raised(&self, py: Python<'_>) -> PyErr {
        let message = match self {
            Self::Trace(error) => with_causes(error),
            Self::Actions(problem) => format!("the trace does not show a step: {problem}"),
        };
        exception(py, "ParseError", &message, |_| Ok(()))
    }
}

/// Returns the step of a trace, with the prediction of its program at its median costs.
fn measured(text: &str) -> Result<Predicted, StepError> {
    let read = read(text).map_err(StepError::Trace)?;
    let replicas = replicas(&read).map_err(|error| StepError::Actions(with_causes(&error)))?;
    let [step] = replicas.as_slice() else {
        let message = format!("{} ranks run stage 0; read the trace of one replica", replicas.len());
        return Err(StepError::Actions(message));
    };
    let step = on_one_clock(step);
    let program = program_of(&step).map_err(|error| StepError::Actions(with_causes(&error)))?;
    let costs = costs_of(slice::from_ref(&step));
    let not_run = |error: SimulateError| StepError::Actions(with_causes(&error));
    let run = timed(&program, &costs).map_err(not_run)?;
    let summary = Summary {
        makespan: step.makespan(),
        bubble_fraction: step.bubble_fraction(),
        bubble_per_rank: step.bubble_per_rank(),
        span_bubble_fraction: step.span_bubble_fraction(),
        ..Summary::of(&run, logical(&program).map_err(not_run)?.steps(), &costs)
    };
    let prediction = Some(run.timeline().clone());
    let (name, program, unit) = ("measured".to_owned(), Arc::new(program), TimeUnit::Seconds);
    Ok(Predicted { name, program, costs, timeline: step, prediction, summary, unit })
}
