//! The class `Timeline`: the figures of a predicted run, its events, and its pictures.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;

use pipewright_schedule::causes::{Cause, Cell, causes};
use pipewright_schedule::picture::{
    MAX_CELLS, PictureSettings, RecordedStep, TimeUnit, View, html, svg, title, view, with_whole_overlaps,
};
use pipewright_schedule::simulate::{MemoryStep, Summary, UNIT, memory_curve};
use pipewright_schedule::timeline::Event;
use pipewright_schedule::{Action, Costs, Program, Rank, Slices, Timeline};
use pipewright_system::bounded_file::write_regular;
use pyo3::prelude::*;

use crate::errors::{os_error, value_error};
use crate::frame::{Columns, PyFrame};
use crate::interrupt::interruptible;

/// The largest number of actions that a notebook shows by itself.
pub(crate) const MOST_SHOWN: usize = 20_000;

/// A predicted run: when each rank runs each action, and what follows from it.
///
/// `Program.simulate` makes it. Its figures have the names of `pipewright simulate --format json`.
#[pyclass(frozen, module = "pipewright_pp", name = "Timeline")]
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
        let step = || RecordedStep { step: 1, before: 0, timeline: self.timeline.clone() };
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
            reads_base: false,
        })
    }
}

/// Returns events as columns.
fn columns(events: &[&Event], slices: Slices) -> Columns {
    let place = |event: &&Event| event.action.microbatch().map(|number| slices.place(number));
    Columns::default()
        .numbers("rank", events.iter().map(|event| event.rank.get()))
        .texts("action", events.iter().map(|event| Some(event.action)))
        .numbers("stage", events.iter().map(|event| event.action.stage().get()))
        .some_numbers("microbatch", events.iter().map(|event| Some(place(event)?.0.get())))
        .some_numbers("slice", events.iter().map(|event| Some(place(event)?.1.get())))
        .reals("start", events.iter().map(|event| event.start))
        .reals("end", events.iter().map(|event| event.end))
}

/// Returns the events that compute, by rank and then by start, as [`Cell`]s number them.
fn computations(timeline: &Timeline) -> impl Iterator<Item = &Event> {
    let ranks = (0..timeline.ranks()).map(Rank::new);
    ranks.flat_map(|rank| timeline.events_of(rank).iter().filter(|event| event.action.is_compute()))
}

/// Why a computation did not start earlier.
struct CauseRow {
    /// The time in which the rank did not compute before it.
    bubble: f64,
    /// The name of the cause.
    cause: &'static str,
    /// The action that it waited for, and its rank.
    from: Option<(Rank, Action)>,
    /// The operation behind which its message waited.
    in_line: Option<Action>,
    is_critical: bool,
}

