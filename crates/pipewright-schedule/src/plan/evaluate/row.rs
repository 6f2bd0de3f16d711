//! One computation of a row, or two that overlap: when the tensors that they need arrive, when they end, and
//! what they send. The order in which the ranks run is in the parent module.
//!
//! The search runs these functions for every computation of every order that it tries.

use super::role::{Ended, Message, NONE, Role, UNKNOWN, role_of};
use crate::plan::order::Cell;
use crate::plan::second_forwards::is_recomputed_at;
use crate::simulate::alternation::{Halves, alternate};

/// The row of a rank, with the data of its computations.
pub(super) struct Row<'a> {
    pub(super) cells: &'a [Cell],
    /// The number of computations whose times are kept.
    pub(super) kept: usize,
    /// The roles of all stages.
    pub(super) roles: &'a [[Role; 4]],
    /// For each computation, whether it is recomputed or computes its forward again; may be empty.
    pub(super) again: &'a [bool],
}

impl Row<'_> {
    /// Returns the computation that overlaps with `cell`, which is at `position`.
    #[inline]
    pub(super) fn partner_of(&self, position: usize, cell: Cell) -> Option<Cell> {
        let partner = self.cells.get(position + 1).copied();
        // An overlap is taken apart if its backward has no weight gradients.
        partner.filter(|&partner| cell.overlaps && role_of(self.roles, partner).is_whole)
    }

    /// Returns the time of the second forward before a computation, if it has one.
    #[inline]
    fn again_before(&self, position: usize, role: &Role) -> Option<f64> {
        role.again.filter(|_| match self.again.get(position) {
            Some(&is_again) => is_again,
            None => is_recomputed_at(self.cells, position, |cell: Cell| role_of(self.roles, cell).is_dropped),
        })
    }

    /// Runs the computation `cell` after `before`. `arrival` is the time at which its tensor has arrived.
    #[inline]
    pub(super) fn run_alone(&self, position: usize, cell: Cell, before: Ended, arrival: f64) -> Ended {
        let role = role_of(self.roles, cell);
        let now = before.at + self.again_before(position, role).unwrap_or(0.0);
        Ended {
            at: now.max(arrival) + role.takes,
            rest: before.rest - role.work.compute,
            has_waited: arrival > now,
        }
    }

    /// Runs two computations that overlap. `arrival` is the time at which the tensors of both have arrived.
    #[inline]
    pub(super) fn run_overlap(
        &self,
        position: usize,
        [cell, partner]: [Cell; 2],
        before: Ended,
        arrival: f64,
    ) -> Ended {
        let [role, other] = [cell, partner].map(|cell| role_of(self.roles, cell));
        let now = before.at;
        let again = self.again_before(position + 1, other).map(|_| other.work_again);
        let both = [again.unwrap_or(other.work), other.work];
        let second = if again.is_some() { &both[..] } else { &both[1..] };
        let are_of_one_stage = cell.stage == partner.stage;
        let halves = Halves { works: [&[role.work], second], are_of_one_stage };
        Ended {
            at: alternate(now.max(arrival), halves, |_| {}),
            rest: before.rest - role.work.compute - other.work.compute,
            has_waited: arrival > now,
        }
    }
}

/// The tensors of an evaluation, and the ranks that wait for them.
pub(super) struct Tensors<'a> {
    pub(super) messages: &'a mut [Message],
    /// The messages that this evaluation has replaced.
    pub(super) replaced: &'a mut Vec<(usize, Message)>,
    /// The time from which each link is free, or [`UNKNOWN`].
    pub(super) free: &'a mut [f64],
    /// The tensor that each rank waits for.
    pub(super) waits: &'a mut [Option<usize>],
    pub(super) ready: &'a mut Vec<u32>,
    /// Computations that ended before this time keep their times.
    pub(super) since: f64,
    pub(super) evaluation: u32,
}

impl Tensors<'_> {
    /// Returns the time, from `now` on, at which the tensors that `cells` need have arrived, or a tensor whose
    /// time is not known.
    #[inline]
    pub(super) fn arrival_of(
        &self,
        row: &Row<'_>,
        mut cells: impl Iterator<Item = Cell>,
        now: f64,
    ) -> Result<f64, usize> {
        cells.try_fold(now, |latest, cell| {
            let needs = role_of(row.roles, cell).needs;
            if needs == NONE {
                return Ok(latest);
            }
            let message = &self.messages[needs + cell.microbatch as usize];
            let is_unknown = message.evaluation != self.evaluation && message.sent >= self.since;
            if is_unknown { Err(needs + cell.microbatch as usize) } else { Ok(latest.max(message.arrival)) }
        })
    }

    /// Sends what `cell` computes, which is at `position` and has ended at `sent`, and wakes the rank that
    /// waits for it.
    #[inline]
    pub(super) fn send(&mut self, row: &Row<'_>, position: usize, cell: Cell, sent: f64) {
        let role = role_of(row.roles, cell);
        if role.sends == NONE {
            return;
        }
        let target = role.sends + cell.microbatch as usize;
        let (mut free, mut arrival) = (0.0, sent);
        let link = role.route.link;
        if let Some(link_free) = self.free.get_mut(link as usize) {
            if *link_free == UNKNOWN {
                *link_free = freed(row.roles, self.messages, &row.cells[..row.kept], link);
            }
            arrival = role.route.send(link_free, sent);
            free = *link_free;
        }
        let (evaluation, position) = (self.evaluation, position as u32);
        let message = Message { sent, arrival, free, evaluation, position };
        self.replaced.push((target, std::mem::replace(&mut self.messages[target], message)));
        let receiver = role.receiver as usize;
        if self.waits[receiver] == Some(target) {
            self.waits[receiver] = None;
            self.ready.push(role.receiver);
        }
    }
}

/// Returns the time from which a link is free after the kept computations of the rank that sends on it; 0 if
/// none did.
fn freed(roles: &[[Role; 4]], messages: &[Message], kept: &[Cell], link: u32) -> f64 {
    let sends = |cell: &&Cell| role_of(roles, **cell).route.link == link;
    let last = kept.iter().rev().find(sends);
    last.map_or(0.0, |&cell| messages[role_of(roles, cell).sends + cell.microbatch as usize].free)
}
