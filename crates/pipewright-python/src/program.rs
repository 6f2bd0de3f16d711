//! The class `Program`: rows of actions, at any level, which can be lowered, proved and simulated.

use std::sync::Arc;

use pipewright_schedule::csv::{print_program, print_rows};
use pipewright_schedule::footprint::Use;
use pipewright_schedule::lower::ProgramSource;
use pipewright_schedule::picture::title;
use pipewright_schedule::simulate::{LifetimeOf, all_lifetimes};
use pipewright_schedule::{Costs, Level, Program, Slices};
use pipewright_system::schedule_memory::check_program;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arguments::{named, optional, whole_list};
use crate::errors::{Raised, value_error};
use crate::interrupt::interruptible;
use crate::lowering::{Unlowered, check_choice, passes_of, passes_to};
use crate::prediction::At;
use crate::proof::{TransportOptions, prove};
use crate::rows::{Cells, Sizes, Text, cells_of, texts};
use crate::timeline::{MOST_SHOWN, PyTimeline};

/// Rows of actions, one for each rank: a schedule that was read, or a program with communication.
///
/// Args:
///     rows: A list for each rank, with the text of each action, such as `0F0` or `1RECV_F3`. `None` is a
///         cell without an action.
///     stage_to_rank: The rank of each stage, if it does not follow from the rows.
///     microbatches: The number of microbatches, if the rows do not show all of them.
///     slices: The number of slices of each microbatch, if the actions number slices.
///
/// Raises:
///     ParseError: If a cell is not an action, or the rows do not fit together.
///
/// Example:
///     >>> import pipewright_pp as pw
///     >>> pw.Program([["0F0", "0B0"], ["1F0", "1B0"]]).lower().csv()
///     '0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1I0,1SEND_B0,1W0\n'
#[pyclass(frozen, module = "pipewright_pp", name = "Program")]
#[derive(Debug)]
pub(crate) struct PyProgram {
    /// The name in pictures.
    name: String,
    program: Arc<Program>,
    /// The rows with their empty cells, if they were read.
    cells: Option<Arc<Cells>>,
}

impl PyProgram {
    /// Makes the object of a program that was made.
    pub(crate) fn made(name: &str, program: Program) -> Self {
        Self { name: name.to_owned(), program: Arc::new(program), cells: None }
    }

    fn read(py: Python<'_>, name: String, cells: Cells, sizes: Sizes) -> PyResult<Self> {
        let program = Arc::new(sizes.program(py, &cells)?);
        Ok(Self { name, program, cells: Some(Arc::new(cells)) })
    }

    /// Returns the name in pictures, and the program.
    pub(crate) fn named(&self) -> (String, Program) {
        (self.name.clone(), self.program.as_ref().clone())
    }

    fn cells(&self) -> Cells {
        match &self.cells {
            Some(cells) => cells.as_ref().clone(),
            None => self.program.rows().iter().map(|row| row.iter().copied().map(Some).collect()).collect(),
        }
    }

    fn unlowered(&self) -> Unlowered {
        let (placement, slices) = (self.program.placement().clone(), self.program.slices());
        Unlowered { cells: self.cells(), placement, microbatches: self.program.microbatches(), slices }
    }

    /// Returns the level that is named, or the program's own.
    fn level_of(&self, py: Python<'_>, level: Option<&str>) -> PyResult<Level> {
        level.map_or_else(|| Ok(self.program.level()), |level| named(py, level))
    }
}

/// Reads the sizes that the rows may not show.
fn sizes_of(
    stage_to_rank: Option<&Bound<'_, PyAny>>,
    microbatches: Option<&Bound<'_, PyAny>>,
    slices: Option<&Bound<'_, PyAny>>,
) -> PyResult<Sizes> {
    let ranks = stage_to_rank.map(|ranks| whole_list("stage_to_rank", ranks)).transpose()?;
    let microbatches = optional("microbatches", microbatches)?;
    Ok(Sizes { stage_to_rank: ranks, microbatches, slices: slices_of(slices)?.unwrap_or_default() })
}