impl Predicted {
    /// Returns a row for each event of [`computations`].
    fn causes(&self) -> Vec<CauseRow> {
        let timeline = &self.timeline;
        let causes = causes(timeline, self.program.ranks(), &self.costs, self.prediction.is_some());
        let critical: HashSet<(Rank, usize)> =
            causes.critical_path().into_iter().map(|cell| (cell.rank, cell.index)).collect();
        let of_rank = |rank: Rank| -> Vec<&Event> {
            timeline.events_of(rank).iter().filter(|event| event.action.is_compute()).collect()
        };
        let lanes: Vec<Vec<&Event>> = (0..timeline.ranks()).map(|rank| of_rank(Rank::new(rank))).collect();
        let action = |cell: Cell| lanes[cell.rank.index()][cell.index].action;
        let cells = lanes
            .iter()
            .zip(0..)
            .flat_map(|(lane, rank)| (0..lane.len()).map(move |index| Cell { rank: Rank::new(rank), index }));
        let row = |cell: Cell| {
            let lane = &lanes[cell.rank.index()];
            let free = cell.index.checked_sub(1).map_or(timeline.start(), |before| lane[before].end);
            let (cause, from, in_line) = match *causes.of(cell) {
                Cause::Start => ("start", None, None),
                Cause::Order => ("order", None, None),
                Cause::Delay => ("delay", None, None),
                Cause::Message { from, in_line, .. } => {
                    ("message", Some((from.rank, action(from))), in_line.map(|wait| wait.behind))
                }
                Cause::Wait(wait) => ("wait", Some((wait.rank, wait.action)), None),
            };
            CauseRow {
                bubble: (lane[cell.index].start - free).max(0.0),
                cause,
                from,
                in_line,
                is_critical: critical.contains(&(cell.rank, cell.index)),
            }
        };
        cells.map(row).collect()
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

    /// The events as a table: the columns `rank`, `action`, `stage`, `microbatch`, `slice`, `start` and `end`, by rank and
    /// then by start. Slices are counted from 0 in each microbatch; an action that belongs to no microbatch has `None` for
    /// both.
    #[getter]
    fn events(&self, py: Python<'_>) -> PyResult<PyFrame> {
        let predicted = Arc::clone(&self.0);
        let columns = interruptible(py, move |_| {
            let events: Vec<&Event> = predicted.timeline.events().iter().collect();
            columns(&events, predicted.timeline.slices())
        })?;
        columns.frame(py)
    }

    /// Returns what each rank holds over time, as a table: at each `time` after which a `rank` holds another amount, the
    /// `held` bytes of activations and gradients if the sizes of the stages are known, as with a profile; otherwise the
    /// number of activations.
    ///
    /// Example:
    ///     >>> import pipewright_pp as pw
    ///     >>> memory = pw.schedule("gpipe", ranks=1, microbatches=1, costs="F=1,B=2").simulate().memory()
    ///     >>> memory["time"], memory["held"]
    ///     ([0.0, 3.0], [1, 0])
    fn memory(&self, py: Python<'_>) -> PyResult<PyFrame> {
        let predicted = Arc::clone(&self.0);
        let columns = interruptible(py, move |_| {
            let Predicted { timeline, costs, .. } = predicted.as_ref();
            let sizes = if costs.sizes.is_empty() { &[UNIT] } else { costs.sizes.as_slice() };
            let of_rank = |rank: Rank| {
                let curve = memory_curve(timeline, rank, sizes);
                curve.into_iter().map(move |MemoryStep { time, held }| (rank, time, held))
            };
            let steps: Vec<_> = (0..timeline.ranks()).map(Rank::new).flat_map(of_rank).collect();
            Columns::default()
                .numbers("rank", steps.iter().map(|(rank, _, _)| rank.get()))
                .reals("time", steps.iter().map(|&(_, time, _)| time))
                .counts("held", steps.iter().map(|&(_, _, held)| held))
        })?;
        columns.frame(py)
    }

    /// Returns why each computation did not start earlier, as a table: the columns of `events`,
    /// `bubble`, `cause`, `from_rank`, `from_action`, `in_line` and `critical`, by rank and then by start.
    ///
    /// `bubble` is the time in which the rank did not compute before the action. `cause` is `start` (the first action
    /// of its rank, which needs no message), `order` (the action before it ended), `message` (the tensor of the action
    /// `from_action` of the rank `from_rank` arrived), `wait` (communication of its own, `from_action`, ended) or
    /// `delay` (the timeline has no reason). `in_line` is the operation behind which the message waited in a queue of
    /// the communicator. `critical` says whether the action is on the critical path: the step is shorter only if
    /// something on it takes less time. Columns without a value have `None`.
    ///
    /// Example:
    ///     >>> import pipewright_pp as pw
    ///     >>> causes = pw.schedule("gpipe", ranks=2, microbatches=1, costs="hop=0.5").simulate().causes()
    ///     >>> causes["action"], causes["cause"]
    ///     (['0F0', '0B0', '1F0', '1I0', '1W0'], ['start', 'message', 'message', 'order', 'order'])
    fn causes(&self, py: Python<'_>) -> PyResult<PyFrame> {
        let predicted = Arc::clone(&self.0);
        let columns = interruptible(py, move |_| {
            let events: Vec<&Event> = computations(&predicted.timeline).collect();
            let rows = predicted.causes();
            columns(&events, predicted.timeline.slices())
                .reals("bubble", rows.iter().map(|row| row.bubble))
                .words("cause", rows.iter().map(|row| Some(row.cause)))
                .some_numbers("from_rank", rows.iter().map(|row| Some(row.from?.0.get())))
                .texts("from_action", rows.iter().map(|row| Some(row.from?.1)))
                .texts("in_line", rows.iter().map(|row| row.in_line))
                .flags("critical", rows.iter().map(|row| row.is_critical))
        })?;
        columns.frame(py)
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

    fn __copy__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __deepcopy__(slf: Py<Self>, _memo: &Bound<'_, PyAny>) -> Py<Self> {
        slf
    }

    fn __repr__(&self) -> String {
        let Summary { makespan, bubble_fraction, .. } = &self.0.summary;
        let title = title(&self.0.name, &self.0.program);
        format!("<Timeline {title}; makespan {makespan}, bubble {:.1}%>", bubble_fraction * 100.0)
    }
}
