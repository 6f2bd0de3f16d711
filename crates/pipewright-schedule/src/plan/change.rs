//! The small changes by which a plan is improved (`polish.rs`).

use crate::plan::order::{Cell, Kind, Order};
use crate::recompute::StageRecompute;

/// A change of a plan.
#[derive(Debug, Clone, Copy)]
pub(super) enum Change {
    /// A computation of a rank moves from one place to another.
    Move { rank: usize, from: usize, to: usize },
    /// The first layers of the stages from `first` to `last` move up or down by one, and a stage may recompute
    /// other layers.
    Shift { first: usize, last: usize, is_up: bool, recomputed: Option<Recomputed> },
    /// A stage recomputes other layers.
    Recompute(Recomputed),
}

/// A change of what a stage recomputes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Recomputed {
    pub(super) stage: usize,
    pub(super) before: Option<StageRecompute>,
    pub(super) after: Option<StageRecompute>,
}

impl Change {
    /// Returns the change that takes this one back.
    pub(super) fn reversed(self) -> Self {
        let reversed =
            |Recomputed { stage, before, after }| Recomputed { stage, before: after, after: before };
        match self {
            Self::Move { rank, from, to } => Self::Move { rank, from: to, to: from },
            Self::Shift { first, last, is_up, recomputed } => {
                Self::Shift { first, last, is_up: !is_up, recomputed: recomputed.map(reversed) }
            }
            Self::Recompute(recomputed) => Self::Recompute(reversed(recomputed)),
        }
    }

    /// Changes a plan.
    pub(super) fn apply(
        self,
        order: &mut Order,
        starts: &mut [usize],
        recompute: &mut [Option<StageRecompute>],
    ) {
        match self {
            Self::Move { rank, from, to } if from < to => order.rows[rank][from..=to].rotate_left(1),
            Self::Move { rank, from, to } => order.rows[rank][to..=from].rotate_right(1),
            Self::Shift { first, last, is_up, recomputed } => {
                for start in &mut starts[first..=last] {
                    *start = if is_up { *start + 1 } else { *start - 1 };
                }
                if let Some(Recomputed { stage, after, .. }) = recomputed {
                    recompute[stage] = after;
                }
            }
            Self::Recompute(Recomputed { stage, after, .. }) => recompute[stage] = after,
        }
    }
}

/// Returns whether a computation may move to another place of its row: the computations of a microbatch on a
/// stage keep their order, and so do equal computations of a stage. If ranks then wait for each other, the
/// evaluation finds it.
pub(super) fn may_move(row: &[Cell], from: usize, to: usize) -> bool {
    let moved = row[from];
    let crossed = if from < to { &row[from + 1..=to] } else { &row[to..from] };
    let sends_gradient = |cell: &Cell| matches!(cell.kind, Kind::Input | Kind::Backward);
    crossed.iter().all(|cell| {
        let are_alike = cell.kind == moved.kind || sends_gradient(cell) && sends_gradient(&moved);
        cell.stage != moved.stage || cell.microbatch != moved.microbatch && !are_alike
    })
}
