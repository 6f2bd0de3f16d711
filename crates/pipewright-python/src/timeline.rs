//! The class `Timeline`: the figures of a predicted run, its events, and its pictures.

use std::path::PathBuf;
use std::sync::Arc;

use pipewright_schedule::picture::{
    MAX_CELLS, PictureSettings, RecordedStep, TimeUnit, View, html, svg, title, view, with_whole_overlaps,
};
use pipewright_schedule::simulate::Summary;
use pipewright_schedule::{Costs, Program, Timeline};
use pipewright_system::bounded_file::write_regular;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{os_error, value_error};
use crate::interrupt::interruptible;

/// The largest number of actions that a notebook shows by itself.
pub(crate) const MOST_SHOWN: usize = 20_000;

/// A predicted run: when each rank runs each action, and what follows from it.
///
/// `Program.simulate` makes it. Its figures have the names of `pipewright simulate --format json`.
#[pyclass(frozen, module = "pipewright", name = "Timeline")]
#[derive(Debug)]
pub(crate) struct PyTimeline(Arc<Predicted>);

/// A predicted run and what it was predicted from.
#[derive(Debug)]
pub(crate) struct Predicted {
    /// The schedule's name.
    pub(crate) name: String,
    pub(crate) program: Arc<Program>,
    pub(crate) costs: Costs,
    /// The events: predicted ones, or those of a step that has run.
    pub(crate) timeline: Timeline,
    /// The prediction of a step that has run, for its page; `None` if `timeline` is the prediction.
    pub(crate) prediction: Option<Timeline>,
    pub(crate) summary: Summary,
    pub(crate) unit: TimeUnit,
}

impl From<Predicted> for PyTimeline {
    fn from(predicted: Predicted) -> Self {
        Self(Arc::new(predicted))
    }
}

impl PyTimeline {
    /// Returns the drawing that a notebook shows, if it is not too large.
    pub(crate) fn shown(&self, py: Python<'_>) -> PyResult<Option<String>> {
        if self.0.timeline.events().len() > MOST_SHOWN { Ok(None) } else { self.svg(py, false).map(Some) }
    }

    /// Returns what `draw` makes of the timeline, whose actions must not be too many to draw.
    fn drawn(
        &self,
        py: Python<'_>,
        draw: impl FnOnce(&Predicted) -> String + Send + 'static,
    ) -> PyResult<String> {
        let cells = self.0.timeline.events().len() as u64;
        if cells > MAX_CELLS {
            let message =
                format!("a picture of {cells} actions is too large to draw; the most are {MAX_CELLS}");
            return Err(value_error(message));
        }
        let predicted = Arc::clone(&self.0);
        interruptible(py, move |_| draw(&predicted))
    }
}

impl Predicted {
    /// Draws the timeline with `picture`.
    fn picture(
        &self,
        picture: impl FnOnce(&Timeline, &PictureSettings<'_>) -> String,
        memory_lane: bool,
    ) -> String {
        let title = title(&self.name, &self.program);
        let settings =
            PictureSettings { title: &title, memory_lane, unit: self.unit, ..PictureSettings::default() };
        picture(&with_whole_overlaps(&self.timeline, &self.program), &settings)
    }

    /// Returns the page that explains the timeline.
    fn page(&self, memory_lane: bool) -> String {
        let title = title(&self.name, &self.program);
        let step = || RecordedStep { step: 1, timeline: self.timeline.clone() };
        let steps: Vec<RecordedStep> = self.prediction.iter().map(|_| step()).collect();
        view(&View {
            settings: PictureSettings {
                title: &title,
                sizes: &self.costs.sizes,
                memory_lane,
                unit: self.unit,
                ..PictureSettings::default()
            },
            predicted: self.prediction.as_ref().unwrap_or(&self.timeline),
            program: &self.program,
            costs: &self.costs,
            steps: &steps,
            left_out: 0,
            whole_step: None,
            other_programs: &[],
        })
    }
}

#[pymethods]
impl PyTimeline {
    /// The time from the start of the first action to the end of the last, in the unit of the costs; in
    /// seconds for a profile, with the optimizer.
    #[getter]
    fn makespan(&self) -> f64 {
        self.0.summary.makespan
    }

    /// The number of steps if every action, also a message, counts as one tick.
    #[getter]
    fn steps(&self) -> u32 {
        self.0.summary.steps
    }

    /// The mean share of the makespan in which a rank does not compute, from barrier to barrier.
    #[getter]
    fn bubble_fraction(&self) -> f64 {
        self.0.summary.bubble_fraction
    }

