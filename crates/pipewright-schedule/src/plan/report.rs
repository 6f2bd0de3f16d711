//! The output of a plan.

use std::borrow::Cow;
use std::num::NonZeroU32;
use std::ops::Range;

use serde::Serialize;
use thiserror::Error;

use crate::csv::print_schedule;
use crate::ids::{Rank, StageIndex};
use crate::mesh::{Mesh, MeshOrder, rows_of_shares};
use crate::plan::system::{Offer, Refusal, System};
use crate::profile::Profile;
use crate::recompute::StageRecompute;
use crate::schedule::Schedule;

/// The name of orders that no named schedule has.
pub const SEARCHED: &str = "searched";

/// The best plans, and how much better a plan could be.
#[derive(Debug, Clone, PartialEq)]
pub struct PlanReport {
    /// The best plan of each schedule, the fastest first.
    pub plans: Vec<Plan>,
    /// A time that no plan of the search space is below, in seconds.
    pub lower_bound_s: f64,
    /// The result of each schedule, by its best plan.
    pub outcomes: Vec<Outcome>,
    /// The number of plans that were simulated.
    pub simulated: u64,
    /// Whether the search was stopped before its work was done.
    pub stopped: bool,
    /// For each rank of the profile in order, how the best plan uses it; empty if all ranks are equal.
    pub machines: Vec<MachineUse>,
}

/// How a plan uses one of several unlike ranks. Times are in seconds.
#[derive(Debug, Clone, PartialEq)]
pub struct MachineUse {
    /// The rank of the profile.
    pub machine: Rank,
    /// The rank of the plan that it is; `None` if the plan leaves it out.
    pub rank: Option<Rank>,
    /// Its stages, each with its layers.
    pub stages: Vec<(StageIndex, Range<usize>)>,
    /// The time of its computations in a step.
    pub busy_s: f64,
    /// The rest of the step, with the optimizer.
    pub idle_s: f64,
    /// An estimate of the step if it were twice as fast: the search changes the best plan a little.
    pub step_if_twice_as_fast_s: f64,
    /// An estimate of the step without it; `None` if no such plan was found.
    pub step_without_s: Option<f64>,
}

/// A choice of everything that can be chosen, and its prediction.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// The name of the schedule, or [`SEARCHED`].
    pub name: &'static str,
    /// The settings of the schedule besides its size.
    pub settings: PlanSettings,
    /// The computations of each rank of a replica.
    pub schedule: Schedule,
    /// The number of parts into which the head is cut along the vocabulary. Each is a layer.
    pub head_parts: u32,
    /// The first layer of each stage except the first.
    pub boundaries: Vec<usize>,
    /// For each stage, what it recomputes of its forwards; `None` for nothing.
    pub recompute: Vec<Option<StageRecompute>>,
    /// The mesh, with the ranks of the schedule.
    pub mesh: Mesh,
    /// The rank of the profile that each rank of the plan is, if the profile has unlike ranks; otherwise empty. The
    /// ranks of a replica are consecutive. Those of one pipeline are in ascending order. A plan may leave ranks out that
    /// only slow the others.
    pub machines: Vec<Rank>,
    /// The share of each replica in the rows of a step, if replicas are unlike; empty if the shares are equal.
    pub batch_shares: Vec<u32>,
    /// The assumed times of collectives in the step.
    pub collectives: Collectives,
    /// The number of rows of a microbatch; the mean over all replicas if their shares of the batch differ.
    pub microbatch_rows: u32,
    /// The time of a step: the schedule, the sum of gradients over replicas, and the optimizer.
    pub step_s: f64,
    /// The mean share of the step without the optimizer in which a rank does not compute.
    pub bubble_fraction: f64,
    /// The peak bytes of each rank of a replica.
    pub peak_bytes: Vec<u64>,
    /// The reads of a frozen base that stays in its files; `None` if it is in memory.
    pub stream: Option<PlanStream>,
}

/// The reads of a frozen base that stays in its files.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct PlanStream {
    /// The stages of a rank that are in memory at once.
    pub window: NonZeroU32,
    /// The bytes that all ranks of a replica read in a step.
    pub step_bytes: u64,
    /// The time in which the rank with the most reads them.
    pub read_s: f64,
    /// The bytes per second that each rank reads.
    pub bytes_per_s: f64,
}

/// The times that collectives of a step are assumed to take, in seconds, each for the rank with the most.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Collectives {
    /// Sums over tensor-parallel ranks. The rank computes nothing meanwhile.
    #[serde(rename = "tensor_parallel_s")]
    pub tensor_s: f64,
    /// Sums of gradients over replicas, which may take place during computations, and the rank's own work for
    /// them.
    #[serde(rename = "data_parallel_s")]
    pub replicas_s: f64,
}

/// The settings of a schedule besides its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct PlanSettings {
    /// [`ScheduleSpec::group`](crate::ScheduleSpec::group_size).
    #[serde(rename = "group", skip_serializing_if = "Option::is_none")]
    pub group_size: Option<u32>,
    /// [`ScheduleSpec::wide_warmup`](crate::ScheduleSpec::wide_warmup).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub wide_warmup: bool,
    /// [`ScheduleSpec::memory_limit`](crate::ScheduleSpec::memory_limit).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_limit: Option<u32>,
    /// [`ScheduleSpec::overlap`](crate::ScheduleSpec::overlap).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub overlap: bool,
}

/// The result of one schedule.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// The name of the schedule.
    pub name: &'static str,
    /// The result.
    pub result: OutcomeKind,
    /// The mesh of its best plan; `None` if it has no plan.
    pub mesh: Option<PlanMesh>,
    /// The time of its best plan on the mesh of the best plan, in seconds; `None` if the search found no plan
    /// there.
    pub on_best_mesh_s: Option<f64>,
}

