//! The gap between two training steps, in which the ranks run no action of the program, and its parts.

use std::time::{Duration, Instant};

use pipewright_schedule::{Event, Rank, Timeline};

/// The time between the programs of two consecutive training steps. The work of the ranks in it is not
/// part of a schedule: they sum gradients, compute the gradient norm, update, and wait for the next batch.
///
/// The rank that starts the next step is the one that computes first. `sums`, `update` and `between` are the
/// parts of `critical` on that rank, and add up to it. They are measured on the timelines
/// ([`StepSummary::timeline`](super::StepSummary::timeline)), so in several processes the first one has the
/// gaps of all ranks, and each other one has the gaps of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepGap {
    /// From the end of the last action of any rank to the first action of the rank that starts the next
    /// step; 0 if this rank starts before.
    pub critical: Duration,
    /// Until this rank has the gradient norm: gradients are summed, the norm is computed, and the rank may
    /// update early ([`PipelineConfig::post_validation`](super::PipelineConfig::post_validation)).
    pub sums: Duration,
    /// The update of this rank after that.
    pub update: Duration,
    /// From the end of the update to the first action.
    pub between: Duration,
    /// From the start of the timeline of the step before to the start of this one's.
    pub since_last: Duration,
    /// From the end of the last action of each rank to its own next one, by row of the timeline; 0 for a rank
    /// whose events this process does not have.
    pub per_rank: Vec<Duration>,
}

/// The end of a training step, which the gap before the next one is measured from.
#[derive(Debug)]
pub(super) struct StepEnd {
    /// The time at which the timeline of the step starts.
    origin: Instant,
    /// By row of the timeline; `None` for a row without events.
    rows: Vec<Option<RowEnd>>,
}

/// The end of a step on one rank, in seconds since the origin.
#[derive(Clone, Copy, Debug)]
struct RowEnd {
    last_action: f64,
    update_begins: f64,
    update_ends: f64,
}

/// The time that each rank of the world spends after its program.
pub(super) struct AfterProgram<'a> {
    /// Until the update begins.
    pub(super) sums: &'a [Duration],
    /// The update.
    pub(super) update: &'a [Duration],
}

impl StepEnd {
    /// Notes the end of a step. `tensor_ranks` ranks of the world share a row of the timeline.
    pub(super) fn new(
        origin: Instant,
        timeline: &Timeline,
        after: &AfterProgram<'_>,
        tensor_ranks: u32,
    ) -> Self {
        let row = |row: u32| {
            let last_action = last_end(timeline.events_of(Rank::new(row)))?;
            let rank = (row * tensor_ranks) as usize;
            let seconds = |times: &[Duration]| times.get(rank).map_or(0.0, Duration::as_secs_f64);
            let update_begins = last_action + seconds(after.sums);
            Some(RowEnd { last_action, update_begins, update_ends: update_begins + seconds(after.update) })
        };
        Self { origin, rows: (0..timeline.ranks()).map(row).collect() }
    }

    /// Returns the gap before a step with this timeline, which starts at `origin`. Returns `None` if the
    /// timelines have no rank in common.
    pub(super) fn gap_before(&self, origin: Instant, timeline: &Timeline) -> Option<StepGap> {
        // Times are seconds since the origin of the earlier step.
        let since_last = origin.saturating_duration_since(self.origin);
        let offset = since_last.as_secs_f64();
        let per_rank = self.rows.iter().zip(0..).map(|(end, row)| {
            let gap = end.as_ref().zip(timeline.events_of(Rank::new(row)).first());
            gap.map_or(Duration::ZERO, |(end, first)| duration(end.last_action, offset + first.start))
        });
        let first = first_action(timeline)?;
        let (end, start) = ((*self.rows.get(first.rank.index())?)?, offset + first.start);
        let last_action = self.rows.iter().flatten().map(|end| end.last_action).reduce(f64::max)?;
        // A step without an update has neither sums nor an update, and its rank may start the next one before
        // the others have ended.
        let begins = end.update_begins.clamp(last_action.min(start), start);
        let ends = end.update_ends.clamp(begins, start);
        let from = last_action.min(start);
        let [critical, sums, update] = [start, begins, ends].map(|until| duration(from, until));
        let update = update.saturating_sub(sums);
        let between = critical.saturating_sub(sums + update);
        Some(StepGap { critical, sums, update, between, since_last, per_rank: per_rank.collect() })
    }
}

fn last_end(events: &[Event]) -> Option<f64> {
    events.iter().map(|event| event.end).reduce(f64::max)
}

/// Returns the first action of the rank that computes first. Other ranks may begin the step earlier: they wait
/// for messages while this rank still ends the step before.
pub(crate) fn first_action(timeline: &Timeline) -> Option<&Event> {
    let computes = timeline.events().iter().filter(|event| event.action.is_compute());
    let first = computes.min_by(|a, b| a.start.total_cmp(&b.start))?;
    timeline.events_of(first.rank).first()
}

