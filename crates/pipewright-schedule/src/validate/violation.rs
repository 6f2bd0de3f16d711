//! The violations of a program: ids and a place, from which the message is made.

use std::fmt;

use thiserror::Error;

use crate::action::{Action, ActionKind};
use crate::ids::Rank;
use crate::level::Level;
use crate::schedule::Program;
use crate::slices::Slices;

/// A violation with its place.
#[derive(Clone, PartialEq, Eq, Error)]
#[error("rank {rank}, position {position}: {kind}")]
pub struct Violation {
    /// The rank whose row has the violation.
    pub rank: Rank,
    /// The position of the action in the row, counted from 0. The position of a missing action is the length
    /// of the row.
    pub position: usize,
    /// The violation.
    pub kind: ViolationKind,
}

crate::error_text::message_as_debug!(Violation);

/// The kind of a violation.
#[derive(Clone, PartialEq, Eq, Error)]
pub enum ViolationKind {
    /// The program has no microbatches.
    #[error("the program has no microbatch; use at least one")]
    NoMicrobatches,
    /// The stage does not exist.
    #[error("{action} names a stage above the last, {}; correct its stage", .stages.saturating_sub(1))]
    StageOutOfRange {
        /// The action.
        action: Action,
        /// The number of stages.
        stages: u32,
    },
    /// The microbatch does not exist.
    #[error("{action} names a microbatch above the last, {}; correct its microbatch", .microbatches.saturating_sub(1))]
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
    /// The same action occurs twice.
    #[error("{action} occurs a second time, first at position {first}; drop one of them")]
    Duplicate {
        /// The action.
        action: Action,
        /// The position of its first occurrence.
        first: usize,
    },
    /// An action that the level requires is missing.
    #[error("{action} is missing; add it to this rank")]
    Missing {
        /// The missing action.
        action: Action,
    },
    /// There is a full backward and a split one for the same stage and microbatch.
    #[error("{action} and {other} compute the same gradients; keep one of them")]
    MixedBackward {
        /// The full backward.
        action: Action,
        /// The half of a split backward.
        other: Action,
    },
    /// An action computes or sends gradients that nothing uses, because of frozen stages.
    #[error("{action} is for gradients that no stage uses, because stages are frozen; drop it")]
    Frozen {
        /// The action.
        action: Action,
    },
    /// An action communicates at a level without communication.
    #[error(
        "{action} communicates, which the level `{level}` does not; validate at the level `comms` or `full`"
    )]
    UnexpectedCommunication {
        /// The action.
        action: Action,
        /// The level.
        level: Level,
    },
    /// An action comes before another on the same rank that it needs.
    #[error("{action} needs {needs}, which comes only at position {at}; move one of them")]
    TooEarly {
        /// The action that comes too early.
        action: Action,
        /// The action that it needs.
        needs: Action,
        /// The position of that action in the row.
        at: usize,
    },
    /// No backward uses the tensors that an action moves.
    #[error("{action} moves tensors that no backward of its stage uses; drop it and its RELOAD")]
    OffloadUnused {
        /// The `OFFLOAD`.
        action: Action,
    },
    /// Tensors are to leave memory after the backward that has used them.
    #[error(
        "{action} comes after {backward} at position {at}, which has used the tensors; move it between the forward and the backward"
    )]
    OffloadTooLate {
        /// The `OFFLOAD`.
        action: Action,
        /// The backward.
        backward: Action,
        /// The position of the backward in the row.
        at: usize,
    },
    /// Tensors leave memory, and nothing brings them back.
    #[error("{action} has no RELOAD, and {backward} at position {at} uses the tensors; add one before that")]
    NeverReloaded {
        /// The `OFFLOAD`.
        action: Action,
        /// The backward that uses the tensors.
        backward: Action,
        /// The position of the backward in the row.
        at: usize,
    },
    /// A backward runs before the tensors that it uses have come back.
    #[error(
        "{action} uses the tensors that {offload} has moved away, and they come back only at position {at}; move their RELOAD before it"
    )]
    Away {
        /// The backward.
        action: Action,
        /// The `OFFLOAD`.
        offload: Action,
        /// The position of the `RELOAD` in the row.
        at: usize,
    },
    /// The slices of a microbatch run in the wrong order on their stage.
    #[error(
        "{action} needs {needs}, which comes only at position {at}: {}; move one of them",
        why_slices(*.slices, *.action, *.needs)
    )]
    SliceOrder {
        /// The action that comes too early.
        action: Action,
        /// The same action for the neighbouring slice.
        needs: Action,
        /// The position of that action in the row.
        at: usize,
        /// The number of slices of each microbatch.
        slices: Slices,
    },
    /// An action needs another that is nowhere in the program.
    #[error("{action} needs {needs}, which is missing; add {needs} or drop {action}")]
    NeverHappens {
        /// The action.
        action: Action,
        /// The action that it needs.
        needs: Action,
    },
    /// A send has no receive.
    #[error("{action} is never received; add {receive} to rank {peer}")]
    UnmatchedSend {
        /// The send.
        action: Action,
        /// The receive that is missing.
        receive: Action,
        /// The rank that should receive.
        peer: Rank,
    },
    /// A receive has no send.
    #[error("{action} has no send; add {send} to rank {peer}")]
    UnmatchedReceive {
        /// The receive.
        action: Action,
        /// The send that is missing.
        send: Action,
        /// The rank that should send.
        peer: Rank,
    },
    /// A message of a stage that has no neighbour in that direction, or whose neighbour is on the same rank.
    #[error("{action} has no peer on another rank; drop it")]
    NoPeer {
        /// The action.
        action: Action,
    },
    /// The receives from a rank are not in the order of its sends.
    #[error(
        "{action} is in the place of the receive of {sent}, which rank {peer} sends first; receive in the order of the sends"
    )]
    PeerOrder {
        /// The receive.
        action: Action,
        /// The rank that sends.
        peer: Rank,
        /// The send whose receive belongs at this position.
        sent: Action,
    },
    /// Ranks wait for each other in a cycle. The violation is at the first of them.
    #[error("deadlock: {}; break the cycle", Chain(.cycle))]
    Deadlock {
        /// The blocked ranks; each waits for the next, and the last for the first.
        cycle: Vec<BlockedRank>,
    },
    /// A stage's parameters are used, or dropped, while they are not gathered.
    #[error("{action} needs parameters that are not gathered; put {}UNSHARD before it", .action.stage())]
    NotUnsharded {
        /// The action.
        action: Action,
    },
    /// A stage's parameters are gathered although they are already gathered.
    #[error("{action} gathers parameters that are already gathered; drop it, or put {}RESHARD before it", .action.stage())]
    AlreadyUnsharded {
        /// The action.
        action: Action,
    },
    /// A weight gradient is computed after the stage's gradients were reduced.
    #[error("{action} adds to gradients that are already reduced; put {reduce} after it")]
    AfterReduce {
        /// The action that computes a weight gradient; for an overlap, its backward.
        action: Action,
        /// The reduction.
        reduce: Action,
    },
}

