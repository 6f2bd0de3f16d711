//! The rule of progress: all ranks reach their end, even if a send blocks until it is received.
//!
//! The rows run together without tensors. A rank waits at its next action until that can complete:
//!
//! - At the level `compute`, an action completes once the action on another rank that makes its input or its
//!   gradient has completed.
//! - At other levels, a send and its receive complete together, when both ranks have reached them. A send
//!   with a wait (`WAIT_SEND_F`, `WAIT_SEND_B`) completes at once. Its receive completes after the send, and
//!   the wait after the receive.
//!
//! With several batches, a computation also waits until all ranks have ended the batch whose update it needs
//! ([`crate::batch_gate`]).
//!
//! Every blocked rank waits for one other rank, so if no rank can advance, some ranks wait in a cycle.
//! Messages without a counterpart do not block here; [`super::matching`] reports them. Every action completes
//! at most once and is visited a bounded number of times, so the run takes linear time. Its result does not
//! depend on the order in which ranks run, because completing an action never blocks another.

use crate::action::{Action, ActionKind};
use crate::action_set::ActionSet;
use crate::batch_gate::BatchGate;
use crate::ids::{Rank, StageIndex};
use crate::level::Level;
use crate::neighbours::Neighbour;
use crate::row_cursors::RowReaders;
use crate::transfer::Transfer;
use crate::validate::context::Context;
use crate::validate::violation::{BlockedRank, Report, list_blocked};

/// The state of the ranks during the run.
pub(super) struct Run<'a> {
    context: &'a Context<'a>,
    /// The next action of each rank.
    rows: RowReaders<'a, Action>,
    /// For each blocked rank, the rank that it waits for.
    waits_for: Vec<Option<Rank>>,
    /// The ranks that may be able to advance.
    ready: Vec<Rank>,
    /// The completed actions, or started ones for sends with a wait. Empty and unused in rendezvous mode.
    done: ActionSet,
    /// The rest of each batch; `None` for a single batch.
    batches: Option<BatchGate>,
}

impl<'a> Run<'a> {
    /// Runs all ranks until each is blocked or at its end. `rendezvous` means that every message has exactly
    /// its two ends and that no send has a wait. Then both ends complete together, and completed actions need
    /// not be recorded.
    pub(super) fn execute(context: &'a Context<'a>, rendezvous: bool) -> Self {
        let ranks = context.program.ranks() as usize;
        let mut run = Self {
            context,
            rows: RowReaders::over(context.program.rows()),
            waits_for: vec![None; ranks],
            ready: context.program.placement().all_ranks().rev().collect(),
            done: if rendezvous { ActionSet::sized(0, 0) } else { ActionSet::for_program(context.program) },
            batches: BatchGate::over(context.program.numbering(), context.program.rows()),
        };
        while let Some(rank) = run.ready.pop() {
            if rendezvous {
                run.advance_rendezvous(rank);
            } else {
                run.advance(rank);
            }
        }
        run.name_ranks_behind();
        run
    }

    /// Names a rank that has not ended the batch for each rank that still waits for an update. The rank from the beginning
    /// of the wait may have ended it since.
    fn name_ranks_behind(&mut self) {
        let Some(batches) = &self.batches else { return };
        for rank in self.context.program.placement().all_ranks() {
            let closed = self.rows.current(rank).and_then(|action| batches.closed_for(action));
            if let Some(batch) = closed {
                self.waits_for[rank.index()] = batches.behind(batch);
            }
        }
    }

    /// Returns whether a rank did not reach its end.
    pub(super) fn is_stuck(&self) -> bool {
        self.waits_for.iter().any(Option::is_some)
    }

