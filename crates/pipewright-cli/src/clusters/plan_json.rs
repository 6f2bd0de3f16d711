//! Prints plans for a cluster as JSON. Keys that other plans have mean the same here.

use std::collections::BTreeMap;

use pipewright_cluster::search::{ClusterPlan, Upgrade};
use serde::Serialize;

use crate::clusters::plan::Planned;
use crate::clusters::words;

#[derive(Serialize)]
struct Report<'a> {
    model: ModelJson<'a>,
    cluster: ClusterJson<'a>,
    plans: Vec<PlanJson<'a>>,
    lower_bound_s: f64,
    gap: f64,
    search_s: f64,
    estimated: usize,
    simulated: usize,
    memory_limit_bytes: f64,
    upgrades: Vec<UpgradeJson<'a>>,
    /// The parts of the prediction that are measured.
    measured: &'a [String],
    /// The keys of the model's file that change nothing in the prediction.
    ignored: &'a [String],
    assumed: &'a [String],
}

#[derive(Serialize)]
struct ModelJson<'a> {
    name: &'a str,
    parameters: f64,
    /// The parameters of the blocks that predict further tokens. They are not in `parameters`.
    predictor_parameters: f64,
    active_parameters: f64,
}

#[derive(Serialize)]
struct ClusterJson<'a> {
    name: &'a str,
    gpus: u32,
    gpus_per_node: u32,
    precision: &'static str,
    global_batch: u32,
    seq_len: u32,
}

/// A plan.
#[derive(Serialize)]
struct PlanJson<'a> {
    schedule: &'a str,
    ranks: u32,
    stages_per_rank: u32,
    microbatches: u32,
    microbatch_size: u32,
    /// The first block of each stage but the first.
    boundaries: Vec<usize>,
    data_parallel: u32,
    tensor_parallel: u32,
    context_parallel: u32,
    expert_parallel: u32,
    sequence_parallel: bool,
    recompute: &'static str,
    sharding: &'static str,
    predicted_step_s: f64,
    tokens_per_s_per_gpu: f64,
    model_tflops_per_gpu: f64,
    mfu: f64,
    bubble_fraction: f64,
    /// Bytes of each rank of a pipeline.
    memory_bytes: Vec<u64>,
    /// The same, as in other plans.
    peak_bytes: Vec<u64>,
    gap: f64,
    /// Seconds of the busiest rank by what they are spent on. Their sum is the step.
    costs: BTreeMap<&'static str, f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    goal: Option<GoalJson>,
}

#[derive(Serialize)]
struct GoalJson {
    tokens: f64,
    steps: f64,
    days: f64,
    gpu_hours: f64,
    kilowatt_hours: Option<f64>,
}

#[derive(Serialize)]
struct UpgradeJson<'a> {
    change: &'static str,
    speedup: Option<f64>,
    plan: Option<PlanJson<'a>>,
    /// Why there is no plan.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

/// Returns the plans as JSON.
pub(crate) fn json(planned: &Planned) -> String {
    let Planned { request, found, .. } = planned;
    let model = &request.model;
    let report = Report {
        model: ModelJson {
            name: &model.name,
            parameters: (model.parameters() - model.predictor_parameters()) as f64,
            predictor_parameters: model.predictor_parameters() as f64,
            active_parameters: model.active_parameters() as f64,
        },
        cluster: ClusterJson {
            name: &request.machine.name,
            gpus: request.gpus,
            gpus_per_node: request.machine.gpus_per_node,
            precision: words::precision(request.precision),
            global_batch: request.batch,
            seq_len: request.sequence,
        },
        plans: found.plans.iter().map(plan_json).collect(),
        lower_bound_s: found.bound_seconds,
        gap: found.plans.first().map_or(0.0, |best| best.gap),
        search_s: planned.seconds,
        estimated: found.estimated,
        simulated: found.simulated,
        memory_limit_bytes: found.memory_limit,
        upgrades: planned.upgrades.iter().map(upgrade_json).collect(),
        measured: &planned.measured,
        ignored: &planned.ignored,
        assumed: &planned.assumed,
    };
    serde_json::to_string(&report).expect("numbers can be written as JSON") + "\n"
}

fn plan_json(plan: &ClusterPlan) -> PlanJson<'_> {
    let (layout, prediction) = (&plan.layout, &plan.prediction);
    let mut blocks = 0;
    let mut boundaries: Vec<usize> = prediction
        .blocks
        .iter()
        .map(|stage| {
            blocks += stage;
            blocks
        })
        .collect();
    boundaries.pop();
    let memory: Vec<u64> = prediction.memory.iter().map(|rank| rank.total() as u64).collect();
    PlanJson {
        schedule: layout.schedule_name(),
        ranks: layout.pipeline,
        stages_per_rank: layout.chunks,
        microbatches: layout.microbatches(),
        microbatch_size: layout.microbatch,
        boundaries,
        data_parallel: layout.data(),
        tensor_parallel: layout.tensor,
        context_parallel: layout.context,
        expert_parallel: layout.expert,
        sequence_parallel: layout.sequence_parallel,
        recompute: words::recompute(layout.recompute),
        sharding: words::sharding(layout.sharding),
        predicted_step_s: prediction.seconds,
        tokens_per_s_per_gpu: prediction.tokens_per_gpu,
        model_tflops_per_gpu: prediction.operations_per_gpu / 1e12,
        mfu: plan.mfu,
        bubble_fraction: plan.shares.bubble,
        memory_bytes: memory.clone(),
        peak_bytes: memory,
        gap: plan.gap,
        costs: plan.shares.named().map(|(name, share)| (name, share * prediction.seconds)).into(),
        goal: plan.goal.as_ref().map(|goal| GoalJson {
            tokens: goal.tokens,
            steps: goal.steps,
            days: goal.days,
            gpu_hours: goal.gpu_hours,
            kilowatt_hours: goal.kilowatt_hours,
        }),
    }
}

fn upgrade_json(upgrade: &Upgrade) -> UpgradeJson<'_> {
    UpgradeJson {
        change: upgrade.change.name(),
        speedup: upgrade.gain.as_ref().ok().map(|gain| gain.speedup),
        plan: upgrade.gain.as_ref().ok().map(|gain| plan_json(&gain.plan)),
        reason: upgrade.gain.as_ref().err().map(ToString::to_string),
    }
}
