//! The class `Comparison`, and the function that compares schedules that train the same model.

use std::path::PathBuf;
use std::sync::Arc;

use pipewright_schedule::comparison::{Compared, Figures, HEAD, note, page, rows, text};
use pipewright_schedule::footprint::Use;
use pipewright_schedule::generate::{find, generate_at};
use pipewright_schedule::lower::ProgramSource;
use pipewright_schedule::picture::{MAX_CELLS, TimeUnit, html_table};
use pipewright_schedule::{Recompute, Schedule, ScheduleSpec};
use pipewright_system::bounded_file::write_regular;
use pipewright_system::schedule_memory::{check_named, check_program, check_schedule};
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::arguments::whole;
use crate::costs::{PyCosts, costs_of};
use crate::errors::{Raised, os_error, type_error, value_error};
use crate::frame::{Columns, PyFrame};
use crate::interrupt::interruptible;
use crate::prediction::{ProfileChoices, at_costs, at_profile};
use crate::profile::profile_of;
use crate::program::PyProgram;
use crate::schedule::PySchedule;

/// Schedules side by side. `pipewright_pp.compare` makes it.
///
/// Its text is a table, which a notebook shows as such.
#[pyclass(frozen, module = "pipewright_pp", name = "Comparison")]
#[derive(Debug)]
pub(crate) struct PyComparison {
    compared: Arc<Vec<Compared>>,
    unit: TimeUnit,
}

/// A schedule to compare, and its name.
type Item = (String, ProgramSource);

/// The costs of a comparison.
enum ComparedAt {
    Costs(PyCosts),
    Profile(ProfileChoices),
}

/// Compares schedules that train the same model, like `pipewright compare`.
///
/// The times are of the same model for each schedule: `Costs.of_model` has the times of all its layers, and other costs have
/// the times of the layers of a rank. A schedule with more stages has smaller stages.
///
/// Args:
///     schedules: Names, `Schedule` and `Program` objects.
///     ranks, microbatches: The size of the schedules that are given by their names.
///     costs: The costs, as `Costs` or as a text; by default each of `F`, `I` and `W` takes 1 for the layers of a rank.
///         Costs that have a number for each stage count as they are. The costs with which `Schedule` objects were made do
///         not count.
///     profile: Instead of costs, the costs of the layers, as `Profile`, or the path or the text of one. Each schedule has
///         its best cut.
///
/// Returns:
///     The comparison. A schedule that cannot have this size, or that cannot run, has the reason in the column `error`.
///
/// Raises:
///     ScheduleError: If a name is unknown.
///     ValueError: If sizes are missing, or the schedules have different numbers of ranks and the costs are of a rank.
///
/// Example:
///     >>> import pipewright_pp as pw
///     >>> names = ["1f1b", "interleaved1f1b"]
///     >>> print(pw.compare(names, ranks=4, microbatches=8, costs="F=1,B=2,hop=0.1"))
///     schedule         stages per rank  time  bubble  memory  messages
///     1f1b                           1  30.6   21.6%       4        48
///     interleaved1f1b                2    28   14.3%     5.5       112
///     time: in the unit of the costs; memory: activations of a rank's layers for one microbatch, of the rank that holds the most; messages: of all ranks in a step
#[pyfunction]
#[pyo3(signature = (schedules, *, ranks=None, microbatches=None, costs=None, profile=None))]
pub(crate) fn compare(
    py: Python<'_>,
    schedules: &Bound<'_, PyAny>,
    ranks: Option<&Bound<'_, PyAny>>,
    microbatches: Option<&Bound<'_, PyAny>>,
    costs: Option<&Bound<'_, PyAny>>,
    profile: Option<&Bound<'_, PyAny>>,
) -> PyResult<PyComparison> {
    if schedules.is_instance_of::<PyString>() {
        return Err(type_error("schedules is a text, not a list of names and schedules"));
    }
    let given = schedules.try_iter().map_err(|_no_list| type_error("schedules is not a list"))?;
    let items = given.map(|item| item_of(&item?, ranks, microbatches)).collect::<PyResult<Vec<_>>>()?;
    let at = match (costs_of(costs)?, profile) {
        (Some(_), Some(_)) => return Err(value_error("costs and profile are given; leave one of them out")),
        (costs, None) => ComparedAt::Costs(costs.unwrap_or_default()),
        (None, Some(profile)) => ComparedAt::Profile(ProfileChoices {
            profile: profile_of(profile)?,
            boundaries: None,
            recompute: Recompute::None,
        }),
    };
    let mut sizes: Vec<u32> = items.iter().map(|(_, source)| ranks_of(source)).collect();
    sizes.dedup();
    if let ([first, second, ..], ComparedAt::Costs(costs)) = (sizes.as_slice(), &at)
        && !costs.is_of_model()
    {
        return Err(value_error(format!(
            "the schedules have {first} and {second} ranks, so that the layers of a rank differ; give the costs of the whole model with \
             Costs.of_model"
        )));
    }
    let unit = if matches!(at, ComparedAt::Profile(_)) { TimeUnit::Seconds } else { TimeUnit::Costs };
    items.iter().try_for_each(|(_, source)| check(py, source))?;
    let compared = interruptible(py, move |interrupted| {
        let items = items.into_iter().take_while(|_| !interrupted.is_set());
        let compared = |(name, source): Item| Compared { outcome: figures(&name, source, &at), name };
        items.map(compared).collect::<Vec<_>>()
    })?;
    Ok(PyComparison { compared: Arc::new(compared), unit })
}

