//! Judges configurations of other systems on a cluster.

use std::path::PathBuf;
use std::sync::Arc;

use pipewright_cluster::implementation::Precision;
use pipewright_cluster::judge::{ChangedOption, Configuration, GivenRun, Judgement, RunContext, judge};
use pipewright_cluster::search::Request;
use pipewright_schedule::emit::ReadError;
use pipewright_schedule::error_text::with_causes;
use pipewright_system::bounded_file::{SMALL_TEXT, read_text};
use pyo3::prelude::*;

use crate::arguments::{bytes, optional, whole};
use crate::cluster_input::{machine_of, model_of, refused};
use crate::cluster_plan::{PyClusterPlan, one_of};
use crate::errors::os_error;
use crate::interrupt::interruptible;

/// The verdict about a configuration of another system.
///
/// `pipewright_pp.cluster.check` makes it.
#[pyclass(frozen, module = "pipewright_pp.cluster", name = "Judgement")]
#[derive(Debug)]
pub(crate) struct PyJudgement {
    run: GivenRun,
    request: Arc<Request>,
    judgement: Judgement,
}

/// Predicts what a configuration of another system does on a cluster, and searches for a better layout that the same system
/// runs, like `pipewright plan --cluster --check`.
///
/// Args:
///     config, machine: As for `predict`.
///     file: The path of a script of Megatron, a recipe of Megatron-Bridge or NeMo in YAML, a TOML file or flags of
///         torchtitan, or a JSON file of DeepSpeed.
///     gpus: All GPUs.
///     batch, sequence, precision: What the file does not say: the rows of a step, the tokens of a row, and the precision
///         of products with parameters (`bf16`, `fp8`, `mxfp8`, `nvfp4` or `f32`).
///     memory: The most bytes of a rank, or a text such as `80GiB`; by default the machine's without a reserve.
///
/// Raises:
///     ClusterError: If the model, the machine or the file has a mistake, or the file's layout is not of this model or not
///         for so many GPUs.
///     OSError: If a file cannot be read.
#[pyfunction]
#[pyo3(signature = (config, machine, file, *, gpus, batch=None, sequence=None, precision=None, memory=None))]
#[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
pub(crate) fn check_cluster(
    py: Python<'_>,
    config: &Bound<'_, PyAny>,
    machine: &Bound<'_, PyAny>,
    file: PathBuf,
    gpus: &Bound<'_, PyAny>,
    batch: Option<&Bound<'_, PyAny>>,
    sequence: Option<&Bound<'_, PyAny>>,
    precision: Option<&str>,
    memory: Option<&Bound<'_, PyAny>>,
) -> PyResult<PyJudgement> {
    let (model, machine) = (model_of(config)?, machine_of(machine)?);
    let (gpus, batch, sequence) =
        (whole("gpus", gpus)?, optional("batch", batch)?, optional("sequence", sequence)?);
    let precision = precision.map(|name| one_of("precision", name, Precision::NAMES)).transpose()?;
    let memory = memory.map(|memory| bytes("memory", memory)).transpose()?;
    let read = |path: &PathBuf| {
        let file = path.clone();
        let text = interruptible(py, move |_| read_text(&file, SMALL_TEXT))?;
        text.map_err(|error| os_error(py, path, &error))
    };
    let wrong = |error: &(dyn std::error::Error + 'static)| {
        refused(py, vec![format!("{}: {}", file.display(), with_causes(error))])
    };
    let configuration = Configuration::parse(&file.to_string_lossy(), &read(&file)?);
    let configuration = configuration.map_err(|error: ReadError| wrong(&error))?;
    let table = configuration.table_path(&file).map(|path| read(&path)).transpose()?;
    let place = RunContext { model: &model, gpus, sequence, batch, precision };
    let run = configuration.run(&place, table.as_deref()).map_err(|error| wrong(&error))?;
    let mut request = run.request(machine, gpus).map_err(|error| wrong(&error))?;
    request.memory = memory.map(|bytes| bytes as f64);
    let judged = interruptible(py, move |_| {
        let judgement = judge(&request, &run)?;
        Ok(PyJudgement { run, request: Arc::new(request), judgement })
    })?;
    judged.map_err(|error: pipewright_cluster::predict::PredictError| wrong(&error))
}

#[pymethods]
impl PyJudgement {
    /// The system of the file: `torchtitan`, `megatron` or `deepspeed`.
    #[getter]
    fn system(&self) -> &'static str {
        self.run.system.name()
    }

    /// Whether each rank has enough memory.
    #[getter]
    fn fits(&self) -> bool {
        self.judgement.fits()
    }

    /// The bytes that the largest rank lacks.
    #[getter]
    fn missing_bytes(&self) -> u64 {
        (self.judgement.plan.prediction.peak_memory() - self.judgement.memory_limit).max(0.0) as u64
    }

    /// The layout of the file, with its prediction.
    #[getter]
    fn plan(&self) -> PyClusterPlan {
        PyClusterPlan::made(&self.request, self.judgement.plan.clone())
    }

    /// The fastest plan of the search that the same system runs; `None` if there is none.
    #[getter]
    fn best(&self) -> Option<PyClusterPlan> {
        let best = self.judgement.best.as_ref().ok()?;
        Some(PyClusterPlan::made(&self.request, best.clone()))
    }

    /// The reason if there is no best plan, and `None` if there is one.
    #[getter]
    fn no_best(&self) -> Option<String> {
        self.judgement.best.as_ref().err().map(ToString::to_string)
    }

    /// By how much the best plan is faster, as a share of its step: 0.1 is 10% more tokens per second.
    #[getter]
    fn gain(&self) -> Option<f64> {
        self.judgement.gain()
    }

    /// Whether the best plan is better: it fits although the file does not, or it is faster by more than the error of
    /// predictions of this kind.
    #[getter]
    fn is_beaten(&self) -> bool {
        self.judgement.is_beaten()
    }

    /// How well predictions of this kind were judged, as a sentence.
    #[getter]
    fn accuracy(&self) -> String {
        self.judgement.accuracy.to_string()
    }

    /// The options by which the best plan differs: each with its value in the file and in the plan.
    #[getter]
    fn changes(&self) -> Vec<(&'static str, &str, &str)> {
        let changes = self.judgement.changes.iter();
        changes.map(|ChangedOption { option, from, to }| (*option, from.as_str(), to.as_str())).collect()
    }

    /// Sentences about what the prediction does not count, or assumes.
    #[getter]
    fn notes(&self) -> Vec<String> {
        self.run.notes.clone()
    }

    /// The options that the prediction does not use, as they are written.
    #[getter]
    fn unused(&self) -> Vec<String> {
        self.run.unused.clone()
    }

    fn __copy__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __deepcopy__(slf: Py<Self>, _memo: &Bound<'_, PyAny>) -> Py<Self> {
        slf
    }

    fn __repr__(&self) -> String {
        let fits = if self.fits() { "fits" } else { "does not fit" };
        let seconds = self.judgement.plan.prediction.seconds;
        let better = match (self.is_beaten(), self.judgement.best.as_ref()) {
            (true, Ok(best)) => format!("; a better plan takes {:.4} s", best.prediction.seconds),
            _ => String::new(),
        };
        format!("<Judgement of a file of {}: {seconds:.4} s per step, {fits}{better}>", self.system())
    }
}