fn duration(from: f64, to: f64) -> Duration {
    Duration::try_from_secs_f64(to - from).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A timeline of two ranks, each with a forward and a backward, from `starts` on. Rank 1 waits for its
    /// input from the start.
    fn timeline(starts: [f64; 2], ends: [f64; 2]) -> Timeline {
        let event = |rank: u32, action: &str, start, end| Event {
            rank: Rank::new(rank),
            action: action.parse().expect("an action"),
            start,
            end,
        };
        let events = vec![
            event(0, "0F0", starts[0], starts[0] + 1.0),
            event(0, "0B0", ends[0] - 1.0, ends[0]),
            event(1, "1RECV_F0", starts[1], starts[0] + 1.0),
            event(1, "1F0", starts[0] + 1.0, starts[0] + 2.0),
            event(1, "1B0", ends[1] - 1.0, ends[1]),
        ];
        Timeline::new(2, events)
    }

    fn seconds(values: [f64; 2]) -> [Duration; 2] {
        values.map(Duration::from_secs_f64)
    }

    /// Checks the gap in seconds, after a step that ends at 9 s on rank 0 and at 8 s on rank 1: the critical
    /// one with its parts, and each rank's.
    fn check(sums: [f64; 2], update: [f64; 2], starts: [f64; 2], critical: [f64; 4], per_rank: [f64; 2]) {
        let origin = Instant::now();
        let after = AfterProgram { sums: &seconds(sums), update: &seconds(update) };
        let end = StepEnd::new(origin, &timeline([0.0, 0.0], [9.0, 8.0]), &after, 1);
        let later = timeline(starts, [30.0, 30.0]);
        let gap = end.gap_before(origin + Duration::from_secs(10), &later).expect("both ranks have events");
        let StepGap { critical: whole, sums, update, between, per_rank: ranks, .. } = gap;
        let found = [whole, sums, update, between].map(|part| part.as_secs_f64());
        let is_near = |found: f64, expected: f64| (found - expected).abs() < 1e-6;
        assert!(found.iter().zip(critical).all(|(&found, expected)| is_near(found, expected)), "{found:?}");
        assert!(ranks.iter().zip(per_rank).all(|(gap, of)| is_near(gap.as_secs_f64(), of)), "{ranks:?}");
        assert_eq!(whole, sums + update + between);
    }

    #[test]
    fn the_critical_gap_begins_with_the_last_action_of_any_rank() {
        // Rank 0 ends last and starts first: its sums take 0.5 s, its update 1 s, and it starts at 12 s.
        check([0.5, 1.5], [1.0, 0.75], [2.0, 1.5], [3.0, 0.5, 1.0, 1.5], [3.0, 3.5]);
    }

    #[test]
    fn a_rank_that_starts_during_the_other_ranks_actions_has_no_gap() {
        // It starts at 8.5 s, before its own last action has ended, which only other batches of a step do.
        let origin = Instant::now();
        let none = AfterProgram { sums: &[], update: &[] };
        let end = StepEnd::new(origin, &timeline([0.0, 0.0], [9.0, 8.0]), &none, 1);
        let gap = end.gap_before(origin, &timeline([8.5, 8.5], [30.0, 30.0])).expect("both have events");
        assert_eq!((gap.critical, gap.between), (Duration::ZERO, Duration::ZERO));
        assert_eq!(gap.per_rank, seconds([0.0, 0.5]));
    }

    #[test]
    fn the_first_rank_that_computes_starts_a_step_and_not_one_that_waits() {
        // Rank 1 waits from 9.25 s on; rank 0 computes from 11 s on.
        check([0.0, 0.0], [0.5, 0.5], [1.0, -0.75], [2.0, 0.0, 0.5, 1.5], [2.0, 1.25]);
    }

    #[test]
    fn a_process_has_the_gaps_of_its_own_ranks() {
        let origin = Instant::now();
        let events = timeline([0.0, 0.0], [9.0, 8.0]).events_of(Rank::new(1)).to_vec();
        let own = Timeline::new(2, events);
        let none = AfterProgram { sums: &[], update: &[] };
        let gap = StepEnd::new(origin, &own, &none, 1).gap_before(origin + Duration::from_secs(10), &own);
        let gap = gap.expect("rank 1 has events");
        assert_eq!((gap.critical, gap.per_rank), (Duration::from_secs(2), seconds([0.0, 2.0]).to_vec()));
        let empty = Timeline::new(2, Vec::new());
        assert_eq!(StepEnd::new(origin, &own, &none, 1).gap_before(origin, &empty), None);
    }
}
