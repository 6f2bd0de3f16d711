//! The ranks together reach the end, even where a send completes only when it is received.
//!
//! The rows are run against each other without tensors. A rank stands at its next action until that can
//! complete:
//!
//! - At the level `compute`, an action completes once the action on another rank that makes its input or its
//!   gradient is done.
//! - Else a send and its receive complete together, when both ranks stand at them. A send that is waited for
//!   later (`WAIT_SEND_F`, `WAIT_SEND_B`) only starts, and completes at once; the receive completes once it
//!   has started, and the wait once it is received.
//!
//! Every blocked rank waits for one other rank, so when nothing can go on, ranks wait in a circle. Messages
//! without a counterpart are reported by [`super::matching`] and block nobody here. Every action is left
//! exactly once and looked at a bounded number of times, so the run is linear, and its outcome does not
//! depend on the order in which ranks are run: completing one action never takes another's chance.

use crate::action::Action;
use crate::action_set::ActionSet;
use crate::ids::{Rank, StageIndex};
use crate::level::Level;
use crate::neighbours::Neighbour;
use crate::row_cursors::RowReaders;
use crate::transfer::Transfer;
use crate::validate::context::Context;
use crate::validate::violation::{BlockedRank, Report, ViolationKind};

/// The ranks on their way through their rows.
pub(super) struct Run<'a> {
    context: &'a Context<'a>,
    /// The action at which each rank stands.
    rows: RowReaders<'a, Action>,
    /// For each blocked rank, the rank that it waits for.
    waits_for: Vec<Option<Rank>>,
    /// The ranks that can be tried.
    ready: Vec<Rank>,
    /// The actions that are complete, or for a send that is waited for later, started; none where all is
    /// rendezvous.
    done: ActionSet,
}

impl<'a> Run<'a> {
    /// Runs all ranks until each is blocked or at its end. `rendezvous` says that every message has exactly its two
    /// ends, and that no send is waited for later: then both ends complete together, and nothing need be
    /// remembered of them.
    pub(super) fn execute(context: &'a Context<'a>, rendezvous: bool) -> Self {
        let ranks = context.program.ranks() as usize;
        let mut run = Self {
            context,
            rows: RowReaders::over(context.program.rows()),
            waits_for: vec![None; ranks],
            ready: context.program.placement().all_ranks().rev().collect(),
            done: if rendezvous { ActionSet::sized(0, 0) } else { ActionSet::for_program(context.program) },
        };
        while let Some(rank) = run.ready.pop() {
            if rendezvous {
                run.advance_rendezvous(rank);
            } else {
                run.advance(rank);
            }
        }
        run
    }

    /// Whether a rank did not come to its end.
    pub(super) fn is_stuck(&self) -> bool {
        self.waits_for.iter().any(Option::is_some)
    }

    /// Runs `rank` until it is blocked or at its end.
    fn advance(&mut self, rank: Rank) {
        while let Some(action) = self.rows.current(rank) {
            let blocker = match self.context.level {
                Level::Compute => self.blocker_of_compute(rank, action),
                Level::Comms | Level::Full => self.blocker_of_message(rank, action),
            };
            self.waits_for[rank.index()] = blocker;
            if blocker.is_some() {
                return;
            }
            self.complete(rank, action);
        }
    }

    /// As [`Run::advance`], where a message completes exactly when both its ends are reached.
    fn advance_rendezvous(&mut self, rank: Rank) {
        while let Some(action) = self.rows.current(rank) {
            if let Some((peer, counterpart)) =
                self.context.neighbours.peer(action).zip(Transfer::other_end(action))
            {
                if self.rows.current(peer) != Some(counterpart) {
                    self.waits_for[rank.index()] = Some(peer);
                    return;
                }
                self.rows.step(peer);
                // Where it does not wait, it is still to be tried.
                if self.waits_for[peer.index()].take().is_some() {
                    self.ready.push(peer);
                }
            }
            self.rows.step(rank);
        }
    }

