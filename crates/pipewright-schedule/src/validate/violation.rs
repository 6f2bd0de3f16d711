//! What can be wrong with a program: ids and a place, from which the message is made.

use std::fmt;

use thiserror::Error;

use crate::action::Action;
use crate::ids::Rank;
use crate::level::Level;
use crate::schedule::Program;

/// One thing that is wrong, and where.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("rank {rank}, position {position}: {kind}")]
pub struct Violation {
    /// The rank in whose row it is.
    pub rank: Rank,
    /// The action in the row, counted from 0. What is missing is placed behind the row's last action.
    pub position: usize,
    /// What is wrong there.
    pub kind: ViolationKind,
}

/// What is wrong at a place of a program.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ViolationKind {
    /// There is nothing to run.
    #[error("the program has no microbatch; use at least one")]
    NoMicrobatches,
    /// The stage does not exist.
    #[error("{action} names a stage beyond the last, {}; correct its stage", .stages.saturating_sub(1))]
    StageOutOfRange {
        /// The action.
        action: Action,
        /// The number of stages.
        stages: u32,
    },
    /// The microbatch does not exist.
    #[error("{action} names a microbatch beyond the last, {}; correct its microbatch", .microbatches.saturating_sub(1))]
    MicrobatchOutOfRange {
        /// The action.
        action: Action,
        /// The number of microbatches.
        microbatches: u32,
    },
    /// The stage belongs to another rank.
    #[error("{action} belongs to rank {owner}, which owns its stage; move it there")]
    NotOwned {
        /// The action.
        action: Action,
        /// The rank that owns the stage.
        owner: Rank,
    },
    /// The same action twice.
    #[error("{action} is there a second time, first at position {first}; drop one of them")]
    Duplicate {
        /// The action.
        action: Action,
        /// Where in the row it is first.
        first: usize,
    },
    /// An action that the level requires is nowhere.
    #[error("{action} is missing; add it to this rank")]
    Missing {
        /// The missing action.
        action: Action,
    },
    /// A full backward, and a split one for the same stage and microbatch.
    #[error("{action} and {other} compute the same gradients; keep one of them")]
    MixedBackward {
        /// The full backward.
        action: Action,
        /// The half of a split backward.
        other: Action,
    },
    /// Communication where the level has none.
    #[error(
        "{action} communicates, which the level `{level}` does not; validate at the level `comms` or `full`"
    )]
    UnexpectedCommunication {
        /// The action.
        action: Action,
        /// The level.
        level: Level,
    },
    /// An action comes before one on the same rank that it needs.
    #[error("{action} needs {needs}, which comes only at position {at}; move one of them")]
    TooEarly {
        /// The action that comes too early.
        action: Action,
        /// What it needs.
        needs: Action,
        /// Where in the row that is.
        at: usize,
    },
    /// An action needs one that is nowhere.
    #[error("{action} needs {needs}, which is nowhere; add it or drop this one")]
    NeverHappens {
        /// The action.
        action: Action,
        /// What it needs.
        needs: Action,
    },
    /// A send that nobody receives.
    #[error("{action} is never received; add {receive} to rank {peer}")]
    UnmatchedSend {
        /// The send.
        action: Action,
        /// The receive that is missing.
        receive: Action,
        /// The rank that should receive.
        peer: Rank,
    },
    /// A receive of what nobody sends.
    #[error("{action} waits for what is never sent; add {send} to rank {peer}")]
    UnmatchedReceive {
        /// The receive.
        action: Action,
        /// The send that is missing.
        send: Action,
        /// The rank that should send.
        peer: Rank,
    },
    /// Communication of a stage that has no neighbour there, or has it on the same rank.
    #[error("{action} has no other rank to talk to; drop it")]
    NoPeer {
        /// The action.
        action: Action,
    },
    /// The receives from a rank are not in the order of its sends.
    #[error("{action} is here where rank {peer} sends {sent}; receive in the order of the sends")]
    PeerOrder {
        /// The receive.
        action: Action,
        /// The rank that sends.
        peer: Rank,
        /// What it sends at this turn.
        sent: Action,
    },
    /// Ranks wait for each other in a circle. The place of the violation is the first of them.
    #[error("deadlock: {}; break the circle", Chain(.cycle))]
    Deadlock {
        /// The blocked ranks; each waits for the next, and the last for the first.
        cycle: Vec<BlockedRank>,
    },
    /// A stage's parameters are used, or dropped, while they are not gathered.
    #[error("{action} finds the stage's parameters not gathered; put {}UNSHARD before it", .action.stage())]
    NotUnsharded {
        /// The action.
        action: Action,
    },
    /// A stage's parameters are gathered while they are gathered already.
    #[error("{action} gathers parameters that are gathered already; drop it, or put {}RESHARD before it", .action.stage())]
    AlreadyUnsharded {
        /// The action.
        action: Action,
    },
    /// A weight gradient is computed after the stage's gradients were reduced.
    #[error("{action} adds to gradients that are reduced already; put {reduce} behind it")]
    AfterReduce {
        /// The action that computes a weight gradient; of an overlap, its backward.
        action: Action,
        /// The reduction.
        reduce: Action,
    },
}

