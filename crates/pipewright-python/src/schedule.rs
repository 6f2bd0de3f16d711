//! The class `Schedule`, and the function that makes schedules by name.

use std::sync::Arc;

use pipewright_schedule::csv::print_schedule;
use pipewright_schedule::footprint::Use;
use pipewright_schedule::generate::{Generator, PerStage, catalogue, depends_on_costs, find, generate_at};
use pipewright_schedule::lower::ProgramSource;
use pipewright_schedule::picture::{computation_of, microbatches_in_words};
use pipewright_schedule::words::counted;
use pipewright_schedule::{
    Costs, GenerateError, Placement, Rank, Schedule, ScheduleError, ScheduleSpec, generate,
};
use pipewright_system::schedule_memory::{check_named, check_schedule};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt};

use crate::arguments::{optional, whole, whole_list};
use crate::costs::{PyCosts, costs_of};
use crate::errors::Raised;
use crate::interrupt::interruptible;
use crate::lowering::{Unlowered, check_choice, passes_of, passes_to};
use crate::prediction::{At, PredictionError, at_costs};
use crate::program::{PyProgram, slices_of};
use crate::proof::TransportOptions;
use crate::rows::{cells_of, texts};
use crate::timeline::PyTimeline;

/// The order in which each rank computes, without communication.
///
/// `pipewright_pp.schedule` makes it. A notebook shows it as a picture.
#[pyclass(frozen, module = "pipewright_pp", name = "Schedule")]
#[derive(Debug)]
pub(crate) struct PySchedule {
    name: String,
    schedule: Arc<Schedule>,
    /// The costs that the schedule was made for, with which it is drawn; `None` for the usual ones.
    given: Option<PyCosts>,
}

impl PySchedule {
    /// Makes the object of a schedule that is called `name`.
    pub(crate) fn made(name: &str, schedule: Schedule, given: Option<PyCosts>) -> Self {
        Self { name: name.to_owned(), schedule: Arc::new(schedule), given }
    }

    fn costs(&self) -> Costs {
        let stages = self.schedule.placement().stages();
        self.given.as_ref().map(|given| given.of_stages(stages)).unwrap_or_default()
    }

    pub(crate) fn source(&self) -> ProgramSource {
        ProgramSource::Schedule(self.schedule.as_ref().clone())
    }
}

