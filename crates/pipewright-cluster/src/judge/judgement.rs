//! The verdict about a layout: whether it fits, and what is better.

use serde::Serialize;

use crate::accuracy::Accuracy;
use crate::implementation::{Implementation, KernelFusion};
use crate::judge::given_run::GivenRun;
use crate::layout::Cut;
use crate::pipeline::Programs;
use crate::predict::{PredictError, predict};
use crate::search::{ClusterPlan, MOST_COMPUTATIONS, Request, SearchError, lower_bound, search_from};
use crate::size_names::{
    BySystem, CHUNKS, CONTEXT, EXPERT, EXPERT_TENSOR, MICROBATCH, Names, PIPELINE, Size, TENSOR, of_system,
};

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
    /// How well predictions of the run's kind were judged.
    pub accuracy: Accuracy,
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

    /// Returns whether the best plan fits although the run does not, or is faster by more than the mean error of such
    /// predictions.
    pub fn is_beaten(&self) -> bool {
        let is_faster = || self.gain().is_some_and(|gain| gain > self.accuracy.mean);
        !self.changes.is_empty() && (!self.fits() || is_faster())
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
    let accuracy = Accuracy::of(&request.setting(&plan.layout));
    Ok(Judgement { plan, memory_limit: request.memory_limit(), best, changes, accuracy })
}

/// The sizes of a layout that a better plan may change.
const SIZES: [Size; 7] = [TENSOR, PIPELINE, CHUNKS, CONTEXT, EXPERT, EXPERT_TENSOR, MICROBATCH];

/// A part of a layout that is not a size.
struct Part {
    names: BySystem<&'static str>,
    value: fn(&ClusterPlan) -> String,
}

/// The parts that a better plan may change.
const PARTS: [Part; 8] = [
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
        names: ["--num-distributed-optimizer-instances", "groups of shards", "groups of shards"],
        value: |plan| plan.layout.shard_groups().to_string(),
    },
    Part {
        names: ["--overlap-moe-expert-parallel-comm", "overlap of experts", "overlap of experts"],
        value: |plan| switch(plan.layout.implementation.overlaps_experts && plan.layout.expert > 1),
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
const BLOCKS: BySystem<&str> = ["blocks of each stage", "blocks of each stage", "pipeline.parts"];

fn switch(is_on: bool) -> String {
    if is_on { "on" } else { "off" }.to_owned()
}

fn joined(numbers: &[usize]) -> String {
    numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

/// Returns the options by which a plan differs from another one. An even cut has no option.
fn changes(run: &GivenRun, plan: &ClusterPlan, best: &ClusterPlan) -> Vec<ChangedOption> {
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
    let parts = parts.map(|part| (of_system(part.names, run.system), (part.value)(plan), (part.value)(best)));
    let differs = |(_, from, to): &(&str, String, String)| from != to;
    let change = |(option, from, to)| ChangedOption { option, from, to };
    sizes.chain(parts).filter(differs).map(change).collect()
}