/// Reads a schedule to compare.
fn item_of(
    item: &Bound<'_, PyAny>,
    ranks: Option<&Bound<'_, PyAny>>,
    microbatches: Option<&Bound<'_, PyAny>>,
) -> PyResult<Item> {
    if let Ok(schedule) = item.cast::<PySchedule>() {
        let schedule = schedule.get();
        return Ok((schedule.name().to_owned(), schedule.source()));
    }
    if let Ok(program) = item.cast::<PyProgram>() {
        let (name, program) = program.get().named();
        return Ok((name, ProgramSource::Rows(program)));
    }
    let name = item
        .extract::<String>()
        .map_err(|_| type_error("schedules are names, `Schedule` objects and `Program` objects"))?;
    let name = find(&name).map_err(|error| error.raised(item.py()))?.name;
    let (Some(ranks), Some(microbatches)) = (ranks, microbatches) else {
        return Err(value_error(format!("{name} has no size; add ranks and microbatches")));
    };
    let (ranks, microbatches) = (whole("ranks", ranks)?, whole("microbatches", microbatches)?);
    let spec = ScheduleSpec { ranks, microbatches, ..ScheduleSpec::default() };
    Ok((name.to_owned(), ProgramSource::Named(name.to_owned(), Box::new(spec))))
}

/// The number of ranks of a source.
fn ranks_of(source: &ProgramSource) -> u32 {
    match source {
        ProgramSource::Named(_, spec) => spec.ranks,
        ProgramSource::Schedule(schedule) => schedule.ranks(),
        ProgramSource::Rows(program) => program.ranks(),
    }
}

/// Raises `OutOfMemoryError` if the simulation would not fit into the memory.
fn check(py: Python<'_>, source: &ProgramSource) -> PyResult<()> {
    let checked = match source {
        ProgramSource::Named(name, spec) => check_named(name, spec, Use::Simulate),
        ProgramSource::Schedule(schedule) => check_schedule(schedule, Use::Simulate),
        ProgramSource::Rows(program) => check_program(program, Use::Simulate),
    };
    checked.map_err(|error| error.raised(py))
}

/// Predicts a schedule. The error is a sentence.
fn figures(name: &str, source: ProgramSource, at: &ComparedAt) -> Result<Figures, String> {
    let shared = |given: &PyCosts, schedule: &Schedule| {
        given.shared(schedule.placement().stages(), schedule.placement().stages_per_rank())
    };
    let source = match (source, at) {
        (ProgramSource::Named(name, spec), ComparedAt::Costs(given)) => {
            let made = generate_at(&name, *spec, |schedule| shared(given, schedule));
            ProgramSource::Schedule(made.map_err(|error| error.to_string())?)
        }
        (source, _) => source.generated().map_err(|error| error.to_string())?,
    };
    let schedule = source.computation().map_err(|error| error.to_string())?;
    let predicted = match at {
        ComparedAt::Costs(given) => at_costs(name.to_owned(), source, shared(given, &schedule), None),
        ComparedAt::Profile(choices) => at_profile(name.to_owned(), source, choices.clone()),
    };
    let predicted = predicted.map_err(|error| error.sentence())?;
    Ok(Figures::of(predicted.summary, &predicted.program, &schedule, &predicted.timeline))
}

