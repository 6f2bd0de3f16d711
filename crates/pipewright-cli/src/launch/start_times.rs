//! [`StartTimes`]: how long the processes of a start may take to join each other.
//!
//! If a process dies while MPI starts, `mpirun` may neither end nor start the others. Nobody reports anything then, so
//! only a deadline ends the wait. It follows from the time that earlier starts of the same launch took, because a start
//! takes milliseconds on one machine and minutes on some clusters. A deadline that is too short costs more than one
//! that is too long: each start that is ended costs a restart.

use std::time::Duration;

/// The longest time if no earlier start is known: this time, or so many times the deadline of the run.
const FIRST: Duration = Duration::from_secs(600);
const DEADLINES: u32 = 10;

/// The longest time if one is known, to which [`FOR_PROCESS`] is added for each process. Processes give up by themselves
/// after a minute; a launcher needs the rest to start them and to end.
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

    /// Returns the longest time in which so many processes join each other, in a run with this `deadline`.
    pub(super) fn limit(&self, processes: u32, deadline: Duration) -> Duration {
        let unknown = FIRST.max(deadline.saturating_mul(DEADLINES));
        let longest = LONGEST + FOR_PROCESS * processes;
        let known = |took: Duration| {
            let usual = took.saturating_mul(MULTIPLE).saturating_add(MARGIN);
            // A start that takes longer than the usual limit is usual here.
            usual.min(longest.max(took.saturating_add(MARGIN)))
        };
        self.longest.map_or(unknown, known)
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
            let limit = times.limit(100, Duration::from_secs(20));
            assert_eq!(limit, Duration::from_secs(expected), "{took:?}");
        };
        check(None, 600);
        check(Some(2), 28);
        check(Some(1), 28);
        // Processes that did not join each other say nothing.
        check(None, 28);
        check(Some(5), 40);
        check(Some(60), 92);
        check(Some(200), 220);
    }

    #[test]
    fn the_first_start_may_take_many_times_the_deadline_of_the_run() {
        let limit = |deadline| StartTimes::default().limit(100, Duration::from_secs(deadline)).as_secs();
        assert_eq!([3, 60, 300, u64::MAX].map(limit), [600, 600, 3000, u64::MAX]);
    }
}
