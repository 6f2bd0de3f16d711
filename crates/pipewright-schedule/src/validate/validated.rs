//! The type that only validation can make, and the one function that makes it.

use crate::action::Action;
use crate::ids::{Rank, StageIndex};
use crate::level::Level;
use crate::placement::Placement;
use crate::schedule::Program;
use crate::validate::check::check;
use crate::validate::context::has_backward;
use crate::validate::violation::Violations;

/// A program that has been proved sound at its [`Level`]. An executor accepts nothing else.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ValidatedProgram {
    program: Program,
    level: Level,
    forward_only: bool,
}

/// Proves that `program` is sound at `level`.
///
/// A program without any backward action is judged as forward-only: nothing is differentiated, so nothing is
/// missing.
///
/// # Errors
/// All violations, each with its place; they give the program back.
pub fn validate(program: Program, level: Level) -> Result<ValidatedProgram, Violations> {
    let report = check(&program, level);
    if report.total() > 0 {
        return Err(report.into_violations(program));
    }
    let forward_only = !has_backward(&program);
    Ok(ValidatedProgram { program, level, forward_only })
}

impl ValidatedProgram {
    /// The actions of `rank`, in order; empty where there is no such rank.
    pub fn row(&self, rank: Rank) -> &[Action] {
        self.program.row(rank)
    }

    /// Which rank owns which stage.
    pub fn placement(&self) -> &Placement {
        self.program.placement()
    }

    /// How many microbatches a step has.
    pub fn microbatches(&self) -> u32 {
        self.program.microbatches()
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> u32 {
        self.program.ranks()
    }

    /// Whether the program runs no stage backward.
    pub fn is_forward_only(&self) -> bool {
        self.forward_only
    }

    /// The level at which the program is sound.
    pub fn level(&self) -> Level {
        self.level
    }

    /// Whether the backward actions of `stage` visit the microbatches in ascending order, so that its
    /// gradients add up in the same order as without a pipeline. Where the backward is split, both halves
    /// must ascend, since either may compute a weight's gradient. Takes time linear in the row of the stage's
    /// rank.
    pub fn visits_in_order(&self, stage: StageIndex) -> bool {
        let Some(rank) = self.placement().owner(stage) else { return true };
        let (mut inputs, mut weights) = (None, None);
        for part in
            self.row(rank).iter().flat_map(|action| action.parts()).filter(|part| part.stage() == stage)
        {
            let (to_inputs, to_weights) = match part {
                Action::Backward { .. } => (true, true),
                Action::InputBackward { .. } => (true, false),
                Action::WeightBackward { .. } => (false, true),
                _ => continue,
            };
            for last in
                [to_inputs.then_some(&mut inputs), to_weights.then_some(&mut weights)].into_iter().flatten()
            {
                if *last > part.microbatch() {
                    return false;
                }
                *last = part.microbatch();
            }
        }
        true
    }

    /// The program, without the proof.
    pub fn as_program(&self) -> &Program {
        &self.program
    }

    /// The program, without the proof.
    pub fn into_program(self) -> Program {
        self.program
    }
}