/// Makes a schedule by its name, like `pipewright schedule`.
///
/// Args:
///     name: The name, without regard to case; `pipewright_pp.schedules` lists all.
///     ranks: The number of ranks in the pipeline.
///     microbatches: The number of microbatches in a step.
///     stages_per_rank: The number of stages on each rank; by default, the number that the schedule needs.
///     group_size: The number of microbatches that a chunk runs before the next chunk, for interleaved
///         schedules.
///     wide_warmup: Warm up with two more forwards for each later rank, for `interleaved-zb-h1`.
///     memory_limit: The number of activations that a stage may hold, one for all stages or a list with one
///         for each, for `zb-greedy` and `vocab1f1b`.
///     slices: The number of slices into which each microbatch is cut along its sequence, for `seq1f1b`.
///     overlap: Let forwards and backwards that follow each other overlap, for `interleaved1f1b` and
///         `zbvzerobubble`.
///     costs: The costs of actions, as `Costs` or as a text, for `zb-greedy` and `vocab1f1b`, for the
///         picture, and for `lower`: with exchanges, overlaps stay whole.
///
/// Raises:
///     ScheduleError: If the name is unknown, or the schedule cannot have this size or setting.
///     OutOfMemoryError: If the schedule would not fit into the free memory.
///
/// Example:
///     >>> import pipewright_pp as pw
///     >>> pw.schedule("gpipe", ranks=2, microbatches=2).csv()
///     '0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n'
#[pyfunction]
#[pyo3(signature = (
    name, *, ranks, microbatches, stages_per_rank=None, group_size=None, wide_warmup=false, memory_limit=None,
    slices=None, overlap=false, costs=None
))]
#[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
pub(crate) fn schedule(
    py: Python<'_>,
    name: &str,
    ranks: &Bound<'_, PyAny>,
    microbatches: &Bound<'_, PyAny>,
    stages_per_rank: Option<&Bound<'_, PyAny>>,
    group_size: Option<&Bound<'_, PyAny>>,
    wide_warmup: bool,
    memory_limit: Option<&Bound<'_, PyAny>>,
    slices: Option<&Bound<'_, PyAny>>,
    overlap: bool,
    costs: Option<&Bound<'_, PyAny>>,
) -> PyResult<PySchedule> {
    let given = costs_of(costs)?;
    let spec = ScheduleSpec {
        ranks: whole("ranks", ranks)?,
        stages_per_rank: optional("stages_per_rank", stages_per_rank)?,
        microbatches: whole("microbatches", microbatches)?,
        group_size: optional("group_size", group_size)?,
        wide_warmup,
        costs: given
            .as_ref()
            .filter(|given| !given.is_of_model() && depends_on_costs(name))
            .map(|given| given.of_stages(1)),
        memory_limit: memory_limit.map(limits_of).transpose()?,
        slices: slices_of(slices)?,
        overlap,
    };
    let name = name.to_owned();
    check_named(&name, &spec, Use::Generate).map_err(|error| error.raised(py))?;
    let order_costs = given.clone().filter(PyCosts::is_of_model);
    let made = interruptible(py, move |_| {
        let schedule = match order_costs {
            Some(given) => generate_at(&name, spec, |usual| given.of_stages(usual.placement().stages()))?,
            None => generate(&name, &spec)?,
        };
        Ok((find(&name)?.name, schedule))
    })?;
    let (name, schedule) = made.map_err(|error: GenerateError| error.raised(py))?;
    Ok(PySchedule::made(name, schedule, given))
}

fn limits_of(limits: &Bound<'_, PyAny>) -> PyResult<PerStage<u32>> {
    if limits.is_instance_of::<PyInt>() {
        Ok(PerStage::Same(whole("memory_limit", limits)?))
    } else {
        Ok(PerStage::Each(whole_list("memory_limit", limits)?))
    }
}

