//! The data of an evaluation for each kind of computation on a stage, and the times of computations and of the
//! tensors that they send.

use crate::costs::Exchanges;
use crate::plan::links::Route;
use crate::plan::order::Cell;
use crate::simulate::alternation::Work;

/// The time from which a link is free is not known.
pub(super) const UNKNOWN: f64 = -1.0;

/// No tensor: a computation needs nothing of another stage, or sends nothing.
pub(super) const NONE: usize = usize::MAX;

/// The data that all computations of one kind on one stage share.
#[derive(Debug, Clone, Copy)]
pub(super) struct Role {
    /// Whether the stage drops it.
    pub(super) is_dropped: bool,
    /// Whether the stage is trained. An overlap with its backward stays whole.
    pub(super) is_whole: bool,
    /// The time with exchanges.
    pub(super) takes: f64,
    /// The computation and the exchanges in it.
    pub(super) work: Work,
    /// The second forward before it, as in `work`.
    pub(super) work_again: Work,
    /// The time of the second forward before it, if the stage computes forwards again.
    pub(super) again: Option<f64>,
    /// The first of the messages that it receives, one for each microbatch; [`NONE`] if it receives none.
    pub(super) needs: usize,
    /// The first of the messages that it sends to another stage, one for each microbatch; [`NONE`] if it
    /// sends none.
    pub(super) sends: usize,
    /// The rank of that stage.
    pub(super) receiver: u32,
    /// The way to that rank.
    pub(super) route: Route,
}

/// A tensor that a stage receives.
#[derive(Debug, Clone, Copy)]
pub(super) struct Message {
    /// The end of the computation that sends it.
    pub(super) sent: f64,
    pub(super) arrival: f64,
    /// The time from which its link is free.
    pub(super) free: f64,
    /// The evaluation that found these times.
    pub(super) evaluation: u32,
    /// The position of the computation that sends it in the row of its rank.
    pub(super) position: u32,
}

impl Message {
    pub(super) const UNKNOWN: Self =
        Self { sent: f64::INFINITY, arrival: 0.0, free: 0.0, evaluation: 0, position: 0 };
}

/// When a computation ended.
#[derive(Debug, Clone, Copy)]
pub(in crate::plan) struct Ended {
    pub(in crate::plan) at: f64,
    /// The time of the computations of its rank that have not run by then, without second forwards.
    pub(super) rest: f64,
    /// Whether its rank was idle before it, until a message arrived.
    pub(in crate::plan) has_waited: bool,
}

impl Role {
    /// The role of a computation that takes no time, and neither receives nor sends anything.
    pub(super) const NOTHING: Self = Self {
        is_dropped: false,
        is_whole: false,
        takes: 0.0,
        work: Work { compute: 0.0, exchanges: Exchanges::new(0, 0.0) },
        work_again: Work { compute: 0.0, exchanges: Exchanges::new(0, 0.0) },
        again: None,
        needs: NONE,
        sends: NONE,
        receiver: 0,
        route: Route::NONE,
    };
}

/// Returns the role of a computation.
pub(super) fn role_of(roles: &[[Role; 4]], cell: Cell) -> &Role {
    &roles[cell.stage as usize][cell.kind as usize]
}
