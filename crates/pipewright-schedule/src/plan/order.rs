//! The computations of all ranks in order, as the search evaluates them: small cells in flat rows.
//!
//! The cells agree with the program that trains ([`mod@crate::lower`], `training.rs`): an overlap is its
//! forward and its backward, and a backward is split if another rank waits for its gradient. Messages follow
//! from the placement.

use crate::action::Action;
use crate::ids::{Microbatch, StageIndex};
use crate::placement::Placement;
use crate::schedule::Schedule;

/// The kind of a computation. Tables by kind have this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Forward,
    Input,
    Weight,
    /// `I` and `W` as one computation.
    Backward,
}

/// One computation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cell {
    pub(super) kind: Kind,
    pub(super) stage: u32,
    pub(super) microbatch: u32,
}

/// The computations of all ranks.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Order {
    pub(super) placement: Placement,
    pub(super) microbatches: u32,
    pub(super) rows: Vec<Vec<Cell>>,
}

impl Order {
    /// Returns the order of a schedule.
    pub(super) fn of(schedule: &Schedule) -> Self {
        let placement = schedule.placement().clone();
        let row = |row: &Vec<Option<Action>>| {
            let mut cells = Vec::with_capacity(row.len() * 3 / 2);
            for part in row.iter().flatten().flat_map(|action| action.parts()) {
                push(&placement, part, &mut cells);
            }
            cells
        };
        let rows = schedule.rows().iter().map(row).collect();
        Self { placement, microbatches: schedule.microbatches(), rows }
    }

    /// Returns the number of computations of all ranks.
    pub(super) fn computations(&self) -> usize {
        self.rows.iter().map(Vec::len).sum()
    }

    /// Returns the schedule of the order.
    pub(super) fn schedule(&self) -> Schedule {
        let row = |row: &Vec<Cell>| row.iter().map(|&cell| Some(action(cell))).collect();
        let rows = self.rows.iter().map(row).collect();
        Schedule::generated(self.placement.clone(), self.microbatches, rows)
    }
}

fn push(placement: &Placement, part: Action, cells: &mut Vec<Cell>) {
    let Some(microbatch) = part.microbatch() else { return };
    let mut add = |kind| cells.push(Cell { kind, stage: part.stage().get(), microbatch: microbatch.get() });
    match part {
        Action::Forward { .. } => add(Kind::Forward),
        Action::InputBackward { .. } => add(Kind::Input),
        Action::WeightBackward { .. } => add(Kind::Weight),
        Action::Backward { stage, .. } => {
            let waits = |before| placement.owner(before) != placement.owner(stage);
            if placement.previous(stage).is_some_and(waits) {
                add(Kind::Input);
                add(Kind::Weight);
            } else {
                add(Kind::Backward);
            }
        }
        _ => {}
    }
}

fn action(cell: Cell) -> Action {
    let (stage, microbatch) = (StageIndex::new(cell.stage), Microbatch::new(cell.microbatch));
    match cell.kind {
        Kind::Forward => Action::Forward { stage, microbatch },
        Kind::Input => Action::InputBackward { stage, microbatch },
        Kind::Weight => Action::WeightBackward { stage, microbatch },
        Kind::Backward => Action::Backward { stage, microbatch },
    }
}