#[pymethods]
impl PyComparison {
    /// The figures as a table with a row for each schedule: `name`, `ranks`, `stages_per_rank`, `microbatches`, `slices`,
    /// `makespan`, `per_microbatch` (the makespan divided by the microbatches), `bubble_fraction`, `exposed_comm_fraction`,
    /// `peak_share` (the most activations of a rank, in units of the activations of its layers for one microbatch),
    /// `peak_bytes` (with a profile), `messages` and `error`. Values that do not exist are `None`.
    #[getter]
    fn frame(&self, py: Python<'_>) -> PyResult<PyFrame> {
        let figures: Vec<Option<&Figures>> =
            self.compared.iter().map(|it| it.outcome.as_ref().ok()).collect();
        let number = |of: fn(&Figures) -> u32| figures.iter().map(move |it| it.map(of));
        let real = |of: fn(&Figures) -> f64| figures.iter().map(move |it| it.map(of));
        let count = |of: fn(&Figures) -> Option<u64>| figures.iter().map(move |it| it.and_then(of));
        Columns::default()
            .words("name", self.compared.iter().map(|it| Some(it.name.as_str())))
            .some_numbers("ranks", number(|it| it.ranks))
            .some_numbers("stages_per_rank", number(|it| it.stages_per_rank))
            .some_numbers("microbatches", number(|it| it.microbatches))
            .some_numbers("slices", number(|it| it.summary.slices.unwrap_or(1)))
            .some_reals("makespan", real(|it| it.summary.makespan))
            .some_reals("per_microbatch", real(|it| it.summary.makespan / f64::from(it.microbatches.max(1))))
            .some_reals("bubble_fraction", real(|it| it.summary.bubble_fraction))
            .some_reals("exposed_comm_fraction", real(|it| it.summary.exposed_comm_fraction))
            .some_reals("peak_share", real(Figures::peak_share))
            .some_counts("peak_bytes", count(Figures::peak_bytes))
            .some_counts("messages", count(|it| Some(it.messages as u64)))
            .words("error", self.compared.iter().map(|it| it.outcome.as_ref().err().map(String::as_str)))
            .frame(py)
    }

    /// Returns a `pandas.DataFrame` of the figures, as `frame.to_pandas()` does.
    fn to_pandas<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        PyFrame::to_pandas(&Bound::new(py, self.frame(py)?)?)
    }

    /// Returns a page with the table and a picture of each schedule, all on one scale.
    ///
    /// Raises:
    ///     ValueError: If there are too many actions to draw.
    fn html(&self, py: Python<'_>) -> PyResult<String> {
        let drawn = self.compared.iter().filter_map(|it| it.outcome.as_ref().ok());
        let cells: u64 = drawn.map(|figures| figures.timeline.events().len() as u64).sum();
        if cells > MAX_CELLS {
            let sentence =
                format!("pictures of {cells} actions are too large to draw; the most are {MAX_CELLS}");
            return Err(value_error(sentence));
        }
        let (compared, unit) = (Arc::clone(&self.compared), self.unit);
        interruptible(py, move |_| page(&compared, unit))
    }

    /// Writes the page to a file.
    ///
    /// Raises:
    ///     ValueError: If there are too many actions to draw.
    ///     OSError: If the file cannot be written.
    fn view(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        let page = self.html(py)?;
        write_regular(&path, page.as_bytes()).map_err(|error| os_error(py, &path, &error))
    }

    fn _repr_html_(&self) -> String {
        let table = html_table(&HEAD, &rows(&self.compared, self.unit));
        format!("{table}<small>{}</small>", note(&self.compared, self.unit))
    }

    fn __len__(&self) -> usize {
        self.compared.len()
    }

    fn __repr__(&self) -> String {
        text(&self.compared, self.unit).trim_end().to_owned()
    }

    fn __copy__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __deepcopy__(slf: Py<Self>, _memo: &Bound<'_, PyAny>) -> Py<Self> {
        slf
    }
}
