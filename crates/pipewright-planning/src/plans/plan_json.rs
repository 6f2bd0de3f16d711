//! Plans as JSON. All plans have the keys of [`PlanKeys`], and all outputs of `plan` have the keys of [`Report`].

use std::borrow::Cow;

use pipewright_schedule::emit::{Limit, ReadPlan};
use pipewright_schedule::plan::{
    Collectives, MachineUse, Plan, PlanReport, PlanSettings, PlanStream, Prediction,
};
use pipewright_schedule::{Rank, Recompute};
use serde::Serialize;

use crate::plans::delayed::DelayedPlans;
use crate::plans::emitted::EmittedJson;
use crate::plans::print::{is_mesh, rank_order, stages_per_rank};

/// The keys that all plans have.
#[derive(Serialize)]
pub(crate) struct PlanKeys<'a> {
    pub(crate) schedule: &'a str,
    pub(crate) ranks: u32,
    pub(crate) stages_per_rank: u32,
    pub(crate) microbatches: u32,
    pub(crate) microbatch_size: u32,
    /// The first layer of each stage but the first. A layer of a plan for a cluster is a block.
    pub(crate) boundaries: Cow<'a, [usize]>,
    pub(crate) data_parallel: u32,
    /// The share of each replica in the rows of a step, if they differ.
    #[serde(skip_serializing_if = "<[u32]>::is_empty")]
    pub(crate) batch_shares: Cow<'a, [u32]>,
    pub(crate) predicted_step_s: f64,
    pub(crate) bubble_fraction: f64,
    /// The bytes of each rank of a pipeline at its peak.
    pub(crate) peak_bytes: Cow<'a, [u64]>,
}

/// The output of `plan --format json`. `P` is a plan, and `M` has the keys that only some searches have.
#[derive(Serialize)]
pub(crate) struct Report<'a, P, M> {
    pub(crate) plans: Vec<P>,
    pub(crate) lower_bound_s: f64,
    pub(crate) gap: f64,
    pub(crate) search_s: f64,
    pub(crate) simulated: u64,
    /// Assumptions, for which there are no measurements.
    pub(crate) assumed: &'a [String],
    /// The files for another system.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) emit: Option<EmittedJson<'a, P>>,
    #[serde(flatten)]
    pub(crate) more: M,
}

impl<P: Serialize, M: Serialize> Report<'_, P, M> {
    pub(crate) fn text(&self) -> String {
        serde_json::to_string(self).expect("numbers can be written as JSON") + "\n"
    }
}

/// The further keys of the output for a profile.
#[derive(Serialize)]
struct ProfileKeys<'a> {
    stopped: bool,
    /// The part of the configuration that the plan cannot keep.
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<&'a str>,
    /// How the best plan uses unlike ranks. Left out if all are equal.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    machines: Vec<MachineJson>,
    /// The plans with delayed weights, if they are allowed.
    #[serde(skip_serializing_if = "Option::is_none")]
    delayed: Option<DelayedPlans>,
}

/// A rank of the profile.
#[derive(Serialize)]
struct MachineJson {
    /// The rank of the plan that it is; null if it is left out.
    rank: Option<u32>,
    stages: Vec<u32>,
    /// The first layer of each stage, and the layer after its last one.
    layers: Vec<[usize; 2]>,
    busy_s: f64,
    idle_s: f64,
    /// Estimates.
    step_if_twice_as_fast_s: f64,
    step_without_s: Option<f64>,
}

impl MachineJson {
    fn of(used: &MachineUse) -> Self {
        Self {
            rank: used.rank.map(Rank::get),
            stages: used.stages.iter().map(|(stage, _)| stage.get()).collect(),
            layers: used.stages.iter().map(|(_, layers)| [layers.start, layers.end]).collect(),
            busy_s: used.busy_s,
            idle_s: used.idle_s,
            step_if_twice_as_fast_s: used.step_if_twice_as_fast_s,
            step_without_s: used.step_without_s,
        }
    }
}

/// A plan for a profile.
#[derive(Serialize)]
pub(crate) struct PlanJson<'a> {
    #[serde(flatten)]
    keys: PlanKeys<'a>,
    /// A name for people; for a searched order one of its own.
    name: String,
    /// Left out for a whole head.
    #[serde(skip_serializing_if = "Option::is_none")]
    head_parts: Option<u32>,
    /// Left out without tensor-parallel ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    tensor_parallel: Option<u32>,
    /// The numbering of the ranks, the fastest changing first, if there are several axes.
    #[serde(skip_serializing_if = "Option::is_none")]
    rank_order: Option<[&'static str; 3]>,
    /// The times of collectives in the step, which are assumed.
    #[serde(skip_serializing_if = "Option::is_none")]
    assumed_collectives: Option<Collectives>,
    recompute: Recompute,
    /// The rank of each stage.
    stage_to_rank: Vec<u32>,
    /// The rank of the profile that each rank is. Left out if all are equal.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    machines: Vec<u32>,
    #[serde(flatten)]
    settings: PlanSettings,
    /// The reads of a base that stays in its files. Left out if it is in memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    stream: Option<PlanStream>,
}

