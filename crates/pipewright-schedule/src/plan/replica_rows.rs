//! The rows of unlike replicas: a replica gets rows by the speeds of its ranks, and more as long as that makes the slowest
//! ranks of all places together faster.
//!
//! Rows move in runs that become half as long again and again, so large microbatches take a few more runs and not more
//! time for each row. A run leaves a replica that has the slowest rank of some place, because no other replica slows a
//! place, and it goes to the replica where it helps most. With `n` replicas of `p` ranks, a move takes `n p^2` steps. The
//! first rows are in the ratio of the speeds of the replicas, or of their ranks at one place.

use std::ops::Range;

use crate::ids::Rank;
use crate::plan::tuning::unlike::{FIRST_ROWS, MOVED_RUNS};
use crate::profile::{Profile, RankProfile};

/// Returns the time in which each rank computes all layers for a microbatch of the profile.
pub(super) fn times_of(profile: &Profile) -> Vec<f64> {
    let time = |rank: &RankProfile| -> f64 {
        let own = profile.at_speed_of(rank);
        own.each_layer().map(|layer| layer.forward_s + layer.whole_backward_s()).sum()
    };
    profile.ranks.iter().map(time).collect()
}

/// Returns how many microbatches of the mean rows the slowest ranks of all places compute in a second.
pub(super) fn places(times: &[f64], replicas: &[Vec<Rank>], rows: &[u32], mean: u32) -> f64 {
    let slowest = |place: usize| {
        let own =
            replicas.iter().zip(rows).map(|(replica, &rows)| times[replica[place].index()] * f64::from(rows));
        own.fold(0.0, f64::max) / f64::from(mean)
    };
    (0..replicas[0].len()).map(|place| 1.0 / slowest(place)).sum()
}

/// Returns the rows of a microbatch of each replica, whose mean is `mean`.
pub(super) fn rows_of(times: &[f64], replicas: &[Vec<Rank>], mean: u32) -> Vec<u32> {
    let speed_at = |replica: &[Rank]| replica.iter().map(|rank| 1.0 / times[rank.index()]).sum::<f64>();
    let ranks = replicas.first().map_or(0, Vec::len);
    let places_of =
        |range: Range<usize>| replicas.iter().map(move |replica| speed_at(&replica[range.clone()]));
    let speeds: Vec<f64> = places_of(0..ranks).collect();
    if mean == 0 || !speeds.iter().all(|speed| speed.is_finite()) {
        return vec![mean; replicas.len()];
    }
    let all = u64::from(mean) * replicas.len() as u64;
    let value = |rows: &Vec<u32>| places(times, replicas, rows, mean);
    let ranges = std::iter::once(0..ranks).chain((0..ranks).map(|place| place..place + 1));
    let first = ranges.map(|range| rows_by_speed(&places_of(range).collect::<Vec<_>>(), all));
    let mut first: Vec<Vec<u32>> = first.collect();
    first.sort_by(|one, other| value(other).total_cmp(&value(one)));
    first.dedup();
    let moved = first.into_iter().take(FIRST_ROWS).map(|rows| moved(times, replicas, rows, mean));
    moved.reduce(|best, rows| if value(&rows) > value(&best) { rows } else { best }).unwrap_or_default()
}

/// Returns the rows after all moves that help.
fn moved(times: &[f64], replicas: &[Vec<Rank>], mut rows: Vec<u32>, mean: u32) -> Vec<u32> {
    let mut run = 1 << mean.ilog2();
    while run > 0 {
        for _ in 0..MOVED_RUNS {
            match best_move(times, replicas, &rows, run) {
                Some([from, to]) => (rows[from], rows[to]) = (rows[from] - run, rows[to] + run),
                None => break,
            }
        }
        run /= 2;
    }
    rows
}

/// Divides `all` rows by speeds. Each replica has at least one row, so there are at least as many rows as replicas.
fn rows_by_speed(speeds: &[f64], all: u64) -> Vec<u32> {
    // The conversion limits rows to the numbers from 0 to the largest one.
    let rows_in = |time: f64| speeds.iter().map(move |speed| ((speed * time) as u32).max(1));
    let gives = |time: f64| rows_in(time).map(u64::from).sum::<u64>();
    let slowest = speeds.iter().copied().fold(f64::INFINITY, f64::min);
    let (mut low, mut high) = (0.0, (all as f64 + 1.0) / slowest);
    // The time in which the replicas compute at most all rows.
    for _ in 0..f64::MANTISSA_DIGITS + u64::BITS {
        let middle = low + (high - low) / 2.0;
        if gives(middle) > all { high = middle } else { low = middle }
    }
    let mut rows: Vec<u32> = rows_in(low).collect();
    let mut left = all.saturating_sub(gives(low));
    // The rows that are left over go to the replicas that need the least time with one more.
    let mut order: Vec<usize> = (0..rows.len()).collect();
    let load = |at: usize| (f64::from(rows[at]) + 1.0) / speeds[at];
    order.sort_by(|&one, &other| load(one).total_cmp(&load(other)));
    while left > 0 {
        let each = (left / order.len() as u64).max(1);
        for &at in &order {
            let more = each.min(left).min(u64::from(u32::MAX - rows[at]));
            rows[at] += more as u32;
            left -= more;
        }
    }
    rows
}

