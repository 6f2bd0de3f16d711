//! The time of one rank in the timed simulation: its computations, its waits and its collectives.

use crate::simulate::alternation::{Halves, Piece, alternate, is_exchange};
use crate::simulate::boundary_tensors::Arrival;
use crate::simulate::timed_run::PredictedExchange;

/// The clock of a rank.
#[derive(Debug, Clone, Default)]
pub(super) struct RankClock {
    /// The time at which its actions so far have ended.
    now: f64,
    /// The time at which its collectives have ended.
    collectives: f64,
    /// The time at which its transfers out of memory and back have ended.
    transfers: f64,
    exposed: f64,
    exchange: PredictedExchange,
}

impl RankClock {
    /// Returns the time at which the actions of the rank so far have ended.
    pub(super) fn now(&self) -> f64 {
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
        arrivals: impl IntoIterator<Item = Arrival>,
        halves: Halves<'_>,
    ) -> Vec<Piece> {
        let start = self.wait_for(arrivals);
        let mut pieces = Vec::new();
        self.now = alternate(start, halves, |piece| pieces.push(piece));
        for piece in &pieces {
            if is_exchange(piece.position) {
                self.exchange.seconds += piece.end - piece.start;
            } else {
                self.exchange.exposed += piece.idle;
            }
        }
        pieces
    }

    /// Computes for `duration` after the last of `arrivals`, and returns the start and the end.
    pub(super) fn compute(
        &mut self,
        arrivals: impl IntoIterator<Item = Arrival>,
        duration: f64,
    ) -> (f64, f64) {
        let start = self.wait_for(arrivals);
        self.now = start + duration;
        (start, self.now)
    }

    /// Waits for the last of `arrivals`, and returns its time. The wait counts as exposed from the time at
    /// which the message is in flight.
    fn wait_for(&mut self, arrivals: impl IntoIterator<Item = Arrival>) -> f64 {
        let mut latest = Arrival { issued: self.now, at: self.now };
        for arrival in arrivals {
            if arrival.at > latest.at {
                latest = arrival;
            }
        }
        self.exposed += latest.at - latest.issued.max(self.now);
        self.now = latest.at;
        self.now
    }

    /// Waits until `until` for communication, and returns the start and the end of the wait.
    pub(super) fn wait_until(&mut self, until: f64) -> (f64, f64) {
        let start = self.now;
        self.now = until.max(start);
        self.exposed += self.now - start;
        (start, self.now)
    }

    /// Runs a collective in parallel with the computation, after the collectives before it, and returns its
    /// start and its end.
    pub(super) fn run_collective(&mut self, duration: f64) -> (f64, f64) {
        let start = self.collectives.max(self.now);
        self.collectives = start + duration;
        (start, self.collectives)
    }

    /// Moves tensors out of memory or back in parallel with the computation, after the transfers before it, and
    /// returns its start and its end.
    pub(super) fn run_transfer(&mut self, duration: f64) -> (f64, f64) {
        let start = self.transfers.max(self.now);
        self.transfers = start + duration;
        (start, self.transfers)
    }
}
