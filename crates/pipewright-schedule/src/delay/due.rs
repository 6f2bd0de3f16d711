//! When computations are due, for ranks that choose between two batches.
//!
//! A computation is due between the earliest and the latest time at which it can start if a batch takes two periods. Both are
//! sums of durations along the longest ways of a batch alone. In a full pipeline, a tensor waits for a rank that computes
//! another one, so each message takes longer in these sums, by an allowance. No allowance suits every schedule: [`RULES`] has
//! several, which a random search over the schedules of the catalogue with 4 to 16 ranks has found.

use super::weaver::{Due, Weaver};
use crate::action::ActionKind;

/// How due times follow from a batch alone.
pub(super) struct Rule {
    /// The time from one batch to the next, in percent of the work of the slowest rank.
    period: i64,
    /// The allowances for messages, in halves of a mean computation: of outputs and of gradients, on the way to a
    /// computation and on the way from it to the end.
    allowances: [i64; 4],
    /// How close due times are to the latest starts, in quarters; 0: they are the earliest starts.
    lateness: i64,
    /// Whether gradients of weights are due last.
    weights_last: bool,
}

/// The rules that are tried, one after another.
pub(super) const RULES: [Rule; 11] = [
    Rule { period: 102, allowances: [2, 4, 6, 7], lateness: 1, weights_last: true },
    Rule { period: 100, allowances: [2, 6, 0, 0], lateness: 3, weights_last: true },
    Rule { period: 102, allowances: [7, 7, 6, 7], lateness: 3, weights_last: false },
    Rule { period: 105, allowances: [0, 0, 4, 6], lateness: 3, weights_last: false },
    Rule { period: 100, allowances: [0, 0, 1, 2], lateness: 3, weights_last: true },
    Rule { period: 105, allowances: [2, 1, 2, 3], lateness: 4, weights_last: true },
    Rule { period: 102, allowances: [3, 6, 1, 6], lateness: 2, weights_last: false },
    Rule { period: 102, allowances: [3, 0, 0, 7], lateness: 4, weights_last: true },
    Rule { period: 105, allowances: [1, 6, 0, 7], lateness: 3, weights_last: false },
    Rule { period: 105, allowances: [2, 2, 0, 2], lateness: 3, weights_last: false },
    Rule { period: 105, allowances: [1, 0, 2, 2], lateness: 3, weights_last: true },
];

/// Returns the due times by a rule, from a run of one batch.
pub(super) fn due(rule: &Rule, alone: &Weaver<'_>, work: u64) -> Due {
    let period = work as i64 * rule.period / 100;
    let mean = alone.mean_duration();
    let allowance = |index: usize| (rule.allowances[index] as u64 * mean / 2) as i64;
    let starts = |order: &mut dyn Iterator<Item = (usize, usize)>, is_backwards: bool| {
        let mut starts: Vec<Vec<i64>> = alone.rows.iter().map(|row| vec![0; row.len()]).collect();
        let mut free = vec![0; starts.len()];
        let mut arrivals = vec![[0; 2]; alone.arrivals.len()];
        for (rank, position) in order {
            let action = alone.rows[rank][position];
            let needed = alone.needed(action, 0);
            let made =
                alone.delivery(action).map(|(_, slot, _)| (alone.tensor(action.stage(), action, 0), slot));
            let (from, to) = if is_backwards { (made, needed) } else { (needed, made) };
            let since = from.map_or(0, |(tensor, slot)| arrivals[tensor][slot]);
            let start = since.max(free[rank]);
            let end = start + alone.duration(action) as i64;
            (starts[rank][position], free[rank]) = (start, end);
            if let Some((tensor, slot)) = to {
                let (placement, stage) = (alone.placement, action.stage());
                let is_forward = action.kind() == ActionKind::Forward;
                let other = if is_forward == is_backwards {
                    placement.previous(stage)
                } else {
                    placement.next(stage)
                };
                let crosses = other.is_some_and(|other| placement.rank_of(other).index() != rank);
                let more = if crosses { allowance(slot + 2 * usize::from(is_backwards)) } else { 0 };
                arrivals[tensor][slot] = end + more;
            }
        }
        starts
    };
    let mut next = vec![0; alone.rows.len()];
    let place = |&rank: &usize| {
        next[rank] += 1;
        (rank, next[rank] - 1)
    };
    let sequence: Vec<(usize, usize)> = alone.sequence.iter().map(place).collect();
    let heads = starts(&mut sequence.iter().copied(), false);
    let tails = starts(&mut sequence.iter().rev().copied(), true);
    let time = |rank: usize, position: usize| {
        let action = alone.rows[rank][position];
        let latest = 2 * period - tails[rank][position] - alone.duration(action) as i64;
        let due = (heads[rank][position] * (4 - rule.lateness) + latest * rule.lateness) / 4;
        let is_last = rule.weights_last && action.kind() == ActionKind::WeightBackward;
        if is_last { due.saturating_add(i64::MAX / 4) } else { due }
    };
    let row = |(rank, row): (usize, &Vec<_>)| (0..row.len()).map(|position| time(rank, position)).collect();
    Due { times: alone.rows.iter().enumerate().map(row).collect(), period }
}