/// Returns all schedules: their name, a summary, and other names, as `pipewright schedule --list` prints
/// them.
#[pyfunction]
pub(crate) fn schedules(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyDict>>> {
    let entry = |generator: &Generator| {
        let entry = PyDict::new(py);
        entry.set_item("name", generator.name)?;
        entry.set_item("summary", generator.summary)?;
        entry.set_item("aliases", generator.aliases)?;
        Ok(entry)
    };
    catalogue().iter().map(entry).collect()
}

/// Makes the schedule that `pickle` has written.
#[pyfunction]
pub(crate) fn _restore_schedule(
    py: Python<'_>,
    name: &str,
    rows: &Bound<'_, PyAny>,
    stage_to_rank: Vec<u32>,
    microbatches: u32,
    slices: &Bound<'_, PyAny>,
    costs: Option<&Bound<'_, PyAny>>,
) -> PyResult<PySchedule> {
    let (cells, slices) = (cells_of(rows)?, slices_of(Some(slices))?.unwrap_or_default());
    let placement = Placement::explicit(stage_to_rank.into_iter().map(Rank::new).collect());
    let placement = placement.map_err(|error| ScheduleError::from(error).raised(py))?;
    let schedule = Schedule::new(placement, microbatches, cells).and_then(|made| made.with_slices(slices));
    Ok(PySchedule::made(name, schedule.map_err(|error| error.raised(py))?, costs_of(costs)?))
}

#[pymethods]
impl PySchedule {
    /// The schedule's name.
    #[getter]
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The rows as lists of texts, one list for each rank. `None` is a cell in which a rank waits.
    #[getter]
    fn rows(&self) -> Vec<Vec<Option<String>>> {
        texts(self.schedule.rows())
    }

    /// The number of ranks.
    #[getter]
    fn ranks(&self) -> u32 {
        self.schedule.ranks()
    }

    /// The number of stages.
    #[getter]
    fn stages(&self) -> u32 {
        self.schedule.placement().stages()
    }

    /// The number of microbatches of a step.
    #[getter]
    fn microbatches(&self) -> u32 {
        self.schedule.microbatches() / self.schedule.slices().get()
    }

    /// The number of slices of each microbatch.
    #[getter]
    fn slices(&self) -> u32 {
        self.schedule.slices().get()
    }

    /// The rank of each stage.
    #[getter]
    fn stage_to_rank(&self) -> Vec<u32> {
        let placement = self.schedule.placement();
        placement.all_stages().map(|stage| placement.rank_of(stage).get()).collect()
    }

    /// Returns one line for each rank, in PyTorch's format. A cell in which a rank waits is empty.
    fn csv(&self, py: Python<'_>) -> PyResult<String> {
        let schedule = Arc::clone(&self.schedule);
        interruptible(py, move |_| print_schedule(&schedule))
    }

    /// Adds communication. The result is not proved sound; `Program.validate` proves it.
    ///
    /// Args:
    ///     passes: Names of passes in their order, such as `["unshard=3", "send-recv"]`, like `pipewright
    ///         lower`. Without them, the program is the one that Pipewright trains with. If the costs of the
    ///         schedule have exchanges, overlaps stay whole.
    ///     level: Instead of passes, a level to lower to, as PyTorch does: `compute`, `comms` or `full`.
    ///
    /// Raises:
    ///     LowerError: If a pass is unknown, has no effect, or fails.
    #[pyo3(signature = (passes=None, *, level=None))]
    fn lower(
        &self,
        py: Python<'_>,
        passes: Option<&Bound<'_, PyAny>>,
        level: Option<&str>,
    ) -> PyResult<PyProgram> {
        check_choice(passes.is_some(), level.is_some())?;
        let (source, config) = (self.source(), passes_to(py, level, &self.costs())?);
        check_schedule(&self.schedule, Use::Lower).map_err(|error| error.raised(py))?;
        let program = match passes {
            Some(passes) => {
                let (passes, schedule) = (passes_of(py, passes)?, self.schedule.as_ref());
                let (placement, slices) = (schedule.placement().clone(), schedule.slices());
                let (cells, microbatches) = (schedule.rows().to_vec(), schedule.microbatches());
                Unlowered { cells, placement, microbatches, slices }.lowered(py, passes)?
            }
            None => {
                let lowered = interruptible(py, move |_| source.lowered(&config))?;
                lowered.map_err(|error| error.raised(py))?.into_program()
            }
        };
        Ok(PyProgram::made(&self.name, program))
    }

    /// Returns a drawing of the run at the costs of the schedule, to scale, without communication.
    #[pyo3(signature = (*, memory_lane=false))]
    fn svg(&self, py: Python<'_>, memory_lane: bool) -> PyResult<String> {
        self.drawn(py)?.svg(py, memory_lane)
    }

    fn _repr_svg_(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.drawn(py)?.shown(py)
    }

    /// Proves that the program that Pipewright trains with is sound, like `lower().validate()`.
    ///
    /// Args:
    ///     transport, eager, message_bytes, grouped: As in `Program.validate`.
    ///
    /// Returns:
    ///     The verdict of each transport, all of them `sound`; empty without a transport.
    ///
    /// Raises:
    ///     ValidationError: If the program is unsound, or not sound on a transport.
    ///
    /// Example:
    ///     >>> import pipewright_pp as pw
    ///     >>> pw.schedule("gpipe", ranks=2, microbatches=2).validate("rank")
    ///     {'rank': 'sound'}
    #[pyo3(signature = (transport=None, *, eager=None, message_bytes=None, grouped=false))]
    fn validate<'py>(
        &self,
        py: Python<'py>,
        transport: Option<&str>,
        eager: Option<&Bound<'_, PyAny>>,
        message_bytes: Option<&Bound<'_, PyAny>>,
        grouped: bool,
    ) -> PyResult<Bound<'py, PyDict>> {
        self.lower(py, None, None)?.validate(py, transport, None, eager, message_bytes, grouped)
    }

    /// Predicts when each rank runs each action of the program that Pipewright trains with, like
    /// `lower().simulate()`; with `logical`, like `lower(level="comms").simulate(logical=True)`. Without costs, a profile
    /// and `logical`, the costs of the schedule count.
    ///
    /// Args:
    ///     costs, profile, boundaries, recompute, logical: As in `Program.simulate`.
    ///     transport, eager, message_bytes, grouped: As in `Program.simulate`.
    ///
    /// Raises:
    ///     CostsError, PlanError, ProfileError, ValidationError: Like `Program.simulate`.
    ///
    /// Example:
    ///     >>> import pipewright_pp as pw
    ///     >>> pw.schedule("1f1b", ranks=2, microbatches=2, costs="F=1,B=2").simulate().makespan
    ///     9.0
    #[pyo3(signature = (
        costs=None, *, profile=None, boundaries=None, recompute="none", logical=false,
        transport=None, eager=None, message_bytes=None, grouped=false,
    ))]
    #[expect(clippy::too_many_arguments, reason = "each is a keyword in Python")]
    fn simulate(
        &self,
        py: Python<'_>,
        costs: Option<&Bound<'_, PyAny>>,
        profile: Option<&Bound<'_, PyAny>>,
        boundaries: Option<&Bound<'_, PyAny>>,
        recompute: &str,
        logical: bool,
        transport: Option<&str>,
        eager: Option<&Bound<'_, PyAny>>,
        message_bytes: Option<&Bound<'_, PyAny>>,
        grouped: bool,
    ) -> PyResult<PyTimeline> {
        let communicator = TransportOptions { eager, message_bytes, grouped }.one(py, transport)?;
        let own = match (&self.given, costs, profile, logical) {
            (Some(given), None, None, false) => Some(Bound::new(py, given.clone())?.into_any()),
            _ => None,
        };
        let at = At::of(
            py,
            self.stages(),
            costs.or(own.as_ref()),
            profile,
            boundaries,
            recompute,
            logical,
            communicator,
        )?;
        check_schedule(&self.schedule, Use::Simulate).map_err(|error| error.raised(py))?;
        let (name, source) = (self.name.clone(), self.source());
        at.timeline(py, name, source)
    }

    #[expect(clippy::type_complexity, reason = "the function and the arguments of `pickle`")]
    fn __reduce__<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<(Bound<'py, PyAny>, (&str, Vec<Vec<Option<String>>>, Vec<u32>, u32, u32, Option<PyCosts>))>
    {
        let restore = py.import("pipewright_pp._native")?.getattr("_restore_schedule")?;
        let (microbatches, slices) = (self.schedule.microbatches(), self.schedule.slices().get());
        let parts =
            (self.name.as_str(), self.rows(), self.stage_to_rank(), microbatches, slices, self.given.clone());
        Ok((restore, parts))
    }

    fn __copy__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __deepcopy__(slf: Py<Self>, _memo: &Bound<'_, PyAny>) -> Py<Self> {
        slf
    }

    fn __repr__(&self) -> String {
        let ranks = counted(self.schedule.ranks(), "rank");
        let microbatches = microbatches_in_words(self.schedule.microbatches(), self.schedule.slices());
        format!("<Schedule {}: {ranks}, {microbatches}>", self.name)
    }

    fn __eq__(&self, other: &Self) -> bool {
        self.schedule == other.schedule
    }
}

impl PySchedule {
    /// Returns the predicted run of the schedule's own computations.
    fn drawn(&self, py: Python<'_>) -> PyResult<PyTimeline> {
        let (name, source, costs) = (self.name.clone(), self.source(), self.costs());
        let schedule = Arc::clone(&self.schedule);
        check_schedule(&schedule, Use::Simulate).map_err(|error| error.raised(py))?;
        let predicted = interruptible(py, move |_| {
            let mut predicted = at_costs(name, source, costs, None)?;
            predicted.timeline = computation_of(&schedule, &predicted.timeline);
            Ok(predicted)
        })?;
        predicted.map(PyTimeline::from).map_err(|error: PredictionError| error.raised(py))
    }
}
