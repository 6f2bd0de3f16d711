//! The forwards in a row that are computed again before their backwards. The evaluation of an order, its peak
//! memory and its collectives count them by the same rule as training.

use crate::ids::Microbatch;
use crate::plan::order::{Cell, Kind};
use crate::recompute::{KeptForwards, StageRecompute};

/// Returns whether the cell at `position` is a forward that is computed again, or a backward that computes its
/// forward again: the stage recomputes, as `choice` says, the two do not follow each other, and the forward is
/// none of those that are kept because the stage has few of them. Must be called for all cells of the stage in
/// order, with its own `kept`.
pub(super) fn is_recomputed(
    choice: Option<StageRecompute>,
    kept: &mut KeptForwards,
    row: &[Cell],
    position: usize,
    is_dropped: impl Fn(Cell) -> bool,
) -> bool {
    let Some(choice) = choice else { return false };
    let microbatch = Microbatch::new(row[position].microbatch);
    match row[position].kind {
        Kind::Forward => !kept.forward(choice.keep, microbatch) && !is_followed(row, position, is_dropped),
        Kind::Input | Kind::Backward => {
            !kept.backward(microbatch) && !follows_forward(row, position, is_dropped)
        }
        Kind::Weight => false,
    }
}

/// Returns the same for a single cell of a stage that keeps no microbatches in flight.
pub(super) fn is_recomputed_at(row: &[Cell], position: usize, is_dropped: impl Fn(Cell) -> bool) -> bool {
    is_recomputed(Some(StageRecompute::WHOLE), &mut KeptForwards::default(), row, position, is_dropped)
}

/// Returns whether the cell at `position` is a backward that follows its own forward, with nothing but
/// computations that are dropped in between.
fn follows_forward(row: &[Cell], position: usize, is_dropped: impl Fn(Cell) -> bool) -> bool {
    let before = row[..position].iter().rev().find(|&&cell| !is_dropped(cell));
    before.is_some_and(|&before| is_pair(before, row[position]))
}

/// Returns whether the cell at `position` is a forward that its own backward follows, with nothing but
/// computations that are dropped in between.
fn is_followed(row: &[Cell], position: usize, is_dropped: impl Fn(Cell) -> bool) -> bool {
    let next = row[position + 1..].iter().find(|&&cell| !is_dropped(cell));
    next.is_some_and(|&next| is_pair(row[position], next))
}

/// Returns whether two cells are a forward and its own backward.
fn is_pair(forward: Cell, backward: Cell) -> bool {
    forward.kind == Kind::Forward
        && matches!(backward.kind, Kind::Input | Kind::Backward)
        && (backward.stage, backward.microbatch) == (forward.stage, forward.microbatch)
}
