//! The verdict about a layout: whether it fits, and what is better.

use pipewright_schedule::plan::System;
use serde::Serialize;

use crate::implementation::{Implementation, KernelFusion};
use crate::judge::given_run::GivenRun;
use crate::layout::Cut;
use crate::pipeline::Programs;
use crate::predict::{PredictError, predict};
use crate::search::{ClusterPlan, MOST_COMPUTATIONS, Request, SearchError, lower_bound, search_from};
use crate::size_names::{CHUNKS, CONTEXT, EXPERT, EXPERT_TENSOR, MICROBATCH, Names, PIPELINE, Size, TENSOR};

/// The prediction of a run, and the best plan that its system runs.
#[derive(Debug, Clone, PartialEq)]
pub struct Judgement {
    /// The run's layout with its prediction.
    pub plan: ClusterPlan,
    /// The most bytes that a rank may need.
    pub memory_limit: f64,
    /// The fastest plan that the search found for the same model, GPUs and batch, or why it found none.
    pub best: Result<ClusterPlan, SearchError>,
    /// The options by which the best plan differs.
    pub changes: Vec<ChangedOption>,
}

/// An option with its value in a file and in a better plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ChangedOption {
    /// The option of the system, or the part of the layout if the system has no option for it.
    pub option: &'static str,
    /// The value in the file.
    pub from: String,
    /// The value in the better plan.
    pub to: String,
}

impl Judgement {
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
pub fn judge(request: &Request, run: &GivenRun) -> Result<Judgement, PredictError> {
    let programs = &mut Programs::up_to(MOST_COMPUTATIONS);
    let prediction = predict(&request.setting(&run.layout), programs)?;
    let plan = ClusterPlan::new(request, lower_bound(request), run.layout.clone(), prediction);
    // Compilation costs nothing in a step.
    let implementation = Implementation { kernels: KernelFusion::Fused, ..request.implementation };
    let search = Request { system: Some(run.system), plans: 1, implementation, ..request.clone() };
    let best = search_from(&search, &run.layout).map(|mut found| found.plans.swap_remove(0));
    let changes = best.as_ref().map_or_else(|_| Vec::new(), |best| changes(run, &plan, best));
    Ok(Judgement { plan, memory_limit: request.memory_limit(), best, changes })
}

/// The sizes of a layout that a better plan may change.
const SIZES: [Size; 7] = [TENSOR, PIPELINE, CHUNKS, CONTEXT, EXPERT, EXPERT_TENSOR, MICROBATCH];

/// A part of a layout that is not a size.
struct Part {
    /// The names in Megatron, torchtitan and DeepSpeed.
    names: [&'static str; 3],
    value: fn(&ClusterPlan) -> String,
}

/// The parts that a better plan may change.
const PARTS: [Part; 6] = [
    Part {
        names: ["--sequence-parallel", "--parallelism.enable_sequence_parallel", "sequence parallel"],
        value: |plan| switch(plan.layout.sequence_parallel),
    },
    Part {
        names: ["--recompute-granularity", "activation-checkpoint", "activation checkpoints"],
        value: |plan| plan.layout.recompute.name().to_owned(),
    },
    Part {
        names: ["sharding", "sharding", "zero_optimization.stage"],
        value: |plan| plan.layout.sharding.name().to_owned(),
    },
    Part {
        names: ["schedule", "--parallelism.pipeline_parallel_schedule", "schedule"],
        value: |plan| plan.layout.schedule_name().to_owned(),
    },
    Part {
        names: ["fused kernels", "--compile.enable", "fused kernels"],
        value: |plan| switch(plan.layout.implementation.kernels == KernelFusion::Fused),
    },
    Part { names: BLOCKS, value: |plan| joined(&plan.prediction.blocks) },
];

/// The names of the blocks of each stage.
const BLOCKS: [&str; 3] = ["blocks of each stage", "blocks of each stage", "pipeline.parts"];

fn switch(is_on: bool) -> String {
    if is_on { "on" } else { "off" }.to_owned()
}

fn joined(numbers: &[usize]) -> String {
    numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

/// Returns the options by which a plan differs from another one. An even cut has no option.
fn changes(run: &GivenRun, plan: &ClusterPlan, best: &ClusterPlan) -> Vec<ChangedOption> {
    let system = match run.system {
        System::Megatron => 0,
        System::Torchtitan => 1,
        System::Deepspeed => 2,
    };
    let has_cut = matches!(plan.layout.cut, Cut::Given { .. });
    let has_experts = run.model.has_experts();
    let sizes = SIZES.into_iter().filter(|&size| has_experts || ![EXPERT, EXPERT_TENSOR].contains(&size));
    let size_of = |plan: &ClusterPlan, size: Size| {
        let sizes = plan.layout.sizes();
        let value = sizes.iter().find(|(other, _)| *other == size).map_or(1, |(_, value)| *value);
        value.to_string()
    };
    let sizes =
        sizes.map(|size| (Names::Of(run.system).name(size), size_of(plan, size), size_of(best, size)));
    let parts = PARTS.iter().filter(|part| has_cut || part.names != BLOCKS);
    let parts = parts.map(|part| (part.names[system], (part.value)(plan), (part.value)(best)));
    let differs = |(_, from, to): &(&str, String, String)| from != to;
    let change = |(option, from, to)| ChangedOption { option, from, to };
    sizes.chain(parts).filter(differs).map(change).collect()
}