/// Reads a number of slices.
pub(crate) fn slices_of(slices: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Slices>> {
    let Some(number) = optional("slices", slices)? else { return Ok(None) };
    Slices::new(number).map(Some).ok_or_else(|| value_error("slices is 0; use a whole number, at least 1"))
}

/// Reads the schedule of a file or a text: PyTorch's format, with or without communication.
///
/// Args:
///     source: The path of a file, or the text of a schedule, which has a line end.
///     stage_to_rank: The rank of each stage, if it does not follow from the rows.
///     microbatches: The number of microbatches, if the rows do not show all of them.
///     slices: The number of slices of each microbatch, if the actions number slices.
///
/// Raises:
///     ParseError: If it is not a schedule, with the line and the column of the mistake.
///     OSError: If the file cannot be read.
#[pyfunction]
#[pyo3(signature = (source, *, stage_to_rank=None, microbatches=None, slices=None))]
pub(crate) fn read_csv(
    py: Python<'_>,
    source: &Bound<'_, PyAny>,
    stage_to_rank: Option<&Bound<'_, PyAny>>,
    microbatches: Option<&Bound<'_, PyAny>>,
    slices: Option<&Bound<'_, PyAny>>,
) -> PyResult<PyProgram> {
    let sizes = sizes_of(stage_to_rank, microbatches, slices)?;
    let text = Text::of(source)?;
    let name = text.name();
    PyProgram::read(py, name, text.cells(py)?, sizes)
}

/// Makes the program that `pickle` has written.
#[pyfunction]
pub(crate) fn _restore_program(
    py: Python<'_>,
    name: String,
    rows: &Bound<'_, PyAny>,
    stage_to_rank: Vec<u32>,
    microbatches: u32,
    slices: &Bound<'_, PyAny>,
) -> PyResult<PyProgram> {
    let slices = slices_of(Some(slices))?.unwrap_or_default();
    let sizes = Sizes { stage_to_rank: Some(stage_to_rank), microbatches: Some(microbatches), slices };
    PyProgram::read(py, name, cells_of(rows)?, sizes)
}

#[pymethods]
impl PyProgram {
    #[new]
    #[pyo3(signature = (rows, *, stage_to_rank=None, microbatches=None, slices=None))]
    fn new(
        py: Python<'_>,
        rows: &Bound<'_, PyAny>,
        stage_to_rank: Option<&Bound<'_, PyAny>>,
        microbatches: Option<&Bound<'_, PyAny>>,
        slices: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let sizes = sizes_of(stage_to_rank, microbatches, slices)?;
        Self::read(py, "rows".to_owned(), cells_of(rows)?, sizes)
    }

    /// The rows as lists of texts, one list for each rank. `None` is a cell without an action.
    #[getter]
    fn rows(&self) -> Vec<Vec<Option<String>>> {
        texts(&self.cells())
    }

    /// The number of ranks.
    #[getter]
    fn ranks(&self) -> u32 {
        self.program.ranks()
    }

    /// The number of stages.
    #[getter]
    fn stages(&self) -> u32 {
        self.program.placement().stages()
    }

    /// The number of microbatches of a step.
    #[getter]
    fn microbatches(&self) -> u32 {
        self.program.microbatches() / self.program.slices().get()
    }

    /// The number of slices of each microbatch.
    #[getter]
    fn slices(&self) -> u32 {
        self.program.slices().get()
    }

    /// The rank of each stage.
    #[getter]
    fn stage_to_rank(&self) -> Vec<u32> {
        let placement = self.program.placement();
        placement.all_stages().map(|stage| placement.rank_of(stage).get()).collect()
    }

    /// How much communication the program has: `compute`, `comms` or `full`.
    #[getter]
    fn level(&self) -> String {
        self.program.level().to_string()
    }

    /// Returns one line for each rank, in PyTorch's format.
    fn csv(&self, py: Python<'_>) -> PyResult<String> {
        let (program, cells) = (Arc::clone(&self.program), self.cells.clone());
        interruptible(py, move |_| match cells {
            Some(cells) => print_rows(cells.iter().map(|row| row.iter().copied())),
            None => print_program(&program),
        })
    }

    /// Runs passes, like `pipewright lower`. The result is not proved sound; `validate` proves it.
    ///
    /// Args:
    ///     passes: Names of passes in their order, such as `["unshard=3", "send-recv"]`. Without them, a
    ///         program with messages does not change, and another one becomes the program that Pipewright
    ///         trains with.
    ///     level: Instead of passes, a level to lower to, as PyTorch does: `comms` or `full`.
    ///
    /// Raises:
    ///     LowerError: If a pass is unknown, has no effect, or fails.
    ///     ValidationError: If the rows are unsound.
    #[pyo3(signature = (passes=None, *, level=None))]
    fn lower(
        &self,
        py: Python<'_>,
        passes: Option<&Bound<'_, PyAny>>,
        level: Option<&str>,
    ) -> PyResult<Self> {
        check_choice(passes.is_some(), level.is_some())?;
        let program = match passes {
            Some(passes) => {
                let passes = passes_of(py, passes)?;
                check_program(&self.program, Use::Lower).map_err(|error| error.raised(py))?;
                self.unlowered().lowered(py, passes)?
            }
            None if level.is_some() && self.program.communicates() => {
                return Err(value_error(
                    "the rows have messages already, and level is for rows without; leave it out",
                ));
            }
            None => {
                let (config, program) = (passes_to(py, level, &Costs::default())?, Arc::clone(&self.program));
                check_program(&program, Use::Lower).map_err(|error| error.raised(py))?;
                let lowered = interruptible(py, move |_| {
                    ProgramSource::Rows(program.as_ref().clone()).lowered(&config)
                })?;
                lowered.map_err(|error| error.raised(py))?.into_program()
            }
        };
        Ok(Self::made(&self.name, program))
    }

    /// Proves that the program is sound, like `pipewright validate`.
    ///
    /// Without a transport, both ends of each message block; a send that has a wait blocks at its wait only.
    ///
    /// Args:
    ///     transport: Also judge the program on a communicator: `buffered` (tagged and buffered messages),
    ///         `edge` (one queue per directed pair of ranks), `pair` (one queue per pair), `rank` (one queue
    ///         per rank), or `all`.
    ///     level: The level to prove: `compute`, `comms` or `full`; by default, the program's own.
    ///     eager: The largest message that is sent without waiting for its receive, in bytes or as `64KiB`.
    ///         By default, every send waits. Messages without a size count as smaller.
    ///     message_bytes: The size of the messages between stage 0 and 1, 1 and 2, and so on; the last one
    ///         counts for the others.
    ///     grouped: Whether sends and receives that follow each other start together.
    ///
    /// Returns:
    ///     The verdict of each transport, all of them `sound`; empty without a transport.
    ///
    /// Raises:
    ///     ValidationError: If the program is unsound, with every violation as `violations`, or if it is not
    ///         sound on a transport, with the `verdicts`.
    #[pyo3(signature = (transport=None, *, level=None, eager=None, message_bytes=None, grouped=false))]
    pub(crate) fn validate<'py>(
        &self,
        py: Python<'py>,
        transport: Option<&str>,
        level: Option<&str>,
        eager: Option<&Bound<'_, PyAny>>,
        message_bytes: Option<&Bound<'_, PyAny>>,
        grouped: bool,
    ) -> PyResult<Bound<'py, PyDict>> {
        let level = self.level_of(py, level)?;
        let program = Arc::clone(&self.program);
        let words = PyDict::new(py);
        let options = TransportOptions { eager, message_bytes, grouped };
        let Some(transport) = transport else {
            options.refuse()?;
            prove(py, program, level)?;
            return Ok(words);
        };
        for (streams, verdict) in options.judge(py, transport, program, level)? {
            words.set_item(streams.name(), verdict.word())?;
        }
        Ok(words)
    }

    /// Returns when activations are alive, and the buffers that they need if these are allocated once.
    ///
    /// Args:
    ///     by: `stage`: the activations of each stage and microbatch; or `microbatch`: those of a microbatch on
    ///         all stages of the rank together.
    ///
    /// Returns:
    ///     For each rank, a dictionary with the number of buffers, `slots`, and the list `live`: `stage` (not by
    ///     microbatch), `microbatch`, `first` and `last`, the positions of the first and the last action of the
    ///     row that uses the activations, and their buffer, `slot`.
    ///
    /// Example:
    ///     >>> import pipewright_pp as pw
    ///     >>> pw.Program([["0F0", "0F1", "0B0", "0B1"]]).lifetimes()[0]["slots"]
    ///     2
    #[pyo3(signature = (*, by="stage"))]
    fn lifetimes<'py>(&self, py: Python<'py>, by: &str) -> PyResult<Bound<'py, PyAny>> {
        let of = match by {
            "stage" => LifetimeOf::StageAndMicrobatch,
            "microbatch" => LifetimeOf::Microbatch,
            other => {
                let problem = format!("by is {other:?}; use \"stage\" or \"microbatch\"");
                return Err(value_error(problem));
            }
        };
        let program = Arc::clone(&self.program);
        let lifetimes = interruptible(py, move |_| all_lifetimes(&program, of))?;
        let json = serde_json::to_string(&lifetimes).map_err(value_error)?;
        py.import("json")?.call_method1("loads", (json,))
    }

    /// Predicts when each rank runs each action, like `pipewright simulate`. The program is proved sound
    /// before, and lowered as by `lower()` if it has no messages.
    ///
    /// Args:
    ///     costs: The costs of actions, as `Costs` or as a text such as `F=1,I=1,W=1,hop=0.1`.
    ///     profile: Instead of costs, the costs of a model's layers, as `Profile`, or the path or the text of
    ///         one.
    ///     boundaries: With a profile, the first layer of each stage except the first; by default, the best
    ///         cut.
    ///     recompute: The stages that compute their forward again in their backward: `none`, `stage`,
    ///         `block`, or a list such as `0,2:layers=3,3:keep=1`: the first layers of stage 2, and all but one
    ///         microbatch in flight of stage 3; or `parts`, or a list with parts of layers such as
    ///         `0:parts=norms`. Layers and parts need a profile.
    ///     logical: Count every action, including messages, as one tick.
    ///     transport: The communicator on which messages wait for each other: `buffered`, `edge`, `pair` or
    ///         `rank`, as in `validate`.
    ///     eager, message_bytes, grouped: As in `validate`.
    ///
    /// Raises:
    ///     ValidationError: If the program is unsound, or not sound on the transport.
    ///     CostsError: If the costs do not fit the stages.
    ///     ProfileError: If the profile has problems.
    ///     PlanError: If the boundaries or the schedule do not fit the profile.
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
        let at = At::of(py, self.stages(), costs, profile, boundaries, recompute, logical, communicator)?;
        check_program(&self.program, Use::Simulate).map_err(|error| error.raised(py))?;
        let (name, program) = (self.name.clone(), Arc::clone(&self.program));
        at.timeline(py, name, ProgramSource::Rows(program.as_ref().clone()))
    }

    fn _repr_svg_(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let actions: usize = self.program.rows().iter().map(Vec::len).sum();
        if actions > MOST_SHOWN {
            return Ok(None);
        }
        match self.simulate(py, None, None, None, "none", false, None, None, None, false) {
            Ok(timeline) => timeline.shown(py),
            // A notebook shows the text of an unsound program.
            Err(error) if error.is_instance_of::<PyValueError>(py) => Ok(None),
            Err(error) => Err(error),
        }
    }

    #[expect(clippy::type_complexity, reason = "the function and the arguments of `pickle`")]
    fn __reduce__<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<(Bound<'py, PyAny>, (&str, Vec<Vec<Option<String>>>, Vec<u32>, u32, u32))> {
        let restore = py.import("pipewright_pp._native")?.getattr("_restore_program")?;
        let parts = (
            self.name.as_str(),
            self.rows(),
            self.stage_to_rank(),
            self.program.microbatches(),
            self.slices(),
        );
        Ok((restore, parts))
    }

    fn __copy__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __deepcopy__(slf: Py<Self>, _memo: &Bound<'_, PyAny>) -> Py<Self> {
        slf
    }

    fn __repr__(&self) -> String {
        format!("<Program {} at level {}>", title(&self.name, &self.program), self.program.level())
    }

    fn __eq__(&self, other: &Self) -> bool {
        self.program == other.program
    }
}