/// The division of all ranks, of the batch and of the head in a plan. Times of schedules can be compared if
/// it is equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanMesh {
    /// The mesh. The order of the ranks does not count.
    pub mesh: Mesh,
    /// The number of microbatches of a step, over all replicas.
    pub microbatches: u32,
    /// The number of rows of a microbatch.
    pub microbatch_rows: u32,
    /// The number of parts into which the head is cut.
    pub head_parts: u32,
}

/// The result of trying a schedule.
#[derive(Debug, Clone, PartialEq)]
pub enum OutcomeKind {
    /// Its best plan takes so long, in seconds.
    Takes(f64),
    /// Its smallest plan does not fit.
    TooLarge(Shortage),
    /// It does not exist at this size.
    Refused(String),
}

/// The memory that a plan lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shortage {
    /// The rank that lacks the most.
    pub rank: Rank,
    /// The bytes that it needs.
    pub needed: u64,
    /// The part of them that parameters, gradients and optimizer state take.
    pub fixed: u64,
    /// The bytes that it has.
    pub memory: u64,
}

/// The errors of a plan.
#[derive(Clone, PartialEq, Error)]
pub enum PlanError {
    /// The profile or the request has values that cannot be, as a sentence with advice.
    #[error("{0}")]
    Input(String),
    /// No plan fits into the memory.
    #[error(
        "no plan {}fits: rank {} of the smallest one ({plan}) needs {} bytes, {} of them for parameters, gradients and \
         optimizer state, and has {}, which is {} too few; use more ranks{} more memory",
        if *.stopped { "that was tried before the search was stopped " } else { "" },
        .shortage.rank, .shortage.needed, .shortage.fixed, .shortage.memory, .shortage.needed - .shortage.memory,
        if *.stopped { ", more time or" } else { " or" }
    )]
    DoesNotFit {
        /// The plan that lacks the least.
        plan: String,
        /// The memory that it lacks.
        shortage: Shortage,
        /// Whether the search was stopped before it tried all that it would.
        stopped: bool,
    },
    /// The search was stopped before it had a plan that fits into the memory.
    #[error(
        "the search was stopped before it had a plan that fits; give it more time, more ranks or more memory"
    )]
    Stopped,
}

crate::error_text::message_as_debug!(PlanError);

/// Returns a number that differs for most texts (FNV-1a, folded to 16 bits).
fn mark(text: &str) -> u16 {
    let add = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    let hash = text.bytes().fold(0x811c_9dc5, add);
    (hash ^ (hash >> 16)) as u16
}

impl PlanReport {
    /// Returns how much longer the best plan takes than the lower bound, as a share of the lower bound.
    pub fn gap(&self) -> f64 {
        match self.plans.first() {
            Some(best) if self.lower_bound_s > 0.0 => (best.step_s / self.lower_bound_s - 1.0).max(0.0),
            _ => 0.0,
        }
    }
}

impl Plan {
    /// Returns the division of the ranks, the batch and the head.
    pub fn division(&self) -> PlanMesh {
        PlanMesh {
            mesh: Mesh { order: MeshOrder::default(), ..self.mesh },
            microbatches: self.microbatches(),
            microbatch_rows: self.microbatch_rows,
            head_parts: self.head_parts,
        }
    }

    /// Returns `profile`, for which the plan is, with only the ranks that the plan uses. With it, a step of the plan
    /// is predicted.
    pub fn used_ranks_of<'p>(&self, profile: &'p Profile) -> Cow<'p, Profile> {
        match self.machines.as_slice() {
            [] => Cow::Borrowed(profile),
            machines => Cow::Owned(profile.of_ranks(machines)),
        }
    }

    /// Returns the rows of a microbatch of each replica.
    pub fn rows_of_replicas(&self) -> Vec<u32> {
        let equal = || vec![self.microbatch_rows; self.mesh.data as usize];
        if self.batch_shares.is_empty() {
            return equal();
        }
        let rows = u64::from(self.microbatch_rows) * u64::from(self.mesh.data);
        rows_of_shares(rows, &self.batch_shares).unwrap_or_else(equal)
    }

    /// Returns why `system` cannot run the plan, which is for the costs of `profile`; `None` if it can.
    pub fn refusal(&self, system: System, profile: &Profile) -> Option<Refusal> {
        let is_in_rows = self.mesh.order == MeshOrder::Pipeline && self.schedule.ranks() > 1;
        system.refusal(&Offer {
            name: self.name,
            group_size: self.settings.group_size,
            placement: self.schedule.placement(),
            microbatches: self.schedule.microbatches(),
            recompute: &self.recompute,
            head_parts: self.head_parts,
            has_rows_in_nodes: is_in_rows && self.mesh.data > 1 && profile.node.is_some(),
        })
    }

    /// Returns a name by which people can tell plans apart: the schedule's name; for a searched order its
    /// ranks, stages on a rank, and a mark of its computations, such as `searched-4x2-1f3a`.
    pub fn title(&self) -> String {
        if self.name != SEARCHED {
            return self.name.to_owned();
        }
        let (ranks, stages) = (self.schedule.ranks(), self.schedule.placement().stages());
        format!("{SEARCHED}-{ranks}x{}-{:04x}", stages / ranks.max(1), mark(&print_schedule(&self.schedule)))
    }

    /// Returns whether a stage recomputes.
    pub fn recomputes(&self) -> bool {
        self.recompute.iter().any(Option::is_some)
    }

    /// Returns the number of microbatches of a step, over all replicas.
    pub fn microbatches(&self) -> u32 {
        self.schedule.microbatches() * self.mesh.data
    }
}
