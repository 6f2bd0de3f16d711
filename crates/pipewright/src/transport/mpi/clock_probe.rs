//! Measures the difference between this process's clock and the first process's clock: several round trips at
//! the start, and several more at intervals, because clocks drift.
//!
//! Only this file decides when a request is sent. One request is under way at a time, so a slow answer delays
//! nothing else.

use std::time::{Duration, Instant};

use crate::transport::clock::{ClockOffset, RoundTrip, best};

/// Round trips of a measurement. The shortest counts; a trip is long if one of the two MPI threads sleeps
/// meanwhile.
const TRIPS: usize = 16;
/// The time between two measurements.
const INTERVAL: Duration = Duration::from_secs(1);

/// The measurements of one process.
pub(super) struct ClockProbe {
    /// The completed trips of the current measurement.
    trips: Vec<RoundTrip>,
    /// Whether an answer is under way.
    pub(super) is_waiting: bool,
    /// The time at which the next measurement begins.
    next: Instant,
}

impl ClockProbe {
    /// Returns a probe that begins to measure at `at`.
    pub(super) fn new(at: Instant) -> Self {
        Self { trips: Vec::with_capacity(TRIPS), is_waiting: false, next: at }
    }

    /// Returns whether a measurement has begun and is not complete.
    pub(super) fn is_measuring(&self) -> bool {
        self.is_waiting || !self.trips.is_empty()
    }

    /// Returns whether a request must be sent. The caller sends it.
    pub(super) fn is_due(&mut self, at: Instant) -> bool {
        let is_due = !self.is_waiting && (!self.trips.is_empty() || at >= self.next);
        self.is_waiting |= is_due;
        is_due
    }

    /// Adds an answer. Returns the measured difference when the measurement is complete.
    pub(super) fn answer(&mut self, trip: RoundTrip, at: Instant) -> Option<ClockOffset> {
        self.is_waiting = false;
        self.trips.push(trip);
        if self.trips.len() < TRIPS {
            return None;
        }
        self.next = at + INTERVAL;
        let offset = best(&self.trips);
        self.trips.clear();
        offset
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::clock::Nanos;

    #[test]
    fn trips_follow_each_other_and_measurements_are_apart() {
        let start = Instant::now();
        let mut probe = ClockProbe::new(start);
        for number in 1..=TRIPS {
            assert!(probe.is_due(start) && !probe.is_due(start), "one request at a time");
            let received = 1000 - number as Nanos;
            let offset = probe.answer(RoundTrip { sent: 0, answered: 5_000, received }, start);
            assert_eq!(offset.is_some(), number == TRIPS);
            assert!(offset.is_none_or(|offset| offset.uncertainty == (1000 - TRIPS as Nanos) / 2));
        }
        assert!(!probe.is_measuring() && !probe.is_due(start + INTERVAL / 2));
        assert!(probe.is_due(start + INTERVAL) && probe.is_measuring());
    }
}
