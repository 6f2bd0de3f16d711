//! The type that only validation can make, and the function that makes it.

use crate::action::Action;
use crate::ids::Rank;
use crate::level::Level;
use crate::placement::Placement;
use crate::schedule::Program;
use crate::slices::Slices;
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
/// If a program has no backward, validation requires none.
///
/// # Errors
/// All violations with their places. They contain the program.
pub fn validate(program: Program, level: Level) -> Result<ValidatedProgram, Violations> {
    let report = check(&program, level);
    if report.total() > 0 {
        return Err(report.into_violations(program));
    }
    let forward_only = !has_backward(&program);
    Ok(ValidatedProgram { program, level, forward_only })
}

impl ValidatedProgram {
    /// The actions of `rank`, in order; empty if there is no such rank.
    pub fn row(&self, rank: Rank) -> &[Action] {
        self.program.row(rank)
    }

    /// Returns the placement of the stages.
    pub fn placement(&self) -> &Placement {
        self.program.placement()
    }

    /// Returns the number of microbatches in a step; of all their slices, if they are cut
    /// ([`crate::slices`]).
    pub fn microbatches(&self) -> u32 {
        self.program.microbatches()
    }

    /// Returns the number of slices of each microbatch.
    pub fn slices(&self) -> Slices {
        self.program.slices()
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> u32 {
        self.program.ranks()
    }

    /// Returns whether the program has no backward.
    pub fn is_forward_only(&self) -> bool {
        self.forward_only
    }

    /// Returns the level at which the program is sound.
    pub fn level(&self) -> Level {
        self.level
    }

    /// Returns the program without the proof.
    pub fn as_program(&self) -> &Program {
        &self.program
    }

    /// Returns the program without the proof.
    pub fn into_program(self) -> Program {
        self.program
    }
}