crate::error_text::message_as_debug!(ViolationKind);

/// Returns why an action on a slice needs that on another slice, for an error message.
fn why_slices(slices: Slices, action: Action, needs: Action) -> String {
    let place = |action: Action| action.microbatch().map(|number| slices.place(number));
    let (Some((microbatch, slice)), Some((_, other))) = (place(action), place(needs)) else {
        return String::new();
    };
    let stage = action.stage();
    match action.kind() {
        ActionKind::Forward => format!(
            "at stage {stage}, slice {slice} of microbatch {microbatch} attends to the keys and values of slice {other}"
        ),
        _ => format!(
            "at stage {stage}, slice {other} of microbatch {microbatch} adds to the gradients of the keys and values of \
             slice {slice}"
        ),
    }
}

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

/// Prints the first few of `blocked`, for an error message.
pub(crate) fn list_blocked(blocked: &[BlockedRank]) -> String {
    let named: Vec<String> = blocked.iter().take(8).map(ToString::to_string).collect();
    let more = if blocked.len() > named.len() { ", and more" } else { "" };
    named.join(", ") + more
}

/// Prints blocked ranks one after another. A thousand ranks may wait in one cycle, so the message names only
/// the first few.
struct Chain<'a>(&'a [BlockedRank]);

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMED: usize = 16;
        for (index, blocked) in self.0.iter().take(NAMED).enumerate() {
            write!(f, "{}{blocked}", if index == 0 { "" } else { ", " })?;
        }
        match self.0.len().saturating_sub(NAMED) {
            0 => Ok(()),
            rest => write!(f, ", and {rest} more"),
        }
    }
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
    pub(super) fn push(&mut self, rank: Rank, details: impl FnOnce() -> (usize, ViolationKind)) {
        if self.listed.len() < Self::LISTED {
            let (position, kind) = details();
            self.listed.push(Violation { rank, position, kind });
        } else {
            self.omitted += 1;
        }
    }

    /// Returns the number of violations.
    pub(crate) fn total(&self) -> u64 {
        self.listed.len() as u64 + self.omitted
    }

    pub(crate) fn into_violations(self, program: Program) -> Violations {
        Violations { program: Box::new(program), listed: self.listed, omitted: self.omitted }
    }
}