/// A plan of another system that is checked.
#[derive(Serialize)]
pub(crate) struct CheckJson<'a> {
    pub(crate) file: Cow<'a, str>,
    pub(crate) system: &'a str,
    pub(crate) stages: u32,
    pub(crate) tensor_parallel: u32,
    #[serde(flatten)]
    pub(crate) keys: PlanKeys<'a>,
    /// How much longer it takes than the best plan, as a share; null without one.
    pub(crate) longer: Option<f64>,
    pub(crate) limit: &'a Limit,
    pub(crate) best: Option<PlanJson<'a>>,
    pub(crate) best_of_system: Option<PlanJson<'a>>,
    pub(crate) remarks: &'a [String],
}

/// Returns the report as JSON. `emit` is about the files for another system.
pub(crate) fn json<'a>(
    report: &'a PlanReport,
    search_s: f64,
    assumed: &'a [String],
    note: Option<&'a str>,
    (emit, delayed): (Option<EmittedJson<'a, PlanJson<'a>>>, Option<DelayedPlans>),
) -> String {
    let &PlanReport { lower_bound_s, simulated, stopped, .. } = report;
    let plans = report.plans.iter().map(plan_json).collect();
    let machines = report.machines.iter().map(MachineJson::of).collect();
    let more = ProfileKeys { stopped, note, machines, delayed };
    Report { plans, lower_bound_s, gap: report.gap(), search_s, simulated, assumed, emit, more }.text()
}

/// Returns a plan for JSON.
pub(crate) fn plan_json(plan: &Plan) -> PlanJson<'_> {
    let placement = plan.schedule.placement();
    PlanJson {
        keys: PlanKeys {
            schedule: plan.name,
            ranks: plan.schedule.ranks(),
            stages_per_rank: stages_per_rank(placement),
            microbatches: plan.microbatches(),
            microbatch_size: plan.microbatch_rows,
            boundaries: Cow::Borrowed(&plan.boundaries),
            data_parallel: plan.mesh.data,
            batch_shares: Cow::Borrowed(&plan.batch_shares),
            predicted_step_s: plan.step_s,
            bubble_fraction: plan.bubble_fraction,
            peak_bytes: Cow::Borrowed(&plan.peak_bytes),
        },
        name: plan.title(),
        head_parts: Some(plan.head_parts).filter(|&parts| parts > 1),
        tensor_parallel: Some(plan.mesh.tensor).filter(|&ranks| ranks > 1),
        rank_order: is_mesh(plan).then(|| rank_order(plan)),
        assumed_collectives: is_mesh(plan).then_some(plan.collectives),
        recompute: Recompute::of_stages(&plan.recompute),
        stage_to_rank: placement.all_stages().map(|stage| placement.rank_of(stage).get()).collect(),
        machines: plan.machines.iter().map(|machine| machine.get()).collect(),
        settings: plan.settings,
        stream: plan.stream,
    }
}

/// Returns a checked plan for JSON, without the plans to compare it with.
pub(crate) fn check_json<'a>(
    read: &'a ReadPlan,
    prediction: &'a Prediction,
    limit: &'a Limit,
) -> CheckJson<'a> {
    let placement = read.schedule.placement();
    CheckJson {
        file: Cow::Borrowed(""),
        system: read.system.name(),
        stages: placement.stages(),
        tensor_parallel: read.choice.mesh.tensor,
        keys: PlanKeys {
            schedule: &read.schedule_name,
            ranks: read.ranks(),
            stages_per_rank: stages_per_rank(placement),
            microbatches: read.microbatches(),
            microbatch_size: read.choice.microbatch_rows,
            boundaries: Cow::Borrowed(&read.choice.boundaries),
            data_parallel: read.choice.mesh.data,
            batch_shares: Cow::Borrowed(&[]),
            predicted_step_s: prediction.step_s(),
            bubble_fraction: prediction.run.timeline().bubble_fraction(),
            peak_bytes: Cow::Borrowed(&prediction.peak_bytes),
        },
        longer: None,
        limit,
        best: None,
        best_of_system: None,
        remarks: &read.remarks,
    }
}