/// A rank that cannot go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockedRank {
    /// The rank.
    pub rank: Rank,
    /// Where in its row it stands.
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

/// The first few of `blocked`, for an error message.
pub(crate) fn list_blocked(blocked: &[BlockedRank]) -> String {
    let named: Vec<String> = blocked.iter().take(8).map(ToString::to_string).collect();
    let more = if blocked.len() > named.len() { ", and more" } else { "" };
    named.join(", ") + more
}

/// Prints blocked ranks one after another. A thousand ranks may wait in one circle; the message names the
/// first few.
struct Chain<'a>(&'a [BlockedRank]);

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMED: usize = 16;
        for (place, blocked) in self.0.iter().take(NAMED).enumerate() {
            write!(f, "{}{blocked}", if place == 0 { "" } else { ", " })?;
        }
        match self.0.len().saturating_sub(NAMED) {
            0 => Ok(()),
            rest => write!(f, ", and {rest} more"),
        }
    }
}

/// Everything that is wrong with a program, and the program itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violations {
    // Boxed, so that a `Result` with this error stays small.
    program: Box<Program>,
    listed: Vec<Violation>,
    omitted: u64,
}

impl Violations {
    /// The violations in the order of the rule families; at least one, and at most 1,000.
    pub fn listed(&self) -> &[Violation] {
        &self.listed
    }

    /// How many violations there are beyond the listed ones.
    pub fn omitted(&self) -> u64 {
        self.omitted
    }

    /// The program that was judged.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// The program that was judged, given back.
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

/// Collects violations while the rules run. Absurd input may break a rule a million times, so only the first
/// are kept and the rest are counted.
pub(crate) struct Report {
    listed: Vec<Violation>,
    omitted: u64,
}

impl Report {
    const LISTED: usize = 1000;

    pub(super) fn new() -> Self {
        Self { listed: Vec::new(), omitted: 0 }
    }

    /// Notes a violation. Its details are made only where they will be listed, since finding them may take a
    /// scan.
    pub(super) fn push(&mut self, rank: Rank, details: impl FnOnce() -> (usize, ViolationKind)) {
        if self.listed.len() < Self::LISTED {
            let (position, kind) = details();
            self.listed.push(Violation { rank, position, kind });
        } else {
            self.omitted += 1;
        }
    }

    /// How many violations there are.
    pub(crate) fn total(&self) -> u64 {
        self.listed.len() as u64 + self.omitted
    }

    pub(crate) fn into_violations(self, program: Program) -> Violations {
        Violations { program: Box::new(program), listed: self.listed, omitted: self.omitted }
    }
}
