//! Finds ranks that have become slow in a run: their actions take a multiple of their usual time, and the
//! actions of the other ranks do not.
//!
//! **The rule.** It uses the times of the computing actions in the measured timelines. Waiting for messages
//! between stages is not part of an action, so a rank that waits for a slow one is not slow. For each rank,
//! stage and kind of action, the time of a step is the median over the step's actions, and the usual time is
//! the median of the latest [`WINDOW`] steps in which the rank was not suspicious. The slowdown of a rank is
//! the sum of the times of its actions over the sum of their usual times. A rank is suspicious in a step if
//! its slowdown is at least [`FACTOR`] and at least [`FACTOR`] times the median slowdown of the other ranks,
//! which is below [`FACTOR`], and if its actions take at least [`SHORTEST_DELAY`] longer than usual on
//! average. It is slow after [`STEPS`] suspicious steps in a row, and no longer slow after as many steps in
//! which its own slowdown or delay is below these limits, whatever the other ranks do. At first,
//! [`LEAST_STEPS`] steps are only observed.
//!
//! A machine that slows all ranks makes no rank slow. A single rank has no others to be compared with, so it
//! is never slow. The ranks that compute stages together have one row in a timeline, and wait for each other
//! inside their actions, so they are slow together. Replicas that hold experts together also wait for each
//! other inside their actions, and have rows of their own. The time in which they wait for tokens does not
//! count: an exchange is under way, and neither half of an overlap computes ([`ScopeKind`]).
//!
//! **Cost.** The time of a step is proportional to its actions times the kinds of actions of a rank, plus the
//! spans inside the actions.

use crate::action::ActionKind;
use crate::ids::{Rank, StageIndex};
use crate::timeline::{Event, Scope, ScopeKind, Timeline};

/// The most steps whose times make up the usual time.
pub const WINDOW: usize = 32;
/// The fewest steps from which a usual time follows.
pub const LEAST_STEPS: usize = 5;
/// The slowdown from which on a rank is suspicious.
pub const FACTOR: f64 = 2.0;
/// The number of steps in a row after which a rank is slow, or no longer slow.
pub const STEPS: usize = 5;
/// The least time by which the actions of a suspicious rank take longer than usual, in seconds. The scheduler
/// of an operating system may delay a short action by as much.
pub const SHORTEST_DELAY: f64 = 1e-3;

/// A rank that has become slow, or is no longer slow.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SpeedChange {
    /// The row of the rank in the timelines.
    pub rank: Rank,
    /// Whether the rank has become slow.
    pub is_slow: bool,
    /// The time of the rank's actions in the last step over their usual time.
    pub slowdown: f64,
}

/// The times of the ranks' actions in the latest steps of a run.
#[derive(Debug, Default)]
pub struct SlowRanks {
    rows: Vec<Row>,
    /// Memory for medians.
    scratch: Vec<f64>,
    /// The slowdowns of all ranks, in ascending order.
    sorted: Vec<f64>,
}

/// The actions of one rank.
#[derive(Debug, Default)]
struct Row {
    kinds: Vec<Times>,
    pace: Option<Pace>,
    is_slow: bool,
    /// The number of latest steps in a row that speak for another value of `is_slow`.
    steps_in_a_row: usize,
}

/// The speed of a rank in a step.
#[derive(Debug, Clone, Copy)]
struct Pace {
    slowdown: f64,
    /// The seconds by which an action takes longer than usual, on average.
    delay: f64,
}

/// The times of one kind of action on one stage.
#[derive(Debug)]
struct Times {
    stage: StageIndex,
    kind: ActionKind,
    /// The seconds of each action in this step.
    step: Vec<f64>,
    /// The seconds of the latest steps: a ring in which `oldest` is replaced next.
    past: Vec<f64>,
    oldest: usize,
}

impl SlowRanks {
    /// Adds the timeline of the next step. Returns the ranks whose speed has changed.
    pub fn observe(&mut self, timeline: &Timeline) -> Vec<SpeedChange> {
        if self.rows.len() != timeline.ranks() as usize {
            self.rows.clear();
            self.rows.resize_with(timeline.ranks() as usize, Row::default);
        }
        let Self { rows, scratch, sorted } = self;
        for (rank, row) in (0..).map(Rank::new).zip(rows.iter_mut()) {
            row.read(timeline.events_of(rank), timeline.scopes_of(rank));
            row.pace = row.measure(scratch);
        }
        sorted.clear();
        sorted.extend(rows.iter().filter_map(|row| Some(row.pace?.slowdown)));
        sorted.sort_unstable_by(f64::total_cmp);
        let rows = (0..).map(Rank::new).zip(rows);
        rows.filter_map(|(rank, row)| row.judge(rank, sorted, scratch)).collect()
    }
}

