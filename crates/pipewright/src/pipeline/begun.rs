//! Training batches that were begun and are not finished ([`Pipeline::begin`](super::Pipeline::begin)).

use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::Receiver;

use super::error::PipelineError;
use super::step_plan::{CheckedBatch, StepAttempt, StepPlan};
use crate::batch::Purpose;
use crate::driver::StepReply;
use crate::executor::{Follow, StepOrigin};
use crate::ids::WorldRank;
use crate::step_gate::Gate;

/// A batch that the ranks have.
pub(super) struct Running {
    pub(super) plan: StepPlan,
    pub(super) origin: StepOrigin,
    pub(super) replies: Receiver<(WorldRank, StepReply)>,
    /// The time of the call that has begun it.
    pub(super) start: Instant,
    pub(super) condition: Condition,
    /// Whether the next batch follows without a drain, which only a pipeline within one process announces; `None` if batches do
    /// not overlap.
    pub(super) follow: Option<Follow>,
    /// The batches of its step up to this one, if a failure of the step is to name the first value that is not finite.
    pub(super) batches: Vec<Arc<CheckedBatch>>,
}

/// When the ranks begin a batch that they have.
pub(super) enum Condition {
    /// When the batch before it has ended.
    None,
    /// Within one process: then, if the gate is open. `last` are the numbers of the ranks' last command before
    /// it.
    Gate { gate: Gate, last: StepAttempt },
    /// In several processes: then, or without a drain, if all processes have begun the same batch.
    Offer(Box<Offered>),
}

/// Whether a batch begins that is begun while another one runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Begin {
    Always,
    /// If the interrupt flag is raised before a rank begins the batch, the batch is withdrawn.
    UnlessInterrupted,
}

/// A batch that is compared with the other processes' batches if the ranks have not begun it.
pub(super) struct Offered {
    pub(super) batch: CheckedBatch,
    pub(super) purpose: Purpose,
    pub(super) when: Begin,
    /// The numbers of the ranks' last command before it.
    pub(super) last: StepAttempt,
}

/// A batch that the ranks get when the one before has ended. A batch that cannot be used is an error in all
/// processes, which compare their batches then.
pub(super) struct Waiting {
    pub(super) batch: Result<CheckedBatch, PipelineError>,
    pub(super) purpose: Purpose,
    pub(super) when: Begin,
    /// In several processes, the digest of the batch that all of them have begun; `None` if it is not known
    /// that all have begun one.
    pub(super) common: Option<u64>,
    /// The time of the call that has begun it.
    pub(super) start: Instant,
}
