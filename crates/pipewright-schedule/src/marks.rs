//! A table of which actions have been seen: one bit for each kind, stage and microbatch.
//!
//! Validation, lowering and simulation ask it in constant time whether something is present or done. It takes
//! two bytes for each pair of stage and microbatch, whose number [`crate::schedule`] bounds by the number of
//! actions.

use crate::action::{Action, ActionKind};
use crate::ids::{Microbatch, StageIndex};
use crate::schedule::Program;

/// A set of actions of one program. Actions outside the program's sizes are never in it.
pub(crate) struct Marks {
    stages: u32,
    microbatches: u32,
    by_microbatch: Vec<u16>,
    by_stage: Vec<u16>,
}

impl Marks {
    /// The empty set for the sizes of `program`.
    pub(crate) fn for_program(program: &Program) -> Self {
        Self::sized(program.placement().stages(), program.microbatches())
    }

    /// The empty set for these sizes.
    pub(crate) fn sized(stages: u32, microbatches: u32) -> Self {
        Self {
            stages,
            microbatches,
            by_microbatch: vec![0; stages as usize * microbatches as usize],
            by_stage: vec![0; stages as usize],
        }
    }

    /// Whether `action` is in the set.
    pub(crate) fn has(&self, action: Action) -> bool {
        let kinds = match (self.slot(action.stage(), action.microbatch()), action.microbatch()) {
            (Some(slot), Some(_)) => self.by_microbatch[slot],
            (Some(slot), None) => self.by_stage[slot],
            (None, _) => return false,
        };
        kinds & bit(action.kind()) != 0
    }

    /// Adds `action`; says whether it was not in the set before.
    pub(crate) fn insert(&mut self, action: Action) -> bool {
        let kinds = match (self.slot(action.stage(), action.microbatch()), action.microbatch()) {
            (Some(slot), Some(_)) => &mut self.by_microbatch[slot],
            (Some(slot), None) => &mut self.by_stage[slot],
            (None, _) => return true,
        };
        let fresh = *kinds & bit(action.kind()) == 0;
        *kinds |= bit(action.kind());
        fresh
    }

    /// The backward of a stage and microbatch that yields the gradient of its inputs: `B` where the set has
    /// it, else `I`.
    pub(crate) fn input_gradient(&self, stage: StageIndex, microbatch: Microbatch) -> Action {
        let full = Action::Backward { stage, microbatch };
        if self.has(full) { full } else { Action::InputBackward { stage, microbatch } }
    }

    fn slot(&self, stage: StageIndex, microbatch: Option<Microbatch>) -> Option<usize> {
        let (in_stage, width) = match microbatch {
            Some(microbatch) => (microbatch.get(), self.microbatches),
            None => (0, 1),
        };
        (stage.get() < self.stages && in_stage < width)
            .then(|| stage.index() * width as usize + in_stage as usize)
    }
}

fn bit(kind: ActionKind) -> u16 {
    1 << kind as u16
}