impl Row {
    /// Reads the times of a step. The spans inside the actions say when the rank waits for tokens.
    fn read(&mut self, events: &[Event], scopes: &[Scope]) {
        self.kinds.iter_mut().for_each(|times| times.step.clear());
        for event in events.iter().filter(|event| event.action.is_compute()) {
            let (stage, kind) = (event.action.stage(), event.action.kind());
            let known = self.kinds.iter().position(|times| (times.stage, times.kind) == (stage, kind));
            let index = known.unwrap_or_else(|| {
                self.kinds.push(Times { stage, kind, step: Vec::new(), past: Vec::new(), oldest: 0 });
                self.kinds.len() - 1
            });
            self.kinds[index].step.push(event.end - event.start - waiting_for_tokens(event, scopes));
        }
    }

    /// Returns the speed in this step; `None` while the usual times are not known.
    fn measure(&self, scratch: &mut Vec<f64>) -> Option<Pace> {
        let (mut seconds, mut usual, mut actions) = (0.0, 0.0, 0.0);
        for times in self.kinds.iter().filter(|times| times.past.len() >= LEAST_STEPS) {
            let Some(median_of_step) = median(&times.step, scratch) else { continue };
            let count = times.step.len() as f64;
            actions += count;
            seconds += count * median_of_step;
            usual += count * median(&times.past, scratch)?;
        }
        (usual > 0.0).then(|| Pace { slowdown: seconds / usual, delay: (seconds - usual) / actions })
    }

    /// Judges this step by the slowdowns of all ranks. Returns the change of the rank's speed, if it changes.
    fn judge(&mut self, rank: Rank, sorted: &[f64], scratch: &mut Vec<f64>) -> Option<SpeedChange> {
        let suspicious = self.pace.filter(|pace| {
            let is_alone = |others: f64| others < FACTOR && pace.slowdown >= FACTOR * others.max(1.0);
            pace.delay >= SHORTEST_DELAY && median_of_others(sorted, pace.slowdown).is_some_and(is_alone)
        });
        if suspicious.is_none() {
            self.kinds.iter_mut().for_each(|times| times.remember(scratch));
        }
        // A slow rank stays slow while the others are slow too, until its usual time has followed.
        let is_usual = self.pace.is_none_or(|pace| pace.slowdown < FACTOR || pace.delay < SHORTEST_DELAY);
        let is_other = if self.is_slow { is_usual } else { suspicious.is_some() };
        self.steps_in_a_row = if is_other { self.steps_in_a_row + 1 } else { 0 };
        if self.steps_in_a_row < STEPS {
            return None;
        }
        (self.is_slow, self.steps_in_a_row) = (!self.is_slow, 0);
        let slowdown = self.pace.map_or(1.0, |pace| pace.slowdown);
        Some(SpeedChange { rank, is_slow: self.is_slow, slowdown })
    }
}

impl Times {
    /// Adds this step to the past steps.
    fn remember(&mut self, scratch: &mut Vec<f64>) {
        let Some(median) = median(&self.step, scratch) else { return };
        if self.past.len() < WINDOW {
            self.past.push(median);
        } else {
            self.past[self.oldest] = median;
            self.oldest = (self.oldest + 1) % WINDOW;
        }
    }
}

/// Returns the seconds of an action in which its rank only waits for the tokens of experts. The spans of the
/// rank are in the order of their starts.
fn waiting_for_tokens(event: &Event, scopes: &[Scope]) -> f64 {
    let first = scopes.partition_point(|scope| scope.start < event.start);
    let inside = || scopes[first..].iter().take_while(|scope| scope.start < event.end);
    let is_computation = |scope: &Scope| matches!(scope.kind, ScopeKind::Computation(_));
    let known = length_of_union(event, inside().filter(|scope| scope.is_exchange() || is_computation(scope)));
    known - length_of_union(event, inside().filter(|scope| is_computation(scope)))
}

