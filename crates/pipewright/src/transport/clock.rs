//! The difference between the clock of this process and the clock of the first process, from measured round
//! trips.
//!
//! Nothing here reads a clock or sends a message. All times are nanoseconds since an arbitrary origin. This
//! process has an origin of its own, and so has the *reference*, the first process.
//!
//! # The measurement
//!
//! This process notes the time when it sends a request, the reference answers with its time, and this process
//! notes the time when the answer arrives (Cristian, 1989). If the request and the answer travel equally
//! long, the reference's time belongs to the middle of the trip. At worst one of them takes no time, so the
//! difference is known to half of the round trip. The shortest of several trips has the smallest error
//! ([`best`]).
//!
//! # Drift
//!
//! Two clocks do not run at exactly the same rate. [`ClockOffsets`] holds the measurements of the last
//! seconds and draws a line through the first and the last of them, which also gives the difference after the
//! last measurement. The stated error assumes that the rates do not change within these seconds.

use std::collections::VecDeque;

/// Nanoseconds on some clock.
pub(super) type Nanos = i64;

/// How many measurements the line spans.
const WINDOW: usize = 8;

/// The largest difference between the rates of two clocks that is assumed before a second measurement: clocks
/// that a time service corrects run up to this share too fast or too slow.
const LARGEST_DRIFT: f64 = 500e-6;

/// A request to the reference and its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RoundTrip {
    /// The time at which this process sent the request.
    pub(super) sent: Nanos,
    /// The reference's time at which it answered.
    pub(super) answered: Nanos,
    /// The time at which the answer arrived.
    pub(super) received: Nanos,
}

/// A measured difference between the two clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ClockOffset {
    /// This process's time of the measurement.
    pub(super) at: Nanos,
    /// The time to add to this process's clock.
    pub(super) offset: Nanos,
    /// The largest error of `offset`.
    pub(super) uncertainty: Nanos,
}

impl RoundTrip {
    /// Returns the difference that this trip measures.
    fn offset(self) -> ClockOffset {
        let length = self.received.saturating_sub(self.sent).max(0);
        let at = self.sent + length / 2;
        // Both halves are rounded up, so that the error of the middle is included.
        ClockOffset { at, offset: self.answered - at, uncertainty: length - length / 2 }
    }
}

/// Returns the difference that the shortest of the trips measures; `None` without a trip.
pub(super) fn best(trips: &[RoundTrip]) -> Option<ClockOffset> {
    trips.iter().map(|trip| trip.offset()).min_by_key(|offset| offset.uncertainty)
}

/// All that is known about the difference between the two clocks.
#[derive(Clone, Debug, Default)]
pub(super) struct ClockOffsets {
    /// The first difference of the run.
    first: Option<Nanos>,
    /// The last measurements, the oldest first.
    window: VecDeque<ClockOffset>,
    /// The largest change of the difference since the first one.
    change: Nanos,
}

/// The difference between the two clocks as a linear function of this process's time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ClockLine {
    first: ClockOffset,
    last: ClockOffset,
    /// The largest change of the difference since the first measurement of the run.
    pub(super) change: Nanos,
}

impl ClockOffsets {
    /// Adds a measurement, which is later than those before it.
    pub(super) fn add(&mut self, offset: ClockOffset) {
        let first = *self.first.get_or_insert(offset.offset);
        self.change = self.change.max((offset.offset - first).abs());
        if self.window.len() == WINDOW {
            self.window.pop_front();
        }
        self.window.push_back(offset);
    }

    /// Returns the line through the measurements of the last seconds; `None` before the first measurement.
    pub(super) fn line(&self) -> Option<ClockLine> {
        let (&first, &last) = (self.window.front()?, self.window.back()?);
        Some(ClockLine { first, last, change: self.change })
    }
}

impl ClockLine {
    /// Returns the line of the reference itself, which has no error.
    pub(super) fn of_reference() -> Self {
        let here = ClockOffset { at: 0, offset: 0, uncertainty: 0 };
        Self { first: here, last: ClockOffset { at: 1, ..here }, change: 0 }
    }

    /// Converts a time of this process to the reference's clock.
    pub(super) fn reference_time(&self, own: Nanos) -> Nanos {
        let Self { first, last, .. } = self;
        let span = last.at - first.at;
        if span <= 0 {
            return own + last.offset;
        }
        let slope = (last.offset - first.offset) as f64 / span as f64;
        own + last.offset + (slope * (own - last.at) as f64).round() as Nanos
    }

