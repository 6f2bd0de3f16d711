//! Plans for clusters: the search, its plans, and the machines that are known by name.

use std::sync::Arc;

use pipewright_cluster::accuracy::Accuracy;
use pipewright_cluster::catalogue::machines;
use pipewright_cluster::cluster_file::to_toml;
use pipewright_cluster::emit::emit;
use pipewright_cluster::implementation::{Implementation, Precision, Stack};
use pipewright_cluster::layout::{Cut, Layout, Scores};
use pipewright_cluster::machine::Machine;
use pipewright_cluster::machine_json::MachineJson;
use pipewright_cluster::published::{RECOMPUTES, SHARDINGS};
use pipewright_cluster::search::{
    ClusterPlan, ClusterReport, Fixed, Request, SearchError, lower_bound, search,
};
use pipewright_document::Reader;
use pipewright_schedule::emit::{Release, StageLetters, print_stage_letters};
use pipewright_schedule::plan::System;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arguments::{bytes, whole};
use crate::cluster::PyPrediction;
use crate::cluster_input::{machine_of, model_of, read_layout, refused};
use crate::errors::value_error;
use crate::html;
use crate::interrupt::interruptible;

/// A layout of a model on a cluster, with its predicted step.
///
/// `pipewright_pp.cluster.plan` makes it.
#[pyclass(frozen, module = "pipewright_pp.cluster", name = "ClusterPlan")]
#[derive(Debug)]
pub(crate) struct PyClusterPlan {
    request: Arc<Request>,
    plan: ClusterPlan,
    lower_bound_s: f64,
    memory_limit: f64,
    accuracy: Accuracy,
}

/// Searches the fastest layouts of a model on a cluster, like `pipewright plan --cluster`.
///
/// Args:
///     config, machine: As for `predict`.
///     gpus: All GPUs.
///     batch: The rows of a step, over all replicas.
///     sequence: The tokens of a row.
///     precision: The precision of products with parameters: `bf16`, `fp8`, `mxfp8`, `nvfp4` or `f32`.
///     layout: The parts that are given, in any form that `predict` takes: `tp`, `pp`, `vp`, `cp`, `ep`, `etp`, `dp`
///         (replicas), `mbs`, `schedule`, `recompute`, `data_parallel` (what replicas shard), `shards` (the replicas that
///         divide it), `expert_overlap` and `sequence_parallel`. The search chooses the others.
///     memory: The most bytes of a rank, or a text such as `80GiB`; by default the machine's without a reserve.
///     stack: The program whose kernels and launches are predicted: `megatron`, `torchtitan`, `automodel`, `olmo-core` or
///         `hai-llm`.
///     system: Only plans that this system runs: `torchtitan`, `megatron` or `deepspeed`.
///     plans: The most plans.
///
/// Returns:
///     The plans, the fastest first. A plan with usual parts may be in front of plans that are faster by less than the
///     error of predictions.
///
/// Raises:
///     ClusterError: If the model, the machine or the layout has a mistake, or no plan fits into the memory.
///     OSError: If a file cannot be read.
#[pyfunction]
#[pyo3(signature = (
    config, machine, *, gpus, batch, sequence, precision="bf16", layout=None, memory=None, stack="megatron", system=None,
    plans=5
))]
#[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
pub(crate) fn plan_cluster(
    py: Python<'_>,
    config: &Bound<'_, PyAny>,
    machine: &Bound<'_, PyAny>,
    gpus: &Bound<'_, PyAny>,
    batch: &Bound<'_, PyAny>,
    sequence: &Bound<'_, PyAny>,
    precision: &str,
    layout: Option<&Bound<'_, PyAny>>,
    memory: Option<&Bound<'_, PyAny>>,
    stack: &str,
    system: Option<&str>,
    plans: usize,
) -> PyResult<Vec<PyClusterPlan>> {
    let (model, machine) = (model_of(config)?, machine_of(machine)?);
    let precision = one_of("precision", precision, Precision::NAMES)?;
    if !machine.has_rate(precision) {
        let sentence = format!("{} has no rate for {}; use bf16", machine.name, precision.name());
        return Err(refused(py, vec![sentence]));
    }
    let stack = one_of("stack", stack, Stack::NAMES)?;
    let systems = System::ALL.map(|system| (system.name(), system));
    let mut request = Request::new(
        model,
        machine,
        whole("gpus", gpus)?,
        whole("batch", batch)?,
        whole("sequence", sequence)?,
        precision,
    );
    request.implementation = Implementation::usual(stack);
    request.fixed = layout.map(|layout| read_layout(layout, fixed)).transpose()?.unwrap_or_default();
    request.memory = memory.map(|memory| bytes("memory", memory)).transpose()?.map(|bytes| bytes as f64);
    request.system = system.map(|system| one_of("system", system, systems)).transpose()?;
    request.plans = plans;
    let searched = interruptible(py, move |_| {
        let report = search(&request)?;
        Ok((Arc::new(request), report))
    })?;
    let (request, report) = searched.map_err(|error: SearchError| refused(py, vec![error.to_string()]))?;
    let ClusterReport { plans, lower_bound_s, memory_limit, accuracy, .. } = report;
    let made = |plan| PyClusterPlan {
        request: Arc::clone(&request),
        plan,
        lower_bound_s,
        memory_limit,
        accuracy: accuracy.clone(),
    };
    Ok(plans.into_iter().map(made).collect())
}

