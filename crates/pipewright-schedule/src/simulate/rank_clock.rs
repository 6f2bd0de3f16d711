//! The time of one rank in the timed simulation: its computations, its waits and its collectives.

use crate::ids::Rank;
use crate::simulate::alternation::{Halves, Piece, alternate, is_exchange};
use crate::simulate::boundary_tensors::Arrival;
use crate::simulate::tape::{CostOf, Moment, Tape};
use crate::simulate::timed_run::PredictedExchange;

/// The clock of a rank.
#[derive(Debug, Clone)]
pub(super) struct RankClock {
    rank: Rank,
    /// The time at which its actions so far have ended.
    now: Moment,
    /// The time at which its collectives have ended.
    collectives: Moment,
    /// The time at which its transfers out of memory and back have ended.
    transfers: Moment,
    exposed: f64,
    exchange: PredictedExchange,
}

impl RankClock {
    pub(super) fn new(rank: Rank) -> Self {
        let (now, collectives, transfers) = Default::default();
        Self { rank, now, collectives, transfers, exposed: 0.0, exchange: PredictedExchange::default() }
    }

    /// Returns the time at which the actions of the rank so far have ended.
    pub(super) fn now(&self) -> Moment {
        self.now
    }

    /// Returns how long the rank has waited for communication in flight.
    pub(super) fn exposed(&self) -> f64 {
        self.exposed
    }

    /// Returns how long the rank has exchanged tokens, and waited for that.
    pub(super) fn exchange(&self) -> PredictedExchange {
        self.exchange
    }

    /// Counts the exchanges of an action that runs alone: the rank waits for all of them.
    pub(super) fn note_exposed_exchange(&mut self, seconds: f64) {
        self.exchange.seconds += seconds;
        self.exchange.exposed += seconds;
    }

    /// Runs the halves of an overlap after the last of `arrivals`, and returns their pieces in the order in
    /// which they begin.
    pub(super) fn alternate(
        &mut self,
        tape: &mut Tape,
        arrivals: impl IntoIterator<Item = Arrival>,
        halves: Halves<'_>,
    ) -> (Moment, Vec<Piece>) {
        let start = self.wait_for(tape, arrivals);
        let mut pieces = Vec::new();
        let end = alternate(start.at, halves, |piece| pieces.push(piece));
        self.now = Moment { at: end, ..tape.after(self.rank, start, CostOf::Other, end - start.at) };
        for piece in &pieces {
            if is_exchange(piece.position) {
                self.exchange.seconds += piece.end - piece.start;
            } else {
                self.exchange.exposed += piece.idle;
            }
        }
        (start, pieces)
    }

    /// Idles until `until`. The wait does not count as communication.
    pub(super) fn idle_until(&mut self, tape: &mut Tape, until: Moment) {
        self.now = tape.latest(self.rank, [self.now, until]);
    }

    /// Computes for a cost after the last of `arrivals`, and returns the start and the end.
    pub(super) fn compute(
        &mut self,
        tape: &mut Tape,
        arrivals: impl IntoIterator<Item = Arrival>,
        cost: (CostOf, f64),
    ) -> (Moment, Moment) {
        let start = self.wait_for(tape, arrivals);
        self.now = tape.after(self.rank, start, cost.0, cost.1);
        (start, self.now)
    }

    /// Waits for the last of `arrivals`, and returns its time. The wait counts as exposed from the time at
    /// which the message is in flight.
    fn wait_for(&mut self, tape: &mut Tape, arrivals: impl IntoIterator<Item = Arrival>) -> Moment {
        let (now, mut issued, mut at) = (self.now, self.now.at, self.now.at);
        let ends = arrivals.into_iter().map(|arrival| {
            if arrival.at.at > at {
                (issued, at) = (arrival.issued.at, arrival.at.at);
            }
            arrival.at
        });
        self.now = tape.latest(self.rank, [now].into_iter().chain(ends));
        self.exposed += at - issued.max(now.at);
        self.now
    }

    /// Waits until `until` for communication, and returns the start and the end of the wait.
    pub(super) fn wait_until(&mut self, tape: &mut Tape, until: Moment) -> (Moment, Moment) {
        let start = self.now;
        self.now = tape.latest(self.rank, [start, until]);
        self.exposed += self.now.at - start.at;
        (start, self.now)
    }

    /// Runs a collective in parallel with the computation, after the collectives before it, and returns its
    /// start and its end.
    pub(super) fn run_collective(&mut self, tape: &mut Tape, duration: f64) -> (Moment, Moment) {
        let start = tape.latest(self.rank, [self.collectives, self.now]);
        self.collectives = tape.after(self.rank, start, CostOf::Other, duration);
        (start, self.collectives)
    }

    /// Moves tensors out of memory or back in parallel with the computation, after the transfers before it, and
    /// returns its start and its end.
    pub(super) fn run_transfer(&mut self, tape: &mut Tape, duration: f64) -> (Moment, Moment) {
        let start = tape.latest(self.rank, [self.transfers, self.now]);
        self.transfers = tape.after(self.rank, start, CostOf::Other, duration);
        (start, self.transfers)
    }
}