    /// Steps `rank` over `action`, and wakes the ranks that may have waited for it.
    fn complete(&mut self, rank: Rank, action: Action) {
        self.rows.step(rank);
        self.waits_for[rank.index()] = None;
        if self.context.level != Level::Compute && !action.is_communication() {
            // Nobody waits for computation itself where its results are sent.
            return;
        }
        for part in action.parts() {
            self.done.insert(part);
            let neighbours = &self.context.neighbours;
            for neighbour in [neighbours.before(part.stage()), neighbours.after(part.stage())] {
                if let Neighbour::OtherRank(peer) = neighbour
                    && self.waits_for[peer.index()] == Some(rank)
                {
                    self.waits_for[peer.index()] = None;
                    self.ready.push(peer);
                }
            }
        }
    }

    /// The rank whose computation `action` waits for, if any.
    fn blocker_of_compute(&self, rank: Rank, action: Action) -> Option<Rank> {
        let placement = self.context.program.placement();
        let unfinished = |stage: StageIndex, source: Action| {
            let owner = placement.rank_of(stage);
            let waits = owner != rank && self.context.present.contains(source) && !self.done.contains(source);
            waits.then_some(owner)
        };
        action.parts().find_map(|part| match part {
            Action::Forward { stage, microbatch } => {
                let previous = placement.previous(stage)?;
                unfinished(previous, Action::Forward { stage: previous, microbatch })
            }
            Action::Backward { stage, microbatch } | Action::InputBackward { stage, microbatch } => {
                let next = placement.next(stage)?;
                unfinished(next, self.context.present.input_gradient(next, microbatch))
            }
            _ => None,
        })
    }

    /// The rank that must come to the other end of the message of `action`, if any. Where both ends are
    /// reached, the peer is stepped over its end.
    fn blocker_of_message(&mut self, rank: Rank, action: Action) -> Option<Rank> {
        let peer = self.context.neighbours.peer(action)?;
        let counterpart = Transfer::other_end(action)?;
        if self.completes_alone(rank, peer, action, counterpart) {
            return None;
        }
        let is_wait = matches!(action, Action::WaitSendForward { .. } | Action::WaitSendBackward { .. });
        if is_wait || self.rows.current(peer) != Some(counterpart) {
            return Some(peer);
        }
        self.complete(peer, counterpart);
        self.ready.push(peer);
        None
    }

    /// Whether `action` completes at once, without the peer's `counterpart`.
    fn completes_alone(&self, rank: Rank, peer: Rank, action: Action, counterpart: Action) -> bool {
        let present = &self.context.present;
        let own = match action {
            Action::WaitSendForward { stage, microbatch } => Action::SendForward { stage, microbatch },
            Action::WaitSendBackward { stage, microbatch } => Action::SendBackward { stage, microbatch },
            other => other,
        };
        !present.contains(own)
            || !present.contains(counterpart)
            || self.done.contains(counterpart)
            || peer == rank
            || self.is_waited_for(action)
    }

    /// Whether `send` only starts a message, because its completion is waited for elsewhere.
    fn is_waited_for(&self, send: Action) -> bool {
        match send {
            Action::SendForward { stage, microbatch } => {
                self.context.present.contains(Action::WaitSendForward { stage, microbatch })
            }
            Action::SendBackward { stage, microbatch } => {
                self.context.present.contains(Action::WaitSendBackward { stage, microbatch })
            }
            _ => false,
        }
    }

    /// Reports every circle of ranks that wait for each other. It follows each blocked rank to the one it waits
    /// for, until a rank comes again.
    pub(super) fn report_cycles(&self, report: &mut Report) {
        // The walk in which a rank was first met; a walk that meets itself has found a circle.
        let mut walks: Vec<Option<Rank>> = vec![None; self.waits_for.len()];
        for start in self.context.program.placement().all_ranks() {
            let mut rank = start;
            while let (Some(next), None) = (self.waits_for[rank.index()], walks[rank.index()]) {
                walks[rank.index()] = Some(start);
                rank = next;
            }
            if walks[rank.index()] == Some(start) {
                self.report_cycle(rank, report);
            }
        }
    }

    fn report_cycle(&self, first: Rank, report: &mut Report) {
        let mut cycle = Vec::new();
        let mut rank = first;
        while let (Some(waits_for), Some(action)) = (self.waits_for[rank.index()], self.rows.current(rank)) {
            cycle.push(BlockedRank { rank, position: self.rows.passed(rank).len(), action, waits_for });
            rank = waits_for;
            if rank == first {
                break;
            }
        }
        report.push(first, || (self.rows.passed(first).len(), ViolationKind::Deadlock { cycle }));
    }
}