/// Returns the value of a name.
pub(crate) fn one_of<T, const N: usize>(argument: &str, name: &str, values: [(&str, T); N]) -> PyResult<T> {
    let names = values.iter().map(|(known, _)| *known).collect::<Vec<_>>().join(", ");
    let found = values.into_iter().find(|(known, _)| *known == name);
    found
        .map(|(_, value)| value)
        .ok_or_else(|| value_error(format!("{argument} is {name:?}; use one of {names}")))
}

/// Reads the parts of a layout that are given.
fn fixed(keys: &mut Reader<'_>) -> Option<Fixed> {
    let [tensor, pipeline, context, data, expert, chunks, microbatch, expert_tensor, shards] =
        ["tp", "pp", "cp", "dp", "ep", "vp", "mbs", "etp", "shards"].map(|key| keys.count(key, 1..=u32::MAX));
    Some(Fixed {
        tensor,
        pipeline,
        context,
        data,
        expert,
        chunks,
        microbatch,
        expert_tensor,
        schedule: keys.text("schedule"),
        recompute: keys.word("recompute", &RECOMPUTES),
        sharding: keys.word("data_parallel", &SHARDINGS),
        sequence_parallel: keys.flag("sequence_parallel"),
        cut: None,
        shards,
        overlaps_experts: keys.flag("expert_overlap"),
    })
}

impl PyClusterPlan {
    /// Makes the object of a plan of `request`.
    pub(crate) fn made(request: &Arc<Request>, plan: ClusterPlan) -> Self {
        Self {
            lower_bound_s: lower_bound(request),
            memory_limit: request.memory_limit(),
            accuracy: Accuracy::of(&request.setting(&plan.layout)),
            request: Arc::clone(request),
            plan,
        }
    }

    /// Returns the stages in Megatron's letters, unless the usual cut gives the same.
    fn letters(&self) -> Option<String> {
        let plan = &self.plan;
        if plan.layout.cut == Cut::Even {
            return None;
        }
        let (blocks, predictors) = (&plan.prediction.blocks, self.request.model.predictors);
        let last = blocks.len().saturating_sub(1);
        let stage = |(index, &count): (usize, &usize)| StageLetters {
            embedding: index == 0,
            blocks: count.try_into().unwrap_or(u32::MAX),
            predictors: if index == last { predictors } else { 0 },
            head: index == last,
        };
        Some(print_stage_letters(&blocks.iter().enumerate().map(stage).collect::<Vec<_>>()))
    }
}

