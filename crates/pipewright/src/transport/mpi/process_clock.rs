//! The clock of this process, and its conversion to the clock of the first process, which all processes
//! share.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use pipewright_schedule::ClockSkew;

use crate::transport::clock::{ClockLine, ClockOffset, ClockOffsets, Nanos};
use crate::transport::wire::Moment;

/// An error of a process's clock, which tests add to it: one machine has one clock, so nothing else would
/// show that the processes' times are converted.
#[derive(Clone, Copy, Debug, Default)]
pub struct ClockError {
    /// How far the clock is ahead, in seconds; negative if it is behind.
    pub ahead: f64,
    /// The share by which it runs too fast; negative if it runs too slow.
    pub drift: f64,
}

/// The clock of this process. The rank's thread and the MPI thread read it; only the MPI thread adds
/// measurements.
pub(super) struct ProcessClock {
    /// The origin of this process's times.
    origin: Instant,
    error: ClockError,
    /// `None` in the first process, whose clock is the common one.
    offsets: Option<Mutex<ClockOffsets>>,
}

impl ProcessClock {
    pub(super) fn new(is_first: bool, error: ClockError) -> Self {
        let offsets = (!is_first).then(Mutex::default);
        Self { origin: Instant::now(), error, offsets }
    }

    /// Converts an instant to this process's time.
    pub(super) fn own(&self, at: Instant) -> Nanos {
        let elapsed = match at.checked_duration_since(self.origin) {
            Some(after) => nanos(after.as_nanos()),
            None => -nanos(self.origin.duration_since(at).as_nanos()),
        };
        let ClockError { ahead, drift } = self.error;
        elapsed + (ahead * 1e9) as Nanos + (drift * elapsed as f64) as Nanos
    }

    /// Returns the current time of this process.
    pub(super) fn now(&self) -> Nanos {
        self.own(Instant::now())
    }

    /// Returns whether the difference from the first process's clock is known.
    pub(super) fn is_measured(&self) -> bool {
        self.offsets().is_none_or(|offsets| offsets.line().is_some())
    }

    /// Adds a measurement of the difference from the first process's clock.
    pub(super) fn add(&self, offset: ClockOffset) {
        if let Some(mut offsets) = self.offsets() {
            offsets.add(offset);
        }
    }

    /// Returns the current time on both clocks.
    pub(super) fn moment(&self) -> Moment {
        let here = Instant::now();
        Moment { here, common: self.common(here) }
    }

    /// Converts an instant of this process to the common clock, in seconds.
    pub(super) fn common_seconds(&self, at: Instant) -> f64 {
        self.common(at) as f64 / 1e9
    }

    /// Returns how accurate the common time of an instant is.
    pub(super) fn skew(&self, at: Instant) -> ClockSkew {
        let seconds = |nanos: Nanos| nanos as f64 / 1e9;
        let line = self.line();
        ClockSkew { uncertainty: seconds(line.uncertainty(self.own(at))), change: seconds(line.change) }
    }

    fn common(&self, at: Instant) -> Nanos {
        self.line().reference_time(self.own(at))
    }

    /// Returns the line from this process's clock to the common one. Before the first measurement, the common clock
    /// is this process's; no rank reads it that early.
    fn line(&self) -> ClockLine {
        self.offsets().and_then(|offsets| offsets.line()).unwrap_or(ClockLine::of_reference())
    }

    fn offsets(&self) -> Option<MutexGuard<'_, ClockOffsets>> {
        self.offsets.as_ref().map(|offsets| offsets.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn nanos(duration: u128) -> Nanos {
    Nanos::try_from(duration).unwrap_or(Nanos::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn an_error_of_the_clock_is_measured_and_removed() {
        let clock = ProcessClock::new(false, ClockError { ahead: 5.0, drift: 1e-3 });
        let at = clock.origin + Duration::from_secs(2);
        assert_eq!(clock.own(at), 7_002_000_000);
        assert_eq!(clock.common_seconds(at), 7.002);
        // The first process's clock has no error here and the same origin.
        for second in [1, 3] {
            let own = clock.own(clock.origin + Duration::from_secs(second));
            clock.add(ClockOffset {
                at: own,
                offset: second as Nanos * 1_000_000_000 - own,
                uncertainty: 10,
            });
        }
        assert!((clock.common_seconds(at) - 2.0).abs() < 1e-8, "{}", clock.common_seconds(at));
        let skew = clock.skew(at);
        assert_eq!(skew.uncertainty, 10e-9);
        assert!((skew.change - 2e-3).abs() < 1e-8, "{skew:?}");
    }

    #[test]
    fn the_first_process_has_the_common_clock() {
        let clock = ProcessClock::new(true, ClockError::default());
        let at = clock.origin + Duration::from_millis(1500);
        assert_eq!((clock.common_seconds(at), clock.skew(at).uncertainty), (1.5, 0.0));
    }
}
