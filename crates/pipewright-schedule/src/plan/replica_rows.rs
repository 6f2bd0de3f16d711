//! The rows of unlike replicas: a replica gets rows by the speeds of its ranks, and more as long as that makes the slowest
//! ranks of all places together faster.

use crate::ids::Rank;
use crate::plan::tuning::unlike::MOVED_ROWS;
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
    let all = u64::from(mean) * replicas.len() as u64;
    let speed = |replica: &Vec<Rank>| replica.iter().map(|rank| 1.0 / times[rank.index()]).sum::<f64>();
    let speeds: Vec<f64> = replicas.iter().map(speed).collect();
    if !speeds.iter().all(|speed| speed.is_finite()) {
        return vec![mean; replicas.len()];
    }
    let sum: f64 = speeds.iter().sum();
    let mut rows: Vec<u32> = speeds.iter().map(|speed| ((all as f64 * speed / sum) as u32).max(1)).collect();
    // Rounding leaves some rows over, or takes too many.
    let gives = |rows: &[u32]| rows.iter().map(|&own| u64::from(own)).sum::<u64>();
    while gives(&rows) != all {
        let is_few = gives(&rows) < all;
        let load = |at: &usize| f64::from(rows[*at] + u32::from(is_few)) / speeds[*at];
        let order = (0..rows.len()).filter(|&at| is_few || rows[at] > 1);
        let by_load = |one: &usize, other: &usize| load(one).total_cmp(&load(other));
        match if is_few { order.min_by(by_load) } else { order.max_by(by_load) } {
            Some(at) if is_few => rows[at] += 1,
            Some(at) => rows[at] -= 1,
            None => break,
        }
    }
    for _ in 0..MOVED_ROWS {
        let now = places(times, replicas, &rows, mean);
        let moved = |from: usize, to: usize| {
            let mut moved = rows.clone();
            moved[from] -= 1;
            moved[to] += 1;
            moved
        };
        let pairs = (0..rows.len()).flat_map(|from| (0..rows.len()).map(move |to| (from, to)));
        let moves =
            pairs.filter(|&(from, to)| from != to && rows[from] > 1).map(|(from, to)| moved(from, to));
        let value = |rows: &Vec<u32>| places(times, replicas, rows, mean);
        let best = moves.max_by(|one, other| value(one).total_cmp(&value(other)));
        match best.filter(|best| value(best) > now * (1.0 + 1e-9)) {
            Some(best) => rows = best,
            None => break,
        }
    }
    rows
}
