//! Prints plans for a cluster as JSON. Keys that other plans have mean the same here.

use std::borrow::Cow;
use std::collections::BTreeMap;

use pipewright_cluster::accuracy::Accuracy;
use pipewright_cluster::search::{ClusterPlan, Goal, MachineRanks, Upgrade};
use pipewright_schedule::held_bytes::{ByteCount, HeldBytes};
use pipewright_shapes::model::Model;
use serde::Serialize;

use crate::clusters::failures::{ExpectedFaults, PlanGoodput};
use crate::clusters::plan::Planned;
use crate::plans::plan_json::{PlanKeys, Report};

/// The keys that only plans for clusters have.
#[derive(Serialize)]
struct ClusterKeys<'a> {
    model: ModelJson<'a>,
    cluster: ClusterJson,
    estimated: usize,
    /// How well predictions of the first plan's kind were judged.
    accuracy: &'a Accuracy,
    /// Why the first plan is not the fastest one.
    #[serde(skip_serializing_if = "Option::is_none")]
    preferred: Option<&'a str>,
    memory_limit_bytes: u64,
    /// The failures of the GPUs, if their rate is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    faults: Option<&'a ExpectedFaults>,
    upgrades: Vec<UpgradeJson<'a>>,
    /// The parts of the prediction that are measured.
    measured: &'a [String],
}

#[derive(Serialize)]
struct ModelJson<'a> {
    name: &'a str,
    parameters: u128,
    /// The parameters of the blocks that predict further tokens. They are not in `parameters`.
    predictor_parameters: u128,
    active_parameters: u128,
    trained_parameters: u128,
}

#[derive(Serialize)]
struct ClusterJson {
    /// The names of several kinds are joined by ` + `.
    name: String,
    gpus: u32,
    /// Left out with several kinds of machines; `machines` of a plan has them.
    #[serde(skip_serializing_if = "Option::is_none")]
    gpus_per_node: Option<u32>,
    precision: &'static str,
    global_batch: u32,
    seq_len: u32,
}

/// A plan.
#[derive(Serialize)]
pub(super) struct PlanJson<'a> {
    #[serde(flatten)]
    keys: PlanKeys<'a>,
    tensor_parallel: u32,
    context_parallel: u32,
    expert_parallel: u32,
    /// The ranks that divide each expert, if the model has experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    expert_tensor_parallel: Option<u32>,
    sequence_parallel: bool,
    recompute: &'static str,
    sharding: &'static str,
    /// The replicas that divide these tensors, if further replicas have copies.
    #[serde(skip_serializing_if = "Option::is_none")]
    shards: Option<u32>,
    /// Whether tokens travel to experts and back while another microbatch is computed, if the model has experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    expert_overlap: Option<bool>,
    tokens_per_s_per_gpu: f64,
    model_tflops_per_gpu: f64,
    mfu: f64,
    /// The numbers of `peak_bytes` under the name that plans for clusters add, next to `memory_parts`.
    memory_bytes: Vec<u64>,
    /// The parts of these bytes.
    memory_parts: Vec<BTreeMap<&'static str, u64>>,
    /// The kinds of machines, in the order of their ranks, if there are several.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    machines: &'a [MachineRanks],
    gap: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    goodput: Option<PlanGoodput>,
    /// Seconds of the busiest rank by what they are spent on. Their sum is the step.
    costs: BTreeMap<&'static str, f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    goal: Option<Goal>,
}

#[derive(Serialize)]
struct UpgradeJson<'a> {
    change: &'static str,
    speedup: Option<f64>,
    plan: Option<PlanJson<'a>>,
    /// The reason why no plan exists.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
}

