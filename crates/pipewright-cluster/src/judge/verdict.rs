//! The verdict about a layout: whether it fits, and what is better.

use pipewright_schedule::plan::System;
use serde::Serialize;

use crate::implementation::{Implementation, Kernels};
use crate::judge::given_run::GivenRun;
use crate::layout::{Cut, Layout};
use crate::pipeline::Programs;
use crate::predict::{PredictError, predict};
use crate::search::{ClusterPlan, MOST_COMPUTATIONS, Request, SearchError, lower_bound, search_from};

/// The prediction of a run, and the best plan that its system runs.
#[derive(Debug, Clone, PartialEq)]
pub struct Verdict {
    /// The run's layout with its prediction.
    pub plan: ClusterPlan,
    /// The most bytes that a rank may need.
    pub memory_limit: f64,
    /// The fastest plan that the search found for the same model, GPUs and batch, or why it found none.
    pub best: Result<ClusterPlan, SearchError>,
    /// The options by which the best plan differs.
    pub changes: Vec<Change>,
}

/// An option with its value in a file and in a better plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Change {
    /// The option of the system, or the part of the layout if the system has no option for it.
    pub option: &'static str,
    /// The value in the file.
    pub from: String,
    /// The value in the better plan.
    pub to: String,
}

impl Verdict {
    /// Returns whether each rank has enough memory.
    pub fn fits(&self) -> bool {
        self.plan.prediction.peak_memory() <= self.memory_limit
    }

    /// Returns whether the best plan is faster, or fits although the run does not.
    pub fn is_beaten(&self) -> bool {
        !self.changes.is_empty() && (!self.fits() || self.gain().is_some_and(|gain| gain > 0.0))
    }

    /// Returns by how much the best plan is faster, as a share of its step: 0.1 is 10% more tokens per second. `None`
    /// without a best plan.
    pub fn gain(&self) -> Option<f64> {
        let best = self.best.as_ref().ok()?;
        Some(self.plan.prediction.seconds / best.prediction.seconds - 1.0)
    }
}

/// Predicts a run, and searches for the best plan that its system runs. The request is for the model, the GPUs and the
/// batch of the run.
///
/// # Errors
/// When the layout does not fit the model, or its schedule does not exist in its size.
pub fn judge(request: &Request, run: &GivenRun) -> Result<Verdict, PredictError> {
    let programs = &mut Programs::up_to(MOST_COMPUTATIONS);
    let prediction = predict(&request.setting(&run.layout), programs)?;
    let plan = ClusterPlan::new(request, lower_bound(request), run.layout.clone(), prediction);
    // Compilation costs nothing in a step.
    let implementation = Implementation { kernels: Kernels::Fused, ..request.implementation };
    let search = Request { system: Some(run.system), plans: 1, implementation, ..request.clone() };
    let best = search_from(&search, &run.layout).map(|mut found| found.plans.swap_remove(0));
    let mut changes = best.as_ref().map_or_else(|_| Vec::new(), |best| changes(run.system, &plan, best));
    changes.retain(|change| run.model.has_experts() || !change.option.contains("expert"));
    Ok(Verdict { plan, memory_limit: request.memory_limit(), best, changes })
}

/// The names of the parts of a layout in a system.
fn names(system: System) -> [&'static str; 13] {
    match system {
        System::Megatron => [
            "--tensor-model-parallel-size",
            "--pipeline-model-parallel-size",
            "--num-virtual-stages-per-pipeline-rank",
            "--context-parallel-size",
            "--expert-model-parallel-size",
            "--expert-tensor-parallel-size",
            "--micro-batch-size",
            "--sequence-parallel",
            "--recompute-granularity",
            "sharding",
            "schedule",
            "fused kernels",
            "blocks of each stage",
        ],
        System::Torchtitan => [
            "--parallelism.tensor_parallel_degree",
            "--parallelism.pipeline_parallel_degree",
            "stages per rank",
            "--parallelism.context_parallel_degree",
            "--parallelism.expert_parallel_degree",
            "ranks of each expert",
            "rows of a microbatch",
            "--parallelism.enable_sequence_parallel",
            "activation-checkpoint",
            "sharding",
            "--parallelism.pipeline_parallel_schedule",
            "--compile.enable",
            "blocks of each stage",
        ],
        System::Deepspeed => [
            "tensor parallel",
            "pipeline.stages",
            "stages per rank",
            "context parallel",
            "expert parallel",
            "ranks of each expert",
            "train_micro_batch_size_per_gpu",
            "sequence parallel",
            "activation checkpoints",
            "zero_optimization.stage",
            "schedule",
            "fused kernels",
            "pipeline.parts",
        ],
    }
}

/// Returns the options by which a plan differs from another one.
fn changes(system: System, plan: &ClusterPlan, best: &ClusterPlan) -> Vec<Change> {
    let values = |plan: &ClusterPlan| {
        let layout: &Layout = &plan.layout;
        let blocks: Vec<String> = plan.prediction.blocks.iter().map(ToString::to_string).collect();
        let sizes = [
            layout.tensor,
            layout.pipeline,
            layout.chunks,
            layout.context,
            layout.expert,
            layout.expert_tensor,
            layout.microbatch,
        ];
        let words = [
            if layout.sequence_parallel { "on" } else { "off" },
            layout.recompute.name(),
            layout.sharding.name(),
            layout.schedule_name(),
            if layout.implementation.kernels == Kernels::Fused { "on" } else { "off" },
        ];
        let sizes = sizes.iter().map(ToString::to_string);
        sizes.chain(words.map(str::to_owned)).chain([blocks.join(",")]).collect::<Vec<String>>()
    };
    let pairs = names(system).into_iter().zip(values(plan).into_iter().zip(values(best)));
    let has_cut = matches!(plan.layout.cut, Cut::Given { .. });
    let differs = |(option, (from, to)): (&'static str, (String, String))| {
        (from != to).then_some(Change { option, from, to })
    };
    pairs.filter_map(differs).filter(|change| has_cut || !change.option.contains("blocks")).collect()
}
