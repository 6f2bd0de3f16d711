//! [`Watch`]: decides from what `launch` sees of an attempt whether its launcher must be ended. It has no processes,
//! files or clocks.
//!
//! | state | event | decision |
//! |---|---|---|
//! | starting | the processes have joined each other | running |
//! | starting | they have not joined each other within the limit | end the launcher at once ([`Early::Late`]) |
//! | starting, running | a process has left a fault | end the launcher after a grace; it usually ends by itself |
//! | starting, running | the launcher is stopped for the limit | kill it ([`Early::Stopped`]) |
//! | running | the heartbeat is missing for the limit | end the launcher at once ([`Early::Silent`]) |
//! | ending | the launcher has not ended after a request | kill it |
//! | killed | the launcher has not ended | give up |
//!
//! The launcher's own end is the end of the attempt in each state.

use std::time::{Duration, SystemTime};

/// The time that the launcher has to end the remaining processes after the first failure. It takes about five
/// seconds to end a process that is stopped.
pub(super) const GRACE: Duration = Duration::from_secs(8);
/// The time between a request to end and the end by force.
const LAST_GRACE: Duration = Duration::from_secs(3);
/// The time in which the system ends a killed process, which may wait for a file system.
const LONGEST_KILL: Duration = Duration::from_secs(60);
/// The longest time that counts between two looks. If this process was itself stopped or did something else, the time
/// between the looks says nothing about the others.
const LONGEST_PASS: Duration = Duration::from_secs(1);

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

/// How long the processes of a start may take to join each other.
///
/// If a process dies while MPI starts, `mpirun` may neither end nor start the others. Nobody reports anything then, so
/// only a deadline ends the wait. It follows from the time that earlier starts of the same launch took, because a start
/// takes milliseconds on one machine and minutes on some clusters. A deadline that is too short costs more than one
/// that is too long: each start that is ended costs a restart.
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

/// The longest times of an attempt.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Limits {
    /// Until the processes have joined each other.
    pub(super) joining: Duration,
    /// Between two heartbeats.
    pub(super) silence: Duration,
    /// For which the launcher may be stopped.
    pub(super) stopped: Duration,
}

/// The state of an attempt at one look.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Seen {
    /// Whether a process has left a fault.
    pub(super) has_fault: bool,
    /// Whether the processes have joined each other.
    pub(super) has_joined: bool,
    /// The last heartbeat; `None` if the processes have sent none yet, or if it cannot be read.
    pub(super) beat: Option<SystemTime>,
    /// Whether the launcher is stopped by a signal.
    pub(super) is_stopped: bool,
}

/// Why a launcher was ended although no process has left a fault, with the time that was waited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Early {
    /// Its processes had not joined each other.
    Late(Duration),
    /// Its processes had sent no heartbeat.
    Silent(Duration),
    /// It was stopped.
    Stopped(Duration),
}

/// The decision about the launcher after a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// Look again.
    Wait,
    /// Ask the processes to save a checkpoint and to end. Launchers pass the signal on to them, and do not end them.
    Save,
    /// Ask it to end, once.
    End,
    Kill,
    /// It cannot be ended.
    GiveUp,
}

/// An attempt that is watched. All times are since its start.
#[derive(Debug, Default)]
pub(super) struct Watch {
    limits: Limits,
    now: Duration,
    /// When the processes had joined each other.
    joined: Option<Duration>,
    /// The last heartbeat, and when it was seen first.
    beat: Option<(SystemTime, Duration)>,
    /// Since when the launcher is stopped.
    stopped: Option<Duration>,
    /// When the launcher has to be asked to end.
    ending: Option<Duration>,
    early: Option<Early>,
    has_asked: bool,
}

impl Watch {
    pub(super) fn new(limits: Limits) -> Self {
        Self { limits, ..Self::default() }
    }

    /// Returns the time after which the processes had joined each other, if they had.
    pub(super) fn joined(&self) -> Option<Duration> {
        self.joined
    }

    /// Returns why the launcher was ended, if it was ended without a fault.
    pub(super) fn early(&self) -> Option<Early> {
        self.early
    }

    /// Decides after a look, which is `passed` after the one before.
    pub(super) fn look(&mut self, passed: Duration, seen: Seen) -> Order {
        self.now += passed.min(LONGEST_PASS);
        let now = self.now;
        if seen.has_joined && self.joined.is_none() {
            self.joined = Some(now);
        }
        if let Some(beat) = seen.beat.filter(|beat| self.beat.is_none_or(|(last, _)| last != *beat)) {
            self.beat = Some((beat, now));
        }
        self.stopped = seen.is_stopped.then(|| self.stopped.unwrap_or(now));
        if self.early.is_none() && self.ending.is_none_or(|ending| now < ending) {
            // During the grace after a fault, the processes end, and so does their heartbeat.
            self.early =
                self.reason().filter(|early| self.ending.is_none() || matches!(early, Early::Stopped(_)));
            // A launcher whose processes are late or silent does not know of a failure.
            let fault = seen.has_fault.then(|| now + GRACE);
            self.ending = self.early.map(|_| now).or(self.ending).or(fault);
        }
        let Some(waited) = self.ending.and_then(|ending| now.checked_sub(ending)) else { return Order::Wait };
        // A launcher that is stopped does not see a request.
        let grace = if matches!(self.early, Some(Early::Stopped(_))) { Duration::ZERO } else { LAST_GRACE };
        if waited >= grace + LONGEST_KILL {
            Order::GiveUp
        } else if waited >= grace {
            Order::Kill
        } else if std::mem::replace(&mut self.has_asked, true) {
            // A second signal would interrupt the launcher while it ends its processes.
            Order::Wait
        } else {
            Order::End
        }
    }