/// Returns the plans as JSON.
pub(crate) fn json(planned: &Planned) -> String {
    let Planned { request, found, .. } = planned;
    let model = &request.model;
    let plans = found.plans.iter().map(|plan| {
        let goodput = planned.faults.as_ref().map(|faults| faults.goodput(plan));
        PlanJson { goodput, ..plan_json(plan, model) }
    });
    let more = ClusterKeys {
        model: ModelJson {
            name: &model.name,
            parameters: model.own_parameters(),
            predictor_parameters: model.parameters() - model.own_parameters(),
            active_parameters: model.active_parameters(),
            trained_parameters: model.trained_parameters(),
        },
        cluster: ClusterJson {
            name: request
                .kinds()
                .iter()
                .map(|(machine, _)| machine.name.as_str())
                .collect::<Vec<_>>()
                .join(" + "),
            gpus: request.gpus,
            gpus_per_node: request.further.is_empty().then_some(request.machine.gpus_per_node),
            precision: request.precision.name(),
            global_batch: request.batch,
            seq_len: request.sequence,
        },
        estimated: found.estimated,
        accuracy: &found.accuracy,
        preferred: found.preferred.as_deref(),
        memory_limit_bytes: found.memory_limit as u64,
        faults: planned.faults.as_ref(),
        upgrades: planned.upgrades.iter().map(|upgrade| upgrade_json(upgrade, model)).collect(),
        measured: &planned.measured,
    };
    let report = Report {
        plans: plans.collect(),
        lower_bound_s: found.lower_bound_s,
        gap: found.plans.first().map_or(0.0, |best| best.gap),
        search_s: planned.seconds,
        simulated: found.simulated as u64,
        assumed: &planned.assumed,
        emit: planned.emitted.as_ref().map(|emitted| emitted.json(plan_json(&emitted.plan, model))),
        more,
    };
    report.text()
}

pub(super) fn plan_json<'a>(plan: &'a ClusterPlan, model: &Model) -> PlanJson<'a> {
    let (layout, prediction) = (&plan.layout, &plan.prediction);
    let memory: Vec<u64> = prediction.memory.iter().map(|rank| rank.total() as u64).collect();
    PlanJson {
        keys: PlanKeys {
            schedule: layout.schedule_name(),
            ranks: layout.pipeline,
            stages_per_rank: layout.chunks,
            microbatches: layout.microbatches(),
            microbatch_size: layout.microbatch,
            boundaries: Cow::Owned(prediction.boundaries()),
            data_parallel: layout.data(),
            batch_shares: Cow::Borrowed(&[]),
            predicted_step_s: prediction.seconds,
            bubble_fraction: plan.shares.bubble,
            peak_bytes: Cow::Owned(memory.clone()),
        },
        tensor_parallel: layout.tensor,
        context_parallel: layout.context,
        expert_parallel: layout.expert,
        expert_tensor_parallel: model.has_experts().then_some(layout.expert_tensor),
        sequence_parallel: layout.sequence_parallel,
        recompute: layout.recompute.name(),
        sharding: layout.sharding.name(),
        shards: layout.shards.filter(|_| layout.shard_groups() > 1),
        expert_overlap: model.has_experts().then_some(layout.overlaps_experts(model)),
        tokens_per_s_per_gpu: prediction.tokens_per_gpu,
        model_tflops_per_gpu: prediction.operations_per_gpu / 1e12,
        mfu: plan.mfu,
        memory_bytes: memory,
        memory_parts: prediction.memory.iter().map(parts).collect(),
        machines: if plan.machines.len() > 1 { &plan.machines } else { &[] },
        gap: plan.gap,
        goodput: None,
        // A sum with 0 is never -0.
        costs: plan.shares.named().map(|(name, share)| (name, share * prediction.seconds + 0.0)).into(),
        goal: plan.goal,
    }
}

/// Returns the parts of a rank's memory in bytes.
fn parts(memory: &HeldBytes<f64>) -> BTreeMap<&'static str, u64> {
    memory.named().map(|(name, bytes)| (name, bytes.whole())).into()
}

fn upgrade_json<'a>(upgrade: &'a Upgrade, model: &Model) -> UpgradeJson<'a> {
    let gain = upgrade.gain.as_ref();
    UpgradeJson {
        change: upgrade.change.name(),
        speedup: gain.ok().map(|gain| gain.speedup),
        plan: gain.ok().map(|gain| plan_json(&gain.plan, model)),
        reason: gain.err().map(|error| error.reason.as_str()),
    }
}
