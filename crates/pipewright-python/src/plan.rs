//! The class `Plan`, and the function that searches plans.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pipewright_schedule::LowerConfig;
use pipewright_schedule::lower::ProgramSource;
use pipewright_schedule::plan::{
    Plan, PlanChoice, PlanError, PlanReport, PlanRequest, plan as search, predict,
};
use pipewright_schedule::profile::Profile;
use pipewright_system::schedule_memory::check_plan;
use pyo3::prelude::*;

use crate::arguments::{bytes, optional, whole, whole_list};
use crate::errors::{Raised, exception, value_error};
use crate::interrupt::interruptible;
use crate::prediction::of_prediction;
use crate::profile::profile_of;
use crate::program::PyProgram;
use crate::schedule::PySchedule;
use crate::timeline::PyTimeline;

/// The number of microbatches for each rank, if no number of microbatches is given.
const MICROBATCHES_PER_RANK: u32 = 4;

/// How to cut a model into stages, and in which order each rank computes, with its prediction.
///
/// `pipewright_pp.plan` makes it. Its figures have the names of `pipewright plan --format json`.
#[pyclass(frozen, module = "pipewright_pp", name = "Plan")]
#[derive(Debug)]
pub(crate) struct PyPlan {
    search: Arc<Searched>,
    /// The position among the plans of the search.
    index: usize,
}

/// A search that has found at least one plan.
#[derive(Debug)]
struct Searched {
    profile: Arc<Profile>,
    report: PlanReport,
    search_s: f64,
}

/// Searches the fastest plan for a model, like `pipewright plan --profile`.
///
/// Args:
///     profile: The costs of the layers, as `Profile`, or the path or the text of one.
///     ranks: The number of ranks, over all replicas.
///     microbatches: The number of microbatches of a step, over all replicas; by default, four for each rank.
///     memory: The memory of a rank, in bytes or as `80GiB`; by default, as in the profile, or any amount.
///     data_parallel: The number of replicas; by default, it is searched.
///     tensor_parallel: The number of tensor-parallel ranks of each stage; by default, it is searched if the
///         profile has nodes.
///     head_parts: The numbers of parts into which the plan may cut the head along the vocabulary.
///     time_limit: The longest search in seconds.
///
/// Returns:
///     The fastest plan; `Plan.plans` has the best plan of each other schedule.
///
/// Raises:
///     PlanError: If no plan meets the request, or none fits into the memory.
///     ProfileError: If the profile has problems.
#[pyfunction]
#[pyo3(signature = (
    profile, *, ranks, microbatches=None, memory=None, data_parallel=None, tensor_parallel=None, head_parts=None,
    time_limit=20.0
))]
#[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
pub(crate) fn plan(
    py: Python<'_>,
    profile: &Bound<'_, PyAny>,
    ranks: &Bound<'_, PyAny>,
    microbatches: Option<&Bound<'_, PyAny>>,
    memory: Option<&Bound<'_, PyAny>>,
    data_parallel: Option<&Bound<'_, PyAny>>,
    tensor_parallel: Option<&Bound<'_, PyAny>>,
    head_parts: Option<&Bound<'_, PyAny>>,
    time_limit: f64,
) -> PyResult<PyPlan> {
    let limit = Duration::try_from_secs_f64(time_limit);
    let limit =
        limit.map_err(|_| value_error(format!("time_limit is {time_limit}; use a number of seconds")))?;
    let profile = profile_of(profile)?;
    let ranks: u32 = whole("ranks", ranks)?;
    let memory = memory.map(|memory| bytes("memory", memory)).transpose()?;
    let microbatches = optional("microbatches", microbatches)?;
    let request = PlanRequest {
        ranks,
        microbatches: microbatches.unwrap_or_else(|| ranks.saturating_mul(MICROBATCHES_PER_RANK)),
        microbatch_rows: profile.rows,
        memory: memory.or(profile.memory_of_rank(ranks)),
        data_parallel: optional("data_parallel", data_parallel)?,
        tensor_parallel: optional("tensor_parallel", tensor_parallel)?,
        head_parts: head_parts.map(|parts| whole_list("head_parts", parts)).transpose()?.unwrap_or_default(),
        // PyTorch's runtime recomputes whole stages.
        partial_recompute: false,
        ..PlanRequest::default()
    };
    check_plan(&request).map_err(|error| error.raised(py))?;
    let searched = interruptible(py, move |interrupted| {
        let start = Instant::now();
        let mut keep_going = || start.elapsed() < limit && !interrupted.is_set();
        let report = search(&profile, &request, &mut keep_going)?;
        Ok(Searched { profile, report, search_s: start.elapsed().as_secs_f64() })
    })?;
    let searched = searched.map_err(|error: PlanError| error.raised(py))?;
    Ok(PyPlan { search: Arc::new(searched), index: 0 })
}

impl Raised for PlanError {
    fn raised(&self, py: Python<'_>) -> PyErr {
        let message = self.to_string();
        exception(py, "PlanError", &message, |fields| match self {
            Self::DoesNotFit { shortage, .. } => {
                fields.set_item("rank", shortage.rank.get())?;
                fields.set_item("needed", shortage.needed)?;
                fields.set_item("memory", shortage.memory)
            }
            _ => Ok(()),
        })
    }
}

impl PyPlan {
    fn plan(&self) -> &Plan {
        &self.search.report.plans[self.index]
    }

    fn choice(&self) -> PlanChoice {
        let plan = self.plan();
        PlanChoice {
            head_parts: Some(plan.head_parts),
            boundaries: plan.boundaries.clone(),
            recompute: plan.recompute.clone(),
            mesh: plan.mesh,
            batch_shares: plan.batch_shares.clone(),
            microbatch_rows: plan.microbatch_rows,
            ..PlanChoice::default()
        }
    }
}

