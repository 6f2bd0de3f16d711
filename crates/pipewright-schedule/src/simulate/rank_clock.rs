//! The time of one rank in the timed simulation: its computations, its waits and its collectives.

use crate::simulate::alternation::{Piece, Work, alternate, is_exchange};
use crate::simulate::boundary_tensors::Arrival;
use crate::simulate::timed_run::ExchangeTime;

/// The clock of a rank.
#[derive(Debug, Clone, Default)]
pub(super) struct RankClock {
    /// The time at which its actions so far have ended.
    now: f64,
    /// The time at which its collectives have ended.
    collectives: f64,
    exposed: f64,
    exchange: ExchangeTime,
}

/// An action with exchanges that a rank runs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Computation {
    /// What it waits for last.
    pub(super) arrival: Option<Arrival>,
    pub(super) work: Work,
}

impl Computation {
    /// Returns an action that takes the time of `work` after the last of `arrivals`.
    pub(super) fn after(arrivals: [Option<Arrival>; 2], work: Work) -> Self {
        let arrival =
            arrivals.into_iter().flatten().reduce(|one, other| if other.at > one.at { other } else { one });
        Self { arrival, work: Work { arrival: arrival.map_or(0.0, |arrival| arrival.at), ..work } }
    }
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
    pub(super) fn exchange(&self) -> ExchangeTime {
        self.exchange
    }

    /// Counts the exchanges of an action that runs alone: the rank waits for all of them.
    pub(super) fn note_exposed_exchange(&mut self, seconds: f64) {
        self.exchange.seconds += seconds;
        self.exchange.exposed += seconds;
    }

    /// Runs two halves together, each a list of actions, and returns their pieces in the order in which they
    /// begin.
    pub(super) fn alternate(&mut self, halves: [&[Computation]; 2]) -> Vec<Piece> {
        let works = halves.map(|half| half.iter().map(|computation| computation.work).collect::<Vec<Work>>());
        let mut pieces = Vec::new();
        self.now = alternate(self.now, [&works[0], &works[1]], |piece| pieces.push(piece));
        for piece in &pieces {
            if is_exchange(piece.position) {
                self.exchange.seconds += piece.end - piece.start;
            } else if piece.position > 0 {
                self.exchange.exposed += piece.idle;
            } else if let Some(arrival) = halves[piece.half][piece.work].arrival {
                // Only the time in which the message is in flight counts.
                self.exposed += (piece.start - arrival.issued).min(piece.idle).max(0.0);
            }
        }
        pieces
    }

    /// Computes for `duration` after the last of `arrivals`, and returns the start and the end. The wait for a
    /// message counts as exposed from the time at which the message is in flight.
    pub(super) fn compute(&mut self, arrivals: [Option<Arrival>; 2], duration: f64) -> (f64, f64) {
        let mut latest = Arrival { issued: self.now, at: self.now };
        for arrival in arrivals.into_iter().flatten() {
            if arrival.at > latest.at {
                latest = arrival;
            }
        }
        self.exposed += latest.at - latest.issued.max(self.now);
        self.now = latest.at + duration;
        (latest.at, self.now)
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
}
