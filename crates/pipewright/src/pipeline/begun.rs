//! Training batches that were begun and are not finished ([`Pipeline::begin`](super::Pipeline::begin)).

use std::time::Instant;

use crossbeam_channel::Receiver;

use super::error::PipelineError;
use super::step_plan::{CheckedBatch, StepAttempt, StepPlan};
use crate::batch::Purpose;
use crate::driver::StepReply;
use crate::executor::StepOrigin;
use crate::ids::WorldRank;

/// A batch that the ranks have.
pub(super) struct Running {
    pub(super) plan: StepPlan,
    pub(super) origin: StepOrigin,
    pub(super) replies: Receiver<(WorldRank, StepReply)>,
    /// The time of the call that has begun it.
    pub(super) start: Instant,
    /// Present if the ranks begin the batch only if all processes have begun the same one.
    pub(super) offered: Option<Offered>,
}

/// A batch that is compared with the other processes' batches if the ranks have not begun it.
pub(super) struct Offered {
    pub(super) batch: CheckedBatch,
    pub(super) purpose: Purpose,
    /// The numbers of the ranks' last command before it.
    pub(super) last: StepAttempt,
}

/// A batch that the ranks get when the one before has ended. A batch that cannot be used is an error in all
/// processes, which compare their batches then.
pub(super) struct Waiting {
    pub(super) batch: Result<CheckedBatch, PipelineError>,
    pub(super) purpose: Purpose,
    /// In several processes, the digest of the batch that all of them have begun; `None` if it is not known
    /// that all have begun one.
    pub(super) common: Option<u64>,
    /// The time of the call that has begun it.
    pub(super) start: Instant,
}
