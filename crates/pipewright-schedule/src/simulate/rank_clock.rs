//! The time of one rank in the timed simulation: its computations, its waits and its collectives.

use crate::simulate::boundary_tensors::Arrival;

/// The clock of a rank.
#[derive(Debug, Clone, Default)]
pub(super) struct RankClock {
    /// The time at which its actions so far have ended.
    now: f64,
    /// The time at which its collectives have ended.
    collectives: f64,
    exposed: f64,
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
