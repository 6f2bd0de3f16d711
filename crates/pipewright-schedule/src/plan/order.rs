//! The computations of all ranks in order, as the search evaluates them: small cells in flat rows.
//!
//! The cells agree with the program that trains ([`mod@crate::lower`], `training.rs`): an overlap is its
//! forward and its backward, which run together if the layers exchange tokens ([`Order::with_overlaps`]) and
//! the stage of the backward is trained, and
//! a backward is split if another rank waits for its gradient ([`Order::split`]). Messages follow from the
//! placement.
//!
//! An order has the backwards of all stages, so that it stays whole when the cut changes. The program that
//! trains does not have the cells that frozen stages drop ([`Cell::is_dropped`]): they take no time, wait for
//! nothing, and send nothing.

use crate::action::Action;
use crate::ids::{Microbatch, Rank, StageIndex};
use crate::overlap::Overlap;
use crate::placement::Placement;
use crate::plan::stage_load::StageLoad;
use crate::schedule::{Numbering, Schedule};
use crate::trained::StageBackward;

/// The kind of a computation. Tables by kind have this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Forward,
    Input,
    Weight,
    /// `I` and `W` as one computation.
    Backward,
}

impl Kind {
    /// All kinds, in the order of tables.
    pub(super) const ALL: [Self; 4] = [Self::Forward, Self::Input, Self::Weight, Self::Backward];

    /// Returns whether a stage whose backward computes `backward` drops its computations of this kind.
    pub(super) fn is_dropped(self, backward: StageBackward) -> bool {
        match backward {
            StageBackward::Whole => false,
            StageBackward::Inputs => self == Self::Weight,
            StageBackward::None => self != Self::Forward,
        }
    }
}

/// One computation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cell {
    pub(super) kind: Kind,
    pub(super) stage: u32,
    pub(super) microbatch: u32,
    /// Whether it is a forward that runs together with the backward after it in its row. If the stage of the
    /// backward is frozen, they run one after the other.
    pub(super) overlaps: bool,
}

impl Cell {
    /// Returns whether its stage drops the computation, because nothing needs its gradients.
    pub(super) fn is_dropped(self, loads: &[StageLoad]) -> bool {
        self.kind.is_dropped(loads[self.stage as usize].computes)
    }
}

/// The computations of all ranks.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Order {
    pub(super) placement: Placement,
    pub(super) microbatches: u32,
    pub(super) rows: Vec<Vec<Cell>>,
}

impl Order {
    /// Returns the order of a schedule, with whole backwards where the schedule has them. The halves of
    /// overlaps run one after the other.
    #[cfg(test)]
    pub(super) fn of(schedule: &Schedule) -> Self {
        Self::with_overlaps(schedule, false)
    }

    /// Returns the order of a schedule, with whole backwards where the schedule has them. If
    /// `has_exchanges`, the halves of overlaps run together, and otherwise one after the other.
    pub(super) fn with_overlaps(schedule: &Schedule, has_exchanges: bool) -> Self {
        let placement = schedule.placement().clone();
        let row = |row: &Vec<Option<Action>>| {
            let mut cells = Vec::with_capacity(row.len() * 3 / 2);
            for &action in row.iter().flatten() {
                let first = cells.len();
                action.parts().for_each(|part| push(part, &mut cells));
                if let (Action::Overlap(_), Some(forward)) = (action, cells.get_mut(first)) {
                    forward.overlaps = has_exchanges;
                }
            }
            cells
        };
        let rows = schedule.rows().iter().map(row).collect();
        Self { placement, microbatches: schedule.microbatches(), rows }
    }

    /// Returns the order in which the halves of overlaps run one after the other.
    pub(super) fn apart(&self) -> Self {
        let mut order = self.clone();
        order.rows.iter_mut().flatten().for_each(|cell| cell.overlaps = false);
        order
    }

    /// Returns the order in which backwards are split if another rank waits for their gradient, except those
    /// that run together with a forward. Stages before `first` run forward only, so nothing waits for the
    /// gradient of `first`.
    pub(super) fn split(&self, first: u32) -> Self {
        let Self { placement, microbatches, rows } = self;
        let is_sent = |cell: &Cell| {
            let stage = StageIndex::new(cell.stage);
            let waits = |before| placement.owner(before) != placement.owner(stage);
            cell.stage > first && placement.previous(stage).is_some_and(waits)
        };
        let row = |row: &Vec<Cell>| {
            let mut cells = Vec::with_capacity(row.len() * 3 / 2);
            for &cell in row {
                let overlaps = cells.last().is_some_and(|before: &Cell| before.overlaps);
                if cell.kind == Kind::Backward && is_sent(&cell) && !overlaps {
                    cells.extend([Kind::Input, Kind::Weight].map(|kind| Cell { kind, ..cell }));
                } else {
                    cells.push(cell);
                }
            }
            cells
        };
        let rows = rows.iter().map(row).collect();
        Self { placement: placement.clone(), microbatches: *microbatches, rows }
    }

