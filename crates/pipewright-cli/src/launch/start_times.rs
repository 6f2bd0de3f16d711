//! [`StartTimes`]: how long the processes of a start may take to join each other.
//!
//! If a process dies while MPI starts, `mpirun` may neither end nor start the others. Nobody reports anything then, so
//! only a deadline ends the wait. It follows from the time that earlier starts of the same launch took, because a start
//! takes milliseconds on one machine and minutes on some clusters. A deadline that is too short costs more than one
//! that is too long: the same failure twice in a row ends the run.

use std::time::Duration;

/// The longest time if no earlier start is known, to which [`FOR_PROCESS`] is added for each process. Processes give up
/// by themselves after a minute; a launcher needs the rest to start them and to end.
const LONGEST: Duration = Duration::from_secs(90);
const FOR_PROCESS: Duration = Duration::from_millis(20);

/// The longest time after an earlier start: so many times the time that it took, and this margin. Machines that have
/// lost others may be busy for a moment: each host gets up to 20 seconds to answer a question, and so does a start.
const MULTIPLE: u32 = 4;
const MARGIN: Duration = Duration::from_secs(20);

/// The times of the starts so far.
#[derive(Debug, Default)]
pub(super) struct StartTimes {
    /// The longest one; `None` if no processes have joined each other yet.
    longest: Option<Duration>,
}

impl StartTimes {
    /// Notes the time in which the processes of a start joined each other, if they did.
    pub(super) fn note(&mut self, took: Option<Duration>) {
        self.longest = self.longest.max(took);
    }

    /// Returns the longest time in which so many processes join each other.
    pub(super) fn limit(&self, processes: u32) -> Duration {
        let unknown = LONGEST + FOR_PROCESS * processes;
        let known = |took: Duration| took.saturating_mul(MULTIPLE).saturating_add(MARGIN);
        self.longest.map_or(unknown, |took| known(took).min(unknown))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_may_take_several_times_as_long_as_the_longest_one_before() {
        let mut times = StartTimes::default();
        let mut check = |took: Option<u64>, expected: u64| {
            times.note(took.map(Duration::from_secs));
            assert_eq!(times.limit(100), Duration::from_secs(expected), "{took:?}");
        };
        check(None, 92);
        check(Some(2), 28);
        check(Some(1), 28);
        // Processes that did not join each other say nothing.
        check(None, 28);
        check(Some(5), 40);
        check(Some(u64::MAX), 92);
    }
}