/// Returns between which replicas `run` rows move best; `None` if no such move makes the places together faster.
fn best_move(times: &[f64], replicas: &[Vec<Rank>], rows: &[u32], run: u32) -> Option<[usize; 2]> {
    let ranks = replicas[0].len();
    let load =
        |replica: usize, place: usize, rows: u32| times[replicas[replica][place].index()] * f64::from(rows);
    let slowest_at = |place: usize| {
        let loads = (0..rows.len()).map(move |at| (at, load(at, place, rows[at])));
        loads.max_by(|one, other| one.1.total_cmp(&other.1))
    };
    let slowest: Vec<(usize, f64)> = (0..ranks).filter_map(slowest_at).collect();
    let mut sources: Vec<usize> = slowest.iter().map(|&(at, _)| at).filter(|&at| rows[at] > run).collect();
    sources.sort_unstable();
    sources.dedup();
    let now: f64 = slowest.iter().map(|&(_, load)| 1.0 / load).sum();
    let mut best = None;
    let mut most = now * (1.0 + 1e-9);
    for from in sources {
        let rest = |place: usize| {
            let others = (0..rows.len()).filter(|&at| at != from).map(|at| load(at, place, rows[at]));
            others.fold(load(from, place, rows[from] - run), f64::max)
        };
        let rest: Vec<f64> = (0..ranks).map(rest).collect();
        for to in (0..rows.len()).filter(|&to| to != from) {
            let Some(more) = rows[to].checked_add(run) else { continue };
            let value: f64 = (0..ranks).map(|place| 1.0 / rest[place].max(load(to, place, more))).sum();
            if value > most {
                (best, most) = (Some([from, to]), value);
            }
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::numbers::Numbers;

    /// Makes replicas of `ranks` ranks with these times.
    fn grouped(times: &[f64], ranks: usize) -> Vec<Vec<Rank>> {
        let numbers: Vec<Rank> = (0..times.len() as u32).map(Rank::new).collect();
        numbers.chunks(ranks).map(<[Rank]>::to_vec).collect()
    }

    /// Returns the most microbatches in a second over all rows of the replicas.
    fn best_of_all(times: &[f64], replicas: &[Vec<Rank>], mean: u32) -> f64 {
        fn rest(rows: &mut Vec<u32>, left: u32, count: usize, visit: &mut impl FnMut(&[u32])) {
            if rows.len() + 1 == count {
                rows.push(left);
                visit(rows);
                rows.pop();
                return;
            }
            for own in 1..=left - (count - rows.len() - 1) as u32 {
                rows.push(own);
                rest(rows, left - own, count, visit);
                rows.pop();
            }
        }
        let mut best = 0.0f64;
        let count = replicas.len();
        rest(&mut Vec::new(), mean * count as u32, count, &mut |rows| {
            best = best.max(places(times, replicas, rows, mean));
        });
        best
    }

    #[test]
    fn rows_are_nearly_the_best_of_all() {
        let mut numbers = Numbers(7);
        let mut worst = 1.0f64;
        for case in 0..120 {
            let (count, ranks) = (2 + case % 3, 1 + case % 4);
            let times: Vec<f64> = (0..count * ranks).map(|_| 1.0 + numbers.below(9) as f64).collect();
            let (replicas, mean) = (grouped(&times, ranks), 1 + numbers.below(8) as u32);
            let rows = rows_of(&times, &replicas, mean);
            assert_eq!(rows.iter().sum::<u32>(), mean * count as u32, "{rows:?}");
            assert!(rows.iter().all(|&own| own > 0), "{rows:?}");
            let ratio = places(&times, &replicas, &rows, mean) / best_of_all(&times, &replicas, mean);
            if ranks == 1 {
                assert!(ratio > 1.0 - 1e-9, "{times:?}, {mean} rows: {rows:?} have {ratio} of the best");
            }
            worst = worst.min(ratio);
        }
        assert!(worst > 0.9, "{worst}");
    }

    /// The largest numbers of rows and very unequal speeds.
    #[test]
    fn rows_stay_within_their_type() {
        for (times, mean) in [
            (vec![1.0, 1e9], u32::MAX),
            (vec![1.0, 1.0, 1e6], u32::MAX / 2),
            (vec![1e-300, 1e300], 1 << 31),
            (vec![1.0, 1e9], 1),
        ] {
            let rows = rows_of(&times, &grouped(&times, 1), mean);
            let all: u64 = rows.iter().map(|&own| u64::from(own)).sum();
            assert_eq!(all, u64::from(mean) * times.len() as u64, "{times:?}: {rows:?}");
            assert!(rows.iter().all(|&own| own > 0), "{rows:?}");
        }
    }

    /// A search row by row would move a million rows of each replica.
    #[test]
    fn large_microbatches_of_many_replicas_are_in_the_ratio_of_the_speeds() {
        let speeds: Vec<f64> = (0..4096).map(|replica| 1.0 + f64::from(replica % 7)).collect();
        // The second rank of each replica is half as fast as the first one.
        let times: Vec<f64> = speeds.iter().flat_map(|speed| [1.0 / speed, 2.0 / speed]).collect();
        let (replicas, mean) = (grouped(&times, 2), 1 << 20);
        let rows = rows_of(&times, &replicas, mean);
        let mean_speed = speeds.iter().sum::<f64>() / speeds.len() as f64;
        let found = places(&times, &replicas, &rows, mean);
        let most = mean_speed * (1.0 + 0.5);
        assert!((0.9999..=1.0 + 1e-9).contains(&(found / most)), "{found} of {most}");
    }
}