#[pymethods]
impl PyClusterPlan {
    /// The layout, with the keys that `predict` takes. The blocks of each stage are `prediction.blocks`.
    #[getter]
    fn layout<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let Layout { gpus, tensor, pipeline, chunks, context, expert, expert_tensor, .. } = self.plan.layout;
        let layout = &self.plan.layout;
        let dict = PyDict::new(py);
        let numbers = [
            ("gpus", gpus),
            ("tp", tensor),
            ("pp", pipeline),
            ("vp", chunks),
            ("cp", context),
            ("ep", expert),
            ("etp", expert_tensor),
            ("mbs", layout.microbatch),
            ("gbs", layout.batch),
            ("seq", layout.sequence),
        ];
        numbers.into_iter().try_for_each(|(key, number)| dict.set_item(key, number))?;
        dict.set_item("precision", layout.precision.name())?;
        dict.set_item("schedule", layout.schedule_name())?;
        dict.set_item("recompute", layout.recompute.name())?;
        dict.set_item("data_parallel", layout.sharding.name())?;
        dict.set_item("sequence_parallel", layout.sequence_parallel)?;
        dict.set_item("attention", if layout.scores == Scores::Fused { "fused" } else { "unfused" })?;
        dict.set_item("stack", layout.implementation.stack.name())?;
        if let Some(letters) = self.letters() {
            dict.set_item("pipeline_layout", letters)?;
        }
        Ok(dict)
    }

    /// The predicted step.
    #[getter]
    fn prediction(&self) -> PyPrediction {
        PyPrediction(self.plan.prediction.clone())
    }

    /// The number of replicas.
    #[getter]
    fn replicas(&self) -> u32 {
        self.plan.layout.data()
    }

    /// The operations of the model per second on each GPU, as a share of the peak of the precision.
    #[getter]
    fn mfu(&self) -> f64 {
        self.plan.mfu
    }

    /// How much longer the step takes than `lower_bound_s`, as a share of the bound.
    #[getter]
    fn gap(&self) -> f64 {
        self.plan.gap
    }

    /// The seconds of a step that no plan of the search can be faster than.
    #[getter]
    fn lower_bound_s(&self) -> f64 {
        self.lower_bound_s
    }

    /// The most bytes that a rank of a plan may need.
    #[getter]
    fn memory_limit_bytes(&self) -> u64 {
        self.memory_limit as u64
    }

    /// The mean error of predictions of plans of the first plan's kind for published runs, as a share.
    #[getter]
    fn mean_error(&self) -> f64 {
        self.accuracy.mean
    }

    /// How well predictions of this kind were judged, as a sentence.
    #[getter]
    fn accuracy(&self) -> String {
        self.accuracy.to_string()
    }

    /// Returns the files with which another system executes the plan, like `pipewright plan --emit`.
    ///
    /// Args:
    ///     system: `torchtitan`, `megatron` or `deepspeed`.
    ///     folder: The folder that will have the files; options of one file name it for others.
    ///     main: Write the options of the main branch. Only torchtitan has others there.
    ///
    /// Returns:
    ///     The text of each file by its name. The first file has the options, with a comment for each part of the plan that
    ///     the system expresses in another way.
    ///
    /// Raises:
    ///     ClusterError: If the system cannot run the plan; `plan(..., system=...)` searches one that it can run.
    #[pyo3(signature = (system, folder=".", *, main=false))]
    fn emit<'py>(
        &self,
        py: Python<'py>,
        system: &str,
        folder: &str,
        main: bool,
    ) -> PyResult<Bound<'py, PyDict>> {
        let system = one_of("system", system, System::ALL.map(|system| (system.name(), system)))?;
        let release = if main { Release::Main } else { Release::Numbered };
        let (request, plan, folder) = (Arc::clone(&self.request), self.plan.clone(), folder.to_owned());
        let emitted = interruptible(py, move |_| emit(system, release, &request, &plan, &folder))?;
        let emission = emitted.map_err(|refusal| {
            refused(py, vec![format!("{} cannot run the plan: {refusal}", system.name())])
        })?;
        let files = PyDict::new(py);
        for file in emission.files {
            files.set_item(file.name, file.text)?;
        }
        Ok(files)
    }

    fn _repr_html_(&self) -> String {
        html::plan(&self.plan, &self.request, self.memory_limit, &self.accuracy)
    }

    fn __copy__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __deepcopy__(slf: Py<Self>, _memo: &Bound<'_, PyAny>) -> Py<Self> {
        slf
    }

    fn __repr__(&self) -> String {
        let ClusterPlan { layout, prediction, mfu, .. } = &self.plan;
        format!(
            "<ClusterPlan tp {} pp {} x {} dp {}: {:.4} s per step, {:.1}% of the peak>",
            layout.tensor,
            layout.pipeline,
            layout.schedule_name(),
            layout.data(),
            prediction.seconds,
            mfu * 100.0
        )
    }
}

/// Returns the machines that have names, like `pipewright clusters --format json`.
///
/// Returns:
///     For each machine, a dictionary with its `name`, its short names (`aliases`), its `figures` under the keys of a
///     cluster file, each with its `value` and `source`, its `node_switch` and `constants` with their sources
///     (`node_switch_source`, `constants_source`), and `toml`, the text of its cluster file.
///
/// Example:
///     >>> from pipewright_pp.cluster import clusters
///     >>> [machine["figures"]["gpus_per_node"]["value"] for machine in clusters() if "h100" in machine["aliases"]]
///     [8.0]
#[pyfunction]
pub(crate) fn clusters(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyDict>>> {
    let json = py.import("json")?;
    let entry = |machine: &Machine| {
        let text = serde_json::to_string(&MachineJson::of(machine)).map_err(value_error)?;
        let entry = json.call_method1("loads", (text,))?.cast_into::<PyDict>()?;
        entry.set_item("toml", to_toml(machine))?;
        Ok(entry)
    };
    machines().iter().map(entry).collect()
}
