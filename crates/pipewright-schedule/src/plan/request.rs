//! The input of a plan.

use crate::mesh::DataParallelMode;
use crate::plan::system::System;

/// The bytes of the two moments of AdamW for each byte of parameters.
const ADAMW_STATE: f64 = 2.0;

/// The memory of a rank for its parameters besides the gradients, which have the size of the parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TrainingState {
    /// The bytes of the optimizer's state for each byte of parameters; 2 for AdamW.
    pub optimizer: f64,
    /// The bytes of the copy of the parameters with which stages compute in half precision, for each byte of
    /// parameters; 0 in single precision.
    pub copy: f64,
    /// The replicas that hold parameters and optimizer state together.
    pub groups: DataParallelMode,
    /// The number of stages of a rank whose parameters are gathered at the same time, if replicas hold them
    /// together.
    pub window: u32,
    /// Whether a rank may update before it has the gradient norm, and then keeps the parameters and the
    /// optimizer's state from before the update until the end of the step.
    pub post_validation: bool,
    /// Whether `copy` has the second version of delayed parameters and the gradients of a second batch
    /// ([`TrainingState::delayed`]).
    pub is_delayed: bool,
}

impl Default for TrainingState {
    /// AdamW in single precision, all of it on each replica.
    fn default() -> Self {
        Self {
            optimizer: ADAMW_STATE,
            copy: 0.0,
            groups: DataParallelMode::default(),
            window: 1,
            post_validation: false,
            is_delayed: false,
        }
    }
}

impl TrainingState {
    /// Returns the memory if parameters are delayed by one update: two versions, each with its copy in half precision, and the
    /// gradients of two batches.
    pub fn delayed(self) -> Self {
        let copy = if self.is_delayed { self.copy } else { 2.0 * self.copy + 2.0 };
        Self { copy, is_delayed: true, ..self }
    }
}

/// The sizes and limits of a plan. The costs are in the profile.
#[derive(Debug, Clone, PartialEq)]
pub struct PlanRequest {
    /// The number of ranks, over all replicas.
    pub ranks: u32,
    /// The number of microbatches of a step, over all replicas.
    pub microbatches: u32,
    /// The number of rows of a microbatch. Plans may use larger microbatches, and fewer of them.
    pub microbatch_rows: u32,
    /// The memory of each rank in bytes; `None` for any amount.
    pub memory: Option<u64>,
    /// The bytes of the optimizer's state, of the copy in half precision, and of what can undo an update.
    pub state: TrainingState,
    /// The number of replicas; `None` to search it.
    pub data_parallel: Option<u32>,
    /// The number of tensor-parallel ranks of each stage; `None` to search it, if the profile has nodes. They
    /// share a node.
    pub tensor_parallel: Option<u32>,
    /// Whether larger microbatches may be tried.
    pub larger_microbatches: bool,
    /// The numbers of parts into which the head may be cut along the vocabulary, each part a layer of its
    /// own; empty for the number that the profile has.
    pub head_parts: Vec<u32>,
    /// The system that is to execute the plan. Only plans that it can run are searched, and heads are not cut
    /// into parts; `None` for all plans.
    pub system: Option<System>,
    /// Whether a frozen base stays in its files in all plans. Otherwise it does if no plan fits with the base in memory, and
    /// the profile says what may stay in files
    /// ([`LayerProfile::streamed_bytes`](crate::profile::LayerProfile::streamed_bytes)).
    pub always_streams: bool,
    /// Whether a stage may recompute a part of its layers. Otherwise each stage recomputes all or none.
    pub partial_recompute: bool,
    /// The work of the search. A unit is the time in which rules choose a computation. About fifteen million
    /// take a second. With 0, only named schedules are tried.
    pub effort: u64,
    /// The number of plans to return.
    pub plans: usize,
}

impl PlanRequest {
    /// The usual work of a search, in the unit of [`PlanRequest::effort`].
    pub const EFFORT: u64 = 23_000_000;

    /// Returns whether plans may recompute parts of stages: if the request allows them and the system can.
    pub(super) fn recomputes_in_part(&self) -> bool {
        self.partial_recompute && self.system.is_none()
    }
}

impl Default for PlanRequest {
    /// Eight microbatches of one row on two ranks, and everything searched.
    fn default() -> Self {
        Self {
            ranks: 2,
            microbatches: 8,
            microbatch_rows: 1,
            memory: None,
            state: TrainingState::default(),
            data_parallel: None,
            tensor_parallel: None,
            larger_microbatches: true,
            head_parts: Vec::new(),
            system: None,
            always_streams: false,
            partial_recompute: true,
            effort: Self::EFFORT,
            plans: 5,
        }
    }
}