    /// The same for each rank.
    #[getter]
    fn bubble_per_rank(&self) -> Vec<f64> {
        self.0.summary.bubble_per_rank.clone()
    }

    /// The same as `bubble_fraction`, but each rank counts from its first to its last action.
    #[getter]
    fn span_bubble_fraction(&self) -> f64 {
        self.0.summary.span_bubble_fraction
    }

    /// The mean share of the makespan in which ranks wait for messages in flight.
    #[getter]
    fn exposed_comm_fraction(&self) -> f64 {
        self.0.summary.exposed_comm_fraction
    }

    /// The peak number of activations of one microbatch, or of one slice, that each rank holds.
    #[getter]
    fn peak_activations(&self) -> Vec<u64> {
        self.0.summary.peak_activations.clone()
    }

    /// The peak bytes of each rank, if the prediction is for a profile.
    #[getter]
    fn peak_bytes(&self) -> Option<Vec<u64>> {
        self.0.summary.peak_bytes.clone()
    }

    /// The figures of `pipewright simulate --format json` under the same keys, without `activation_buffers`,
    /// `engine_ms` and the price of a transport.
    #[getter]
    fn summary<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let json = serde_json::to_string(&self.0.summary).map_err(value_error)?;
        py.import("json")?.call_method1("loads", (json,))
    }

    /// The events as columns, for `pandas.DataFrame(timeline.events)`: the lists `rank`, `action`, `stage`,
    /// `microbatch`, `slice`, `start` and `end`, by rank and then by start. Slices are counted from 0 in each
    /// microbatch; an action that belongs to no microbatch has `None` for both.
    #[getter]
    fn events<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let events = self.0.timeline.events();
        let columns = PyDict::new(py);
        columns.set_item("rank", events.iter().map(|event| event.rank.get()).collect::<Vec<_>>())?;
        columns
            .set_item("action", events.iter().map(|event| event.action.to_string()).collect::<Vec<_>>())?;
        columns
            .set_item("stage", events.iter().map(|event| event.action.stage().get()).collect::<Vec<_>>())?;
        let slices = self.0.timeline.slices();
        let places = events.iter().map(|event| event.action.microbatch().map(|number| slices.place(number)));
        let (microbatches, slices): (Vec<_>, Vec<_>) = places
            .map(|place| (place.map(|(microbatch, _)| microbatch.get()), place.map(|(_, slice)| slice.get())))
            .unzip();
        columns.set_item("microbatch", microbatches)?;
        columns.set_item("slice", slices)?;
        columns.set_item("start", events.iter().map(|event| event.start).collect::<Vec<_>>())?;
        columns.set_item("end", events.iter().map(|event| event.end).collect::<Vec<_>>())?;
        Ok(columns)
    }

    /// Returns a drawing, to scale.
    #[pyo3(signature = (*, memory_lane=false))]
    pub(crate) fn svg(&self, py: Python<'_>, memory_lane: bool) -> PyResult<String> {
        self.drawn(py, move |predicted| predicted.picture(svg, memory_lane))
    }

    /// Returns a page to explore in a browser, with zoom and the memory of each rank.
    #[pyo3(signature = (*, memory_lane=false))]
    fn html(&self, py: Python<'_>, memory_lane: bool) -> PyResult<String> {
        self.drawn(py, move |predicted| predicted.picture(html, memory_lane))
    }

    /// Returns the events for Perfetto and chrome://tracing.
    fn trace(&self, py: Python<'_>) -> PyResult<String> {
        self.drawn(py, |predicted| predicted.timeline.chrome_trace())
    }

    /// Writes the page that explains the timeline, like `pipewright view`: the cause of each bubble, and
    /// simulations of other costs.
    ///
    /// Raises:
    ///     ValueError: If there are too many actions to draw.
    ///     OSError: If the file cannot be written.
    #[pyo3(signature = (path, *, memory_lane=false))]
    fn view(&self, py: Python<'_>, path: PathBuf, memory_lane: bool) -> PyResult<()> {
        let page = self.drawn(py, move |predicted| predicted.page(memory_lane))?;
        write_regular(&path, page.as_bytes()).map_err(|error| os_error(py, &path, &error))
    }

    fn _repr_svg_(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.shown(py)
    }

    fn __repr__(&self) -> String {
        let Summary { makespan, bubble_fraction, .. } = &self.0.summary;
        let title = title(&self.0.name, &self.0.program);
        format!("<Timeline {title}; makespan {makespan}, bubble {:.1}%>", bubble_fraction * 100.0)
    }
}