/// Returns the seconds of an action that spans cover, which are in the order of their starts.
fn length_of_union<'a>(event: &Event, scopes: impl Iterator<Item = &'a Scope>) -> f64 {
    let (mut until, mut seconds) = (event.start, 0.0);
    for scope in scopes {
        let end = scope.end.min(event.end);
        seconds += (end - scope.start.max(until)).max(0.0);
        until = until.max(end);
    }
    seconds
}

/// Returns the median, the lower of two; `None` without values.
fn median(values: &[f64], scratch: &mut Vec<f64>) -> Option<f64> {
    let middle = values.len().checked_sub(1)? / 2;
    scratch.clear();
    scratch.extend_from_slice(values);
    Some(*scratch.select_nth_unstable_by(middle, f64::total_cmp).1)
}

/// Returns the median of all values but one, the lower of two; `None` without others.
fn median_of_others(sorted: &[f64], own: f64) -> Option<f64> {
    let middle = sorted.len().checked_sub(2)? / 2;
    let is_before = sorted.partition_point(|value| *value < own) <= middle;
    Some(sorted[middle + usize::from(is_before)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::action::Action;

    /// Returns a step in which each rank has two forwards and two backwards of these milliseconds, after a
    /// receive that lasts a second.
    fn step(milliseconds: &[f64]) -> Timeline {
        let mut events = Vec::new();
        for (rank, time) in (0_u32..).zip(milliseconds) {
            let mut start = 0.0;
            for (action, seconds) in [
                ("RECV_F0", 1.0),
                ("F0", time * 1e-3),
                ("F1", time * 1e-3),
                ("B0", 2e-3 * time),
                ("B1", 2e-3 * time),
            ] {
                let action = format!("{rank}{action}").parse().expect("an action");
                events.push(Event { rank: Rank::new(rank), action, start, end: start + seconds });
                start += seconds;
            }
        }
        Timeline::new(milliseconds.len() as u32, events)
    }

    /// Observes steps, each with a number of repetitions. Returns the changes: the step from 1, the rank, and
    /// whether it is slow.
    fn check(steps: &[(usize, &[f64])], expected: &[(usize, u32, bool)]) {
        let mut ranks = SlowRanks::default();
        let all = steps.iter().flat_map(|(times, milliseconds)| std::iter::repeat_n(milliseconds, *times));
        let changes = (1..).zip(all).flat_map(|(number, milliseconds)| {
            let changes = ranks.observe(&step(milliseconds));
            changes.into_iter().map(move |change| (number, change.rank.get(), change.is_slow))
        });
        assert_eq!(changes.collect::<Vec<_>>(), expected, "{steps:?}");
    }

    #[test]
    fn a_rank_that_becomes_slow_is_named_after_some_steps_and_again_when_it_is_not() {
        let (usual, slow): (&[f64], &[f64]) = (&[10.0, 20.0, 10.0], &[10.0, 50.0, 11.0]);
        check(&[(10, usual), (STEPS, slow)], &[(15, 1, true)]);
        check(&[(10, usual), (100, slow), (STEPS, usual)], &[(15, 1, true), (115, 1, false)]);
        // The time of a rank that is slow from the beginning is its usual one.
        check(&[(100, slow)], &[]);
    }

    #[test]
    fn a_short_disturbance_is_not_slowness() {
        let (usual, slow): (&[f64], &[f64]) = (&[10.0, 10.0], &[10.0, 100.0]);
        check(&[(10, usual), (STEPS - 1, slow), (1, usual), (STEPS - 1, slow), (10, usual)], &[]);
        check(&[(LEAST_STEPS - 1, usual), (STEPS, slow)], &[]);
    }

    #[test]
    fn a_rank_is_compared_with_the_others() {
        check(&[(10, &[10.0, 20.0]), (20, &[30.0, 60.0])], &[]);
        check(&[(10, &[10.0, 20.0]), (20, &[30.0, 200.0])], &[]);
        check(&[(10, &[10.0]), (20, &[100.0])], &[]);
        check(&[(10, &[10.0, 10.0, 10.0]), (9, &[30.0, 30.0, 10.0])], &[(15, 0, true), (15, 1, true)]);
        check(&[(10, &[10.0, 10.0, 10.0, 10.0]), (9, &[30.0, 30.0, 30.0, 10.0])], &[]);
    }

    #[test]
    fn a_slow_rank_stays_slow_while_the_others_are_slow_too() {
        let all_slow: &[f64] = &[30.0, 50.0, 30.0, 30.0];
        let slow: [(usize, &[f64]); 2] = [(10, &[10.0; 4]), (STEPS, &[10.0, 50.0, 10.0, 10.0])];
        check(&[slow[0], slow[1], (STEPS, all_slow), (2, &[10.0; 4])], &[(15, 1, true)]);
        check(&[slow[0], slow[1], (2, all_slow), (STEPS, &[10.0; 4])], &[(15, 1, true), (22, 1, false)]);
        // After eleven steps, the usual time has followed.
        check(&[slow[0], slow[1], (40, all_slow)], &[(15, 1, true), (15 + 11 + STEPS, 1, false)]);
    }

    /// Returns a step of replicas that hold experts together: each computes for so many milliseconds,
    /// exchanges tokens until the slowest one has computed as long, and computes 1 ms more. In an overlap,
    /// the halves take turns: one computes in the first part, and the other in a third of the exchange.
    fn step_with_exchange(milliseconds: &[f64], action: &str) -> Timeline {
        let slowest = milliseconds.iter().copied().fold(0.0, f64::max);
        let (mut events, mut scopes) = (Vec::new(), Vec::new());
        for (rank, &time) in (0_u32..).map(Rank::new).zip(milliseconds) {
            let action: Action = action.parse().expect("an action");
            let at = |milliseconds: f64| milliseconds * 1e-3;
            let mut span =
                |kind, start, end| scopes.push(Scope { rank, kind, start: at(start), end: at(end) });
            let end = slowest + 4.0;
            match action.parts().collect::<Vec<_>>()[..] {
                [forward, backward] => {
                    span(ScopeKind::Computation(forward), 0.0, time);
                    span(ScopeKind::Exchange(forward), time, end);
                    span(ScopeKind::Computation(backward), time, time + 1.0);
                    span(ScopeKind::User("exchange".into()), 0.0, end);
                    span(ScopeKind::Computation(forward), end, end + 1.0);
                }
                _ => span(ScopeKind::Exchange(action), time, end),
            }
            events.push(Event { rank, action, start: 0.0, end: at(end + 1.0) });
        }
        Timeline::new(milliseconds.len() as u32, events).with_scopes(scopes)
    }

    /// All actions of a step end when the slowest replica has sent its tokens.
    #[test]
    fn a_replica_that_waits_for_the_tokens_of_a_slow_one_is_not_slow() {
        for action in ["0F1", "0B1", "(0F1;1B0)OVERLAP_F_B"] {
            let mut ranks = SlowRanks::default();
            let mut observe = |milliseconds: &[f64]| {
                let changes = ranks.observe(&step_with_exchange(milliseconds, action));
                changes.into_iter().map(|change| (change.rank.get(), change.is_slow)).collect::<Vec<_>>()
            };
            assert!((0..10).all(|_| observe(&[10.0, 12.0, 10.0]).is_empty()));
            let changes: Vec<_> = (0..STEPS).flat_map(|_| observe(&[10.0, 50.0, 10.0])).collect();
            assert_eq!(changes, [(1, true)], "{action}");
        }
    }

    #[test]
    fn small_differences_are_not_slowness() {
        check(&[(10, &[10.0, 10.0]), (20, &[10.0, 19.0])], &[]);
        // Ten times as long, and less than a millisecond longer.
        check(&[(10, &[0.05, 0.05]), (20, &[0.05, 0.5])], &[]);
    }

    #[test]
    fn the_slowdown_is_measured() {
        let mut ranks = SlowRanks::default();
        for _ in 0..10 {
            assert_eq!(ranks.observe(&step(&[10.0, 10.0])), []);
        }
        let changes: Vec<_> = (0..STEPS).flat_map(|_| ranks.observe(&step(&[35.0, 10.0]))).collect();
        let [SpeedChange { slowdown, .. }] = changes[..] else { panic!("{changes:?}") };
        assert!((slowdown - 3.5).abs() < 1e-9, "{slowdown}");
    }

    #[test]
    fn a_usual_time_follows_slow_changes() {
        let mut ranks = SlowRanks::default();
        let growing = (0..200).map(|number| 10.0 * 1.02_f64.powi(number));
        assert!(growing.map(|time| ranks.observe(&step(&[time, 10.0]))).all(|changes| changes.is_empty()));
    }
}