#[pymethods]
impl PyPlan {
    /// The name of the plan: of its schedule, or for a searched order one of its own.
    #[getter]
    fn name(&self) -> String {
        self.plan().title()
    }

    /// The order in which each rank of a replica computes.
    #[getter]
    fn schedule(&self) -> PySchedule {
        let plan = self.plan();
        PySchedule::made(&plan.title(), plan.schedule.clone(), None)
    }

    /// The cut: the first layer of each stage except the first.
    #[getter]
    fn boundaries(&self) -> Vec<usize> {
        self.plan().boundaries.clone()
    }

    /// The number of ranks of a replica, without tensor-parallel ones.
    #[getter]
    fn ranks(&self) -> u32 {
        self.plan().schedule.ranks()
    }

    /// For each rank of the plan, the rank of the profile that it is, if the profile has unlike ranks (`[[rank]]` or
    /// `[[pair]]`); otherwise nothing. A plan may leave out ranks that only slow the others.
    #[getter]
    fn machines(&self) -> Vec<u32> {
        self.plan().machines.iter().map(|machine| machine.get()).collect()
    }

    /// The share of each replica in the rows of a step, if replicas are unlike; otherwise nothing.
    #[getter]
    fn batch_shares(&self) -> Vec<u32> {
        self.plan().batch_shares.clone()
    }

    /// The number of microbatches of a step, over all replicas.
    #[getter]
    fn microbatches(&self) -> u32 {
        self.plan().microbatches()
    }

    /// The number of rows of a microbatch.
    #[getter]
    fn microbatch_size(&self) -> u32 {
        self.plan().microbatch_rows
    }

    /// The number of replicas.
    #[getter]
    fn data_parallel(&self) -> u32 {
        self.plan().mesh.data
    }

    /// The number of tensor-parallel ranks of each stage.
    #[getter]
    fn tensor_parallel(&self) -> u32 {
        self.plan().mesh.tensor
    }

    /// The number of parts into which the head is cut along the vocabulary, each a layer.
    #[getter]
    fn head_parts(&self) -> u32 {
        self.plan().head_parts
    }

    /// The stages that compute their forward again in their backward.
    #[getter]
    fn recompute(&self) -> Vec<usize> {
        let stages = self.plan().recompute.iter().enumerate();
        stages.filter(|(_, choice)| choice.is_some()).map(|(stage, _)| stage).collect()
    }

    /// The predicted time of a step in seconds, with the optimizer.
    #[getter]
    fn predicted_step_s(&self) -> f64 {
        self.plan().step_s
    }

    /// The mean share of the step without the optimizer in which a rank does not compute.
    #[getter]
    fn bubble_fraction(&self) -> f64 {
        self.plan().bubble_fraction
    }

    /// The peak bytes of each rank of a replica.
    #[getter]
    fn peak_bytes(&self) -> Vec<u64> {
        self.plan().peak_bytes.clone()
    }

    /// A time in seconds that no plan of the search space is below.
    #[getter]
    fn lower_bound_s(&self) -> f64 {
        self.search.report.lower_bound_s
    }

    /// How much longer the best plan of the search takes than the lower bound, as a share of the bound.
    #[getter]
    fn gap(&self) -> f64 {
        self.search.report.gap()
    }

    /// The time of the search in seconds.
    #[getter]
    fn search_s(&self) -> f64 {
        self.search.search_s
    }

    /// Whether the time limit ended the search before its work was done.
    #[getter]
    fn stopped(&self) -> bool {
        self.search.report.stopped
    }

    /// The best plan of each schedule, the fastest first.
    #[getter]
    fn plans(&self) -> Vec<Self> {
        let plan = |index| Self { search: Arc::clone(&self.search), index };
        (0..self.search.report.plans.len()).map(plan).collect()
    }

    /// Returns the program that each replica runs.
    fn program(&self, py: Python<'_>) -> PyResult<PyProgram> {
        let (name, plan) = (self.name(), self.plan());
        let lowering = self.choice().lowering(&self.search.profile);
        let source = ProgramSource::Schedule(plan.schedule.clone());
        let program = interruptible(py, move |_| source.program(&LowerConfig::from(lowering)))?;
        let program = program.map_err(|error| error.raised(py))?;
        Ok(PyProgram::made(&name, program.into_program()))
    }

    /// Predicts a step of the plan at the costs of the profile. Its makespan is `predicted_step_s`.
    fn simulate(&self, py: Python<'_>) -> PyResult<PyTimeline> {
        let (name, choice) = (self.name(), self.choice());
        let profile = self.plan().used_ranks_of(&self.search.profile).into_owned();
        let schedule = self.plan().schedule.clone();
        let predicted =
            interruptible(py, move |_| of_prediction(name, predict(&profile, &schedule, &choice)?))?;
        predicted.map(PyTimeline::from).map_err(|error| error.raised(py))
    }

    fn _repr_svg_(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.simulate(py)?.shown(py)
    }

    fn __copy__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __deepcopy__(slf: Py<Self>, _memo: &Bound<'_, PyAny>) -> Py<Self> {
        slf
    }

    fn __repr__(&self) -> String {
        let Plan { step_s, boundaries, .. } = self.plan();
        let gap = self.gap() * 100.0;
        format!(
            "<Plan {}: {step_s:.6} s per step, boundaries {boundaries:?}; the best is within {gap:.1}% of the bound>",
            self.name()
        )
    }
}