    /// Returns the largest error of [`ClockLine::reference_time`], in nanoseconds.
    pub(super) fn uncertainty(&self, own: Nanos) -> Nanos {
        let Self { first, last, .. } = self;
        let (span, beyond) = ((last.at - first.at) as f64, (own - last.at).max(first.at - own).max(0) as f64);
        let nearest = first.uncertainty.max(last.uncertainty);
        // Beyond the measurements, the error of the slope adds to the error of the nearest one.
        let drift =
            if span > 0.0 { (first.uncertainty + last.uncertainty) as f64 / span } else { LARGEST_DRIFT };
        nearest + (drift * beyond).ceil() as Nanos
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MILLISECOND: Nanos = 1_000_000;
    const SECOND: Nanos = 1_000 * MILLISECOND;

    /// A reference whose clock shows `ahead + rate * t` when this process's clock shows `t`.
    #[derive(Clone, Copy, Debug)]
    struct Reference {
        ahead: Nanos,
        drift: f64,
    }

    impl Reference {
        fn time(self, own: Nanos) -> Nanos {
            own + self.ahead + (self.drift * own as f64).round() as Nanos
        }

        /// Returns a trip that takes `there` to the reference and `back` from it.
        fn trip(self, sent: Nanos, [there, back]: [Nanos; 2]) -> RoundTrip {
            RoundTrip { sent, answered: self.time(sent + there), received: sent + there + back }
        }
    }

    /// Checks that the times of a line are right up to its stated error.
    fn check(line: ClockLine, reference: Reference, times: impl IntoIterator<Item = Nanos>) {
        for own in times {
            let error = (line.reference_time(own) - reference.time(own)).abs();
            // Two nanoseconds for the roundings.
            assert!(error <= line.uncertainty(own) + 2, "{error} > {} at {own}", line.uncertainty(own));
        }
    }

    #[test]
    fn an_even_trip_has_no_error() {
        let reference = Reference { ahead: -7 * SECOND, drift: 0.0 };
        let offset = best(&[reference.trip(100, [500, 500])]).expect("a trip");
        assert_eq!(offset, ClockOffset { at: 600, offset: -7 * SECOND, uncertainty: 500 });
    }

    #[test]
    fn an_uneven_trip_errs_by_at_most_half_of_its_length() {
        let reference = Reference { ahead: 3 * SECOND, drift: 0.0 };
        for (there, back) in [(1000, 0), (0, 1000), (700, 300)] {
            let offset = best(&[reference.trip(0, [there, back])]).expect("a trip");
            assert_eq!(offset.uncertainty, 500);
            assert_eq!(offset.offset - 3 * SECOND, (there - back) / 2);
        }
    }

    #[test]
    fn the_shortest_trip_counts() {
        let reference = Reference { ahead: SECOND, drift: 0.0 };
        let trips = [[900, 100], [30, 20], [10, 5000]].map(|delays| reference.trip(0, delays));
        let offset = best(&trips).expect("trips");
        assert_eq!((offset.offset, offset.uncertainty), (SECOND + 5, 25));
        assert_eq!(best(&[]), None);
    }

    /// Measures once a second for `seconds`, with trips that take the delays in turn.
    fn measured(reference: Reference, seconds: i64, delays: &[[Nanos; 2]]) -> ClockOffsets {
        let mut offsets = ClockOffsets::default();
        for (second, &delay) in (0..seconds).zip(delays.iter().cycle()) {
            offsets.add(best(&[reference.trip(second * SECOND, delay)]).expect("a trip"));
        }
        offsets
    }

    #[test]
    fn a_drift_is_followed_within_and_after_the_measurements() {
        let reference = Reference { ahead: SECOND, drift: 80e-6 };
        let offsets = measured(reference, 20, &[[10_000, 10_000]]);
        let line = offsets.line().expect("measurements");
        check(line, reference, (12..22).map(|second| second * SECOND + SECOND / 3));
        // In 19 seconds the difference grows by 19 * 80 us.
        assert!((line.change - 1_520_000).abs() < 10, "{}", line.change);
        // Without the slope, the time one second after the last measurement would be 80 us wrong.
        let error = line.reference_time(20 * SECOND) - reference.time(20 * SECOND);
        assert!(error.abs() < 10, "{error}");
    }

    #[test]
    fn one_measurement_allows_for_drift() {
        let reference = Reference { ahead: -SECOND, drift: 400e-6 };
        let line = measured(reference, 1, &[[2_000, 1_000]]).line().expect("a measurement");
        check(line, reference, [0, SECOND, 10 * SECOND]);
        assert_eq!(line.change, 0);
        assert!(ClockOffsets::default().line().is_none());
    }

    #[test]
    fn the_reference_has_its_own_time() {
        let line = ClockLine::of_reference();
        for own in [0, 5, 10 * SECOND] {
            assert_eq!((line.reference_time(own), line.uncertainty(own)), (own, 0));
        }
    }

    proptest! {
        #[test]
        fn no_time_errs_by_more_than_stated(
            ahead in -1_000_000 * SECOND..1_000_000 * SECOND,
            drift in -200e-6..200e-6f64,
            delays in prop::collection::vec([0..MILLISECOND, 0..MILLISECOND], 1..12),
            seconds in 1..30i64,
            after in 0..5 * SECOND,
        ) {
            let reference = Reference { ahead, drift };
            let line = measured(reference, seconds, &delays).line().expect("measurements");
            check(line, reference, [(seconds - 1) * SECOND + after]);
        }
    }
}
