//! The violations of a program: places and what is wrong there.

use std::fmt;

use thiserror::Error;

use crate::action::Action;
use crate::ids::Rank;
use crate::schedule::Program;

/// A violation with its place.
#[derive(Clone, PartialEq, Eq, Error)]
#[error("rank {rank}, position {position}: {problem}")]
pub struct Violation {
    /// The rank whose row has the violation.
    pub rank: Rank,
    /// The position of the action in the row, counted from 0. The position of a missing action is the length
    /// of the row.
    pub position: usize,
    /// The problem, and the way to solve it.
    pub problem: String,
}

crate::error_text::message_as_debug!(Violation);

/// A rank that cannot advance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockedRank {
    /// The rank.
    pub rank: Rank,
    /// The position of its next action.
    pub position: usize,
    /// The action that cannot complete.
    pub action: Action,
    /// The rank it waits for.
    pub waits_for: Rank,
}

impl fmt::Display for BlockedRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, position, action, waits_for } = self;
        write!(f, "rank {rank} at position {position} ({action}) waits for rank {waits_for}")
    }
}

/// Returns the text of blocked ranks for an error message. A thousand ranks may wait for each other, so the text
/// names only the first few.
pub(crate) fn list_blocked(blocked: &[BlockedRank]) -> String {
    const NAMED: usize = 16;
    let named: Vec<String> = blocked.iter().take(NAMED).map(ToString::to_string).collect();
    let more = blocked
        .len()
        .checked_sub(NAMED + 1)
        .map_or_else(String::new, |rest| format!(", and {} more", rest + 1));
    named.join(", ") + &more
}

/// All violations of a program, and the program itself.
#[derive(Clone, PartialEq, Eq)]
pub struct Violations {
    // Boxed, so that a `Result` with this error stays small.
    program: Box<Program>,
    listed: Vec<Violation>,
    omitted: u64,
}

impl Violations {
    /// Returns the violations in the order of the rule families: at least one and at most 1,000.
    pub fn listed(&self) -> &[Violation] {
        &self.listed
    }

    /// Returns the number of violations that are not listed.
    pub fn omitted(&self) -> u64 {
        self.omitted
    }

    /// Returns the program.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Returns the program by value.
    pub fn into_program(self) -> Program {
        *self.program
    }
}

impl fmt::Display for Violations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let total = self.listed.len() as u64 + self.omitted;
        write!(f, "unsound program, {total} violation{}", if total == 1 { "" } else { "s" })?;
        self.listed.first().map_or(Ok(()), |first| write!(f, "; the first: {first}"))
    }
}

impl std::error::Error for Violations {}

crate::error_text::message_as_debug!(Violations);

/// Collects violations while the rules run. Bad input may break a rule a million times, so only the first
/// violations are kept and the others are counted.
pub(crate) struct Report {
    listed: Vec<Violation>,
    omitted: u64,
}

impl Report {
    const LISTED: usize = 1000;

    pub(super) fn new() -> Self {
        Self { listed: Vec::new(), omitted: 0 }
    }

    /// Adds a violation. `details` is called only if the violation is listed, because it may scan a row.
    pub(super) fn push(&mut self, rank: Rank, details: impl FnOnce() -> (usize, String)) {
        if self.listed.len() < Self::LISTED {
            let (position, problem) = details();
            self.listed.push(Violation { rank, position, problem });
        } else {
            self.omitted += 1;
        }
    }

    /// Adds the violation that `action` is missing on `rank`.
    pub(super) fn push_missing(&mut self, program: &Program, rank: Rank, action: Action) {
        let problem = || format!("{action} is missing; add it to this rank");
        self.push(rank, || (program.row(rank).len(), problem()));
    }

    /// Adds the violation that the gradients of `action` are not used.
    pub(super) fn push_unused(&mut self, rank: Rank, position: impl FnOnce() -> usize, action: Action) {
        let problem =
            || format!("{action} is for gradients that no stage uses, because stages are frozen; drop it");
        self.push(rank, || (position(), problem()));
    }

    /// Returns the number of violations.
    pub(crate) fn total(&self) -> u64 {
        self.listed.len() as u64 + self.omitted
    }

    pub(crate) fn into_violations(self, program: Program) -> Violations {
        Violations { program: Box::new(program), listed: self.listed, omitted: self.omitted }
    }
}