    /// Returns an order with these computations, and after them the ones that stages drop. Those have an
    /// order in which the ranks do not wait for each other even if the stages are trained: by microbatch, and
    /// from the last stage to the first.
    pub(super) fn completed(
        placement: Placement,
        microbatches: u32,
        mut rows: Vec<Vec<Cell>>,
        loads: &[StageLoad],
    ) -> Self {
        let frozen: Vec<StageIndex> = placement
            .all_stages()
            .filter(|stage| loads[stage.index()].computes != StageBackward::Whole)
            .collect();
        if frozen.is_empty() {
            return Self { placement, microbatches, rows };
        }
        rows.iter_mut().for_each(|row| row.retain(|cell| !cell.is_dropped(loads)));
        // A whole backward without weight gradients is an input backward. Its `W` is dropped, and follows.
        for cell in rows.iter_mut().flatten().filter(|cell| cell.kind == Kind::Backward) {
            if loads[cell.stage as usize].computes == StageBackward::Inputs {
                cell.kind = Kind::Input;
            }
        }
        for microbatch in 0..microbatches {
            for &stage in frozen.iter().rev() {
                let cells = [Kind::Input, Kind::Weight].map(|kind| Cell {
                    kind,
                    stage: stage.get(),
                    microbatch,
                    overlaps: false,
                });
                let row = &mut rows[placement.rank_of(stage).index()];
                row.extend(cells.into_iter().filter(|cell| cell.is_dropped(loads)));
            }
        }
        Self { placement, microbatches, rows }
    }

    /// Returns the order with the ranks of unlike machines: the first stages of this order's ranks are on the ranks
    /// that `rank_of` has for these stages.
    pub(super) fn on_ranks(&self, rank_of: &[u32]) -> Self {
        let mut rows = vec![Vec::new(); self.rows.len()];
        for (stage, &rank) in self.placement.all_stages().zip(rank_of) {
            if self.placement.chunk_of(stage).index() == 0 {
                rows[rank as usize] = self.rows[self.placement.rank_of(stage).index()].clone();
            }
        }
        let ranks = rank_of.iter().copied().map(Rank::new).collect();
        let placement = Placement::explicit(ranks).expect("every rank has a stage");
        Self { placement, microbatches: self.microbatches, rows }
    }

    /// Returns the number of computations of all ranks.
    pub(super) fn computations(&self) -> usize {
        self.rows.iter().map(Vec::len).sum()
    }

    /// Returns the schedule of the order.
    pub(super) fn schedule(&self) -> Schedule {
        let row = |row: &Vec<Cell>| {
            let mut cells = row.iter().peekable();
            let mut actions = Vec::with_capacity(row.len());
            while let Some(&cell) = cells.next() {
                let backward = cells.peek().filter(|_| cell.overlaps).map(|&&backward| backward);
                let overlap = backward.and_then(|backward| overlap(cell, backward));
                if overlap.is_some() {
                    cells.next();
                }
                actions.push(Some(overlap.unwrap_or_else(|| action(cell))));
            }
            actions
        };
        let rows = self.rows.iter().map(row).collect();
        Schedule::made(self.placement.clone(), Numbering::of(self.microbatches), rows)
    }
}

/// Returns the overlap of a forward and a backward.
fn overlap(forward: Cell, backward: Cell) -> Option<Action> {
    let at = |cell: Cell| (StageIndex::new(cell.stage), Microbatch::new(cell.microbatch));
    Overlap::new(at(forward), at(backward)).map(Action::Overlap)
}

/// Returns the first stage that runs backward.
pub(super) fn first_backward(loads: &[StageLoad]) -> u32 {
    loads.iter().take_while(|load| load.computes == StageBackward::None).count() as u32
}

fn push(part: Action, cells: &mut Vec<Cell>) {
    let Some(microbatch) = part.microbatch() else { return };
    let (stage, microbatch) = (part.stage().get(), microbatch.get());
    let mut add = |kind| cells.push(Cell { kind, stage, microbatch, overlaps: false });
    match part {
        Action::Forward { .. } => add(Kind::Forward),
        Action::InputBackward { .. } => add(Kind::Input),
        Action::WeightBackward { .. } => add(Kind::Weight),
        Action::Backward { .. } => add(Kind::Backward),
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
