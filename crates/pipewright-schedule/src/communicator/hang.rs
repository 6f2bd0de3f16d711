//! The cycle of ranks and operations that wait for each other in a program that does not finish.

use std::collections::HashMap;
use std::fmt;

use crate::action::Action;
use crate::communicator::model::Streams;
use crate::communicator::run::{Given, Run};
use crate::ids::Rank;
use crate::transfer::Transfer;

/// An action that cannot complete, and what it waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hold {
    /// The rank of the action.
    pub rank: Rank,
    /// The position of the action in the row of its rank.
    pub position: usize,
    /// The action.
    pub action: Action,
    /// The reason why it waits.
    pub reason: Reason,
}

/// The reason why an action waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// A computation or a wait needs a message of its own rank.
    Message(Action),
    /// A computation needs the parameters after the update with a batch that a rank has not ended.
    Update {
        /// The rank that has computations of the batch left.
        rank: Rank,
        /// The batch.
        batch: u32,
    },
    /// An operation before it in its stream has not completed.
    Behind(Action),
    /// The operation that it meets is in a stream of another rank, but does not run.
    Counterpart {
        /// The other rank.
        rank: Rank,
        /// The operation that it meets.
        action: Action,
    },
    /// Another rank has not come to the operation that it meets.
    NotReached {
        /// The other rank.
        rank: Rank,
        /// The operation that it meets.
        action: Action,
    },
}

impl fmt::Display for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, position, action, reason } = self;
        write!(f, "rank {rank} at position {position} ({action}) {reason}")
    }
}

impl fmt::Display for Reason {
    /// Completes a sentence whose subject is the action.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Message(message) => write!(f, "waits for {message}"),
            Self::Update { rank, batch } => write!(f, "waits for the end of batch {batch} on rank {rank}"),
            Self::Behind(first) => write!(f, "runs after {first}, which is before it in its stream"),
            Self::Counterpart { rank, action } => write!(f, "waits for {action} of rank {rank}"),
            Self::NotReached { rank, action } => {
                write!(f, "waits for {action}, which rank {rank} has not reached")
            }
        }
    }
}

/// A part of a rank that waits.
enum Waiting {
    /// The row, at its next action.
    Row(Rank),
    /// An operation in a stream.
    Operation(Rank, Given),
}

/// Returns the cycle of actions that wait for each other, each for the next one and the last one for the
/// first; empty if the run has finished.
pub(super) fn cycle(run: &Run<'_>, streams: Streams, ranks: impl Iterator<Item = Rank>) -> Vec<Hold> {
    let Some(mut waiting) = ranks.into_iter().find_map(|rank| first_waiting(run, rank)) else {
        return Vec::new();
    };
    let mut holds: Vec<Hold> = Vec::new();
    let mut seen: HashMap<(Rank, usize), usize> = HashMap::new();
    while let Some((hold, next)) = step(run, streams, &waiting) {
        if let Some(&first) = seen.get(&(hold.rank, hold.position)) {
            return holds.split_off(first);
        }
        seen.insert((hold.rank, hold.position), holds.len());
        holds.push(hold);
        let Some(next) = next else { break };
        waiting = next;
    }
    holds
}

fn first_waiting(run: &Run<'_>, rank: Rank) -> Option<Waiting> {
    if run.next(rank).is_some() {
        return Some(Waiting::Row(rank));
    }
    let left = run.first_left(rank)?;
    Some(Waiting::Operation(rank, run.given(rank, left.action)?))
}

/// Returns what `waiting` waits for, and the part of a rank that has to advance first.
fn step(run: &Run<'_>, streams: Streams, waiting: &Waiting) -> Option<(Hold, Option<Waiting>)> {
    match waiting {
        Waiting::Row(rank) => {
            let rank = *rank;
            let (position, action) = run.next(rank)?;
            let hold = |reason| Hold { rank, position, action, reason };
            let Some(message) = run.blocker(action) else {
                let (batch, behind) = run.awaited_update(action)?;
                return Some((hold(Reason::Update { rank: behind, batch }), Some(Waiting::Row(behind))));
            };
            if streams == Streams::Buffered {
                let transfer = Transfer::of(run.placement(), message)?;
                let reason = Reason::NotReached { rank: transfer.sender, action: transfer.send };
                return Some((hold(reason), Some(Waiting::Row(transfer.sender))));
            }
            let next = run.given(rank, message).map(|given| Waiting::Operation(rank, given));
            Some((hold(Reason::Message(message)), next))
        }
        Waiting::Operation(rank, given) => {
            let rank = *rank;
            let operation = given.operation;
            let hold = |reason| Hold { rank, position: operation.position, action: operation.action, reason };
            if let Some(first) = given.behind {
                let next = run.given(rank, first.action).map(|given| Waiting::Operation(rank, given));
                return Some((hold(Reason::Behind(first.action)), next));
            }
            let peer = operation.peer;
            if let Some(given) = run.counterpart(rank, &operation) {
                let reason = Reason::Counterpart { rank: peer, action: given.operation.action };
                return Some((hold(reason), Some(Waiting::Operation(peer, given))));
            }
            let action = Transfer::other_end(operation.action)?;
            Some((hold(Reason::NotReached { rank: peer, action }), Some(Waiting::Row(peer))))
        }
    }
}
