//! The data that the families of rules share: the program, the set of its actions, and the neighbours of its
//! stages.

use crate::action::{Action, ActionKind};
use crate::action_set::{ActionSet, bit};
use crate::ids::{Rank, StageIndex};
use crate::level::Level;
use crate::neighbours::Neighbours;
use crate::schedule::Program;
use crate::trained::StageBackward;

/// The program under validation.
pub(super) struct Context<'a> {
    pub(super) program: &'a Program,
    pub(super) level: Level,
    /// The actions of the program that are on the rank that owns their stage.
    pub(super) present: ActionSet,
    pub(super) neighbours: Neighbours,
    /// Whether no stage runs backward.
    pub(super) forward_only: bool,
}

impl Context<'_> {
    /// Returns what the backward of `stage` computes.
    pub(super) fn backward_of(&self, stage: StageIndex) -> StageBackward {
        if self.forward_only { StageBackward::None } else { self.program.trained().backward_of(stage) }
    }

    /// Returns whether `stage` has no parameters to train.
    pub(super) fn is_frozen(&self, stage: StageIndex) -> bool {
        self.program.trained().backward_of(stage) != StageBackward::Whole
    }

    /// Returns whether the program has a wait for a send.
    pub(super) fn waits_for_sends(&self) -> bool {
        const WAITS: u16 = bit(ActionKind::WaitSendForward) | bit(ActionKind::WaitSendBackward);
        let mut stages = self.program.placement().all_stages();
        stages.any(|stage| self.present.of_stage(stage).iter().any(|kinds| kinds & WAITS != 0))
    }
}

/// Returns whether any action of `program` runs a stage backward.
pub(super) fn has_backward(program: &Program) -> bool {
    let backward = |action: &Action| action.is_compute() && !matches!(action, Action::Forward { .. });
    program.rows().iter().flatten().any(backward)
}

/// Returns the position of `action`, alone or as a part of an overlap, in the row of `rank`; the length of
/// the row if it is missing. It scans the row, so it serves only to describe violations.
pub(super) fn position_of(program: &Program, rank: Rank, action: Action) -> usize {
    let row = program.row(rank);
    row.iter().position(|cell| cell.parts().any(|part| part == action)).unwrap_or(row.len())
}