    /// Returns why the launcher must be ended although no process has left a fault.
    fn reason(&self) -> Option<Early> {
        let Limits { joining, silence, stopped } = self.limits;
        let is_over = |since: Duration, limit: Duration| self.now.saturating_sub(since) > limit;
        if self.stopped.is_some_and(|since| is_over(since, stopped)) {
            Some(Early::Stopped(stopped))
        } else if self.joined.is_none() && is_over(Duration::ZERO, joining) {
            Some(Early::Late(joining))
        } else if self.beat.is_some_and(|(_, since)| is_over(since, silence)) {
            Some(Early::Silent(silence))
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        joining: Duration::from_secs(20),
        silence: Duration::from_secs(10),
        stopped: Duration::from_secs(5),
    };

    /// Watches an attempt that looks as `seen` says in each second. Checks the second of each order but `Wait`, up to
    /// the first `Kill`, and the reason.
    fn check(seen: impl Fn(u64) -> Seen, expected: &[(u64, Order)], early: Option<Early>) {
        let mut watch = Watch::new(LIMITS);
        let mut orders = Vec::new();
        for second in 1..100 {
            let order = watch.look(Duration::from_secs(1), seen(second));
            orders.extend(Some((second, order)).filter(|_| order != Order::Wait));
            if order == Order::Kill {
                break;
            }
        }
        assert_eq!((orders, watch.early()), (expected.to_vec(), early));
    }

    /// Returns a look at processes that joined each other after three seconds and send a heartbeat in each second.
    fn healthy(second: u64) -> Seen {
        let beat = SystemTime::UNIX_EPOCH + Duration::from_secs(second);
        let has_joined = second >= 3;
        Seen { has_joined, beat: has_joined.then_some(beat), ..Seen::default() }
    }

    #[test]
    fn a_healthy_attempt_is_left_alone() {
        check(healthy, &[], None);
        // Processes whose mark this machine does not see.
        check(|second| Seen { beat: None, ..healthy(second) }, &[], None);
    }

    #[test]
    fn a_launcher_has_time_to_end_by_itself_after_a_fault() {
        let expected = [(28, Order::End), (31, Order::Kill)];
        check(|second| Seen { has_fault: second >= 20, ..healthy(second) }, &expected, None);
        check(|second| Seen { has_fault: second >= 20, ..Seen::default() }, &expected, None);
    }

    #[test]
    fn processes_that_do_not_join_each_other_are_ended() {
        let late = Some(Early::Late(LIMITS.joining));
        check(|_| Seen::default(), &[(21, Order::End), (24, Order::Kill)], late);
    }

    #[test]
    fn processes_without_a_heartbeat_are_ended() {
        let silent = Some(Early::Silent(LIMITS.silence));
        let expected = [(41, Order::End), (44, Order::Kill)];
        check(|second| healthy(second.min(30)), &expected, silent);
        // The mark was removed.
        let removed = |second| Seen { beat: None, ..healthy(second) };
        let expected = [(40, Order::End), (43, Order::Kill)];
        check(|second| if second < 30 { healthy(second) } else { removed(second) }, &expected, silent);
    }

    #[test]
    fn a_launcher_that_stays_stopped_is_killed() {
        let stopped = Some(Early::Stopped(LIMITS.stopped));
        let stop = |from: u64, to: u64| {
            move |second| Seen { is_stopped: (from..to).contains(&second), ..healthy(second) }
        };
        check(stop(30, 99), &[(36, Order::Kill)], stopped);
        check(stop(1, 99), &[(7, Order::Kill)], stopped);
        check(stop(30, 35), &[], None);
        // A process that is not stopped has left a fault.
        let fault = |second| Seen { has_fault: second >= 33, ..stop(30, 99)(second) };
        check(fault, &[(36, Order::Kill)], stopped);
        // The processes are stopped too, so they do not join each other either.
        check(|_| Seen { is_stopped: true, ..Seen::default() }, &[(7, Order::Kill)], stopped);
    }

    #[test]
    fn a_launcher_that_cannot_be_killed_is_given_up() {
        let mut watch = Watch::new(LIMITS);
        let mut orders = (0..200).map(|_| watch.look(Duration::from_secs(1), Seen::default()));
        assert_eq!(orders.position(|order| order == Order::GiveUp), Some(20 + 3 + 60));
    }

    #[test]
    fn the_time_in_which_the_launch_itself_stood_still_does_not_count() {
        let mut watch = Watch::new(LIMITS);
        assert_eq!(watch.look(Duration::from_secs(1), healthy(3)), Order::Wait);
        for _ in 0..9 {
            assert_eq!(watch.look(Duration::from_secs(3600), healthy(3)), Order::Wait);
        }
    }

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