    /// Runs `rank` until it is blocked or at its end.
    fn advance(&mut self, rank: Rank) {
        while let Some(action) = self.rows.current(rank) {
            if self.waits_for_update(rank, action) {
                return;
            }
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

    /// Does the same as [`Run::advance`] in rendezvous mode, in which a message completes when both its ends
    /// are reached.
    fn advance_rendezvous(&mut self, rank: Rank) {
        while let Some(action) = self.rows.current(rank) {
            if self.waits_for_update(rank, action) {
                return;
            }
            if let Some((peer, counterpart)) =
                self.context.neighbours.peer(action).zip(Transfer::other_end(action))
            {
                if self.rows.current(peer) != Some(counterpart) {
                    self.waits_for[rank.index()] = Some(peer);
                    return;
                }
                self.rows.step(peer);
                // If it does not wait, it is in `ready` already.
                if self.waits_for[peer.index()].take().is_some() {
                    self.ready.push(peer);
                }
            }
            self.rows.step(rank);
            self.note_computed(rank, action);
        }
    }

    /// Returns whether `action` waits for the update of a batch that some rank has not ended.
    fn waits_for_update(&mut self, rank: Rank, action: Action) -> bool {
        let Some(batches) = &mut self.batches else { return false };
        let Some(batch) = batches.closed_for(action) else { return false };
        self.waits_for[rank.index()] = Some(batches.wait(rank, batch));
        true
    }

    /// Counts a computation, and wakes the ranks that wait for the batch that it has ended.
    fn note_computed(&mut self, rank: Rank, action: Action) {
        let Some(batches) = &mut self.batches else { return };
        let (waits_for, ready) = (&mut self.waits_for, &mut self.ready);
        batches.computed(rank, action, |_, woken| {
            woken.iter().for_each(|woken| waits_for[woken.index()] = None);
            ready.extend(woken);
        });
    }

    /// Moves `rank` past `action`, and wakes the ranks that may wait for it.
    fn complete(&mut self, rank: Rank, action: Action) {
        self.rows.step(rank);
        self.waits_for[rank.index()] = None;
        self.note_computed(rank, action);
        if self.context.level != Level::Compute && !action.is_communication() {
            // Ranks wait only for messages at this level.
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

    /// Returns the rank whose computation `action` waits for, if any.
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

    /// Returns the rank that must reach the other end of the message of `action`, if any. If both ends are
    /// reached, it also moves the peer past its end.
    fn blocker_of_message(&mut self, rank: Rank, action: Action) -> Option<Rank> {
        let peer = self.context.neighbours.peer(action)?;
        let counterpart = Transfer::other_end(action)?;
        if self.completes_alone(rank, peer, action, counterpart) {
            return None;
        }
        if action.kind().is_wait_for_send() || self.rows.current(peer) != Some(counterpart) {
            return Some(peer);
        }
        self.complete(peer, counterpart);
        self.ready.push(peer);
        None
    }

    /// Returns whether `action` completes without waiting for the peer's `counterpart`.
    fn completes_alone(&self, rank: Rank, peer: Rank, action: Action, counterpart: Action) -> bool {
        let present = &self.context.present;
        let own = match action.kind() {
            ActionKind::WaitSendForward => action.with_kind(ActionKind::SendForward),
            ActionKind::WaitSendBackward => action.with_kind(ActionKind::SendBackward),
            _ => Some(action),
        };
        !own.is_some_and(|own| present.contains(own))
            || !present.contains(counterpart)
            || self.done.contains(counterpart)
            || peer == rank
            || self.is_waited_for(action)
    }

    /// Returns whether `send` has a wait, so that it only starts a message.
    fn is_waited_for(&self, send: Action) -> bool {
        send.wait_of_send().is_some_and(|wait| self.context.present.contains(wait))
    }

    /// Reports every cycle of ranks that wait for each other. It follows each blocked rank to the rank that
    /// it waits for, until a rank repeats.
    pub(super) fn report_cycles(&self, report: &mut Report) {
        // The walk that first reached each rank; a walk that reaches one of its own ranks has found a cycle.
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
        let problem = || format!("deadlock: {}; break the cycle", list_blocked(&cycle));
        report.push(first, || (self.rows.passed(first).len(), problem()));
    }
}
