//! The bounds for two stages a rank, exact up to bounds 1 and 2 of [`Step::cut_time`].
//!
//! Ranks take their layers one after another: a range at the front and, in a V, a range at the back; in a loop, a range
//! behind the cut between the first and the second round. For each front that the ranks so far can reach, only the best
//! second range matters: what is left for the others is then the least. Ranges may be empty, which only weakens the
//! bound. Time: for each tested time, `n` fronts for each rank, with as many ends as the time allows; in a loop for
//! each cut between the rounds.

use crate::plan::bound::bisect;
use crate::plan::rank_times::Step;

/// The largest size of a loop for which the bound is computed: layers squared, times ranks.
const LARGEST_LOOP: usize = 50_000;

/// Returns a time that no V with two stages a rank is below. `low` is a bound already.
pub(super) fn v_bound(step: Step<'_>, low: f64) -> f64 {
    let layers = step.layers.count();
    bisect(low, |time| {
        // For each front, the first layer of the back; fewer layers between are better.
        let mut backs: Vec<Option<usize>> = vec![None; layers + 1];
        backs[0] = Some(layers);
        for rank in 0..step.ranks as usize {
            let mut next: Vec<Option<usize>> = vec![None; layers + 1];
            for (front, back) in backs.iter().enumerate() {
                let &Some(back) = back else { continue };
                for (end, known) in next.iter_mut().enumerate().take(back + 1).skip(front) {
                    let fits = |start: usize| fits(step, rank, [front..end, start..back], time);
                    if !fits(back) {
                        break;
                    }
                    let start = lowest(end, back, fits);
                    if start == end {
                        return true;
                    }
                    *known = Some(known.map_or(start, |known| known.min(start)));
                }
            }
            backs = next;
        }
        false
    })
}

/// Returns a time that no loop with two stages a rank is below; `None` if that takes too long. `low` is a bound
/// already.
pub(super) fn loop_bound(step: Step<'_>, low: f64) -> Option<f64> {
    let layers = step.layers.count();
    if layers * layers * step.ranks as usize > LARGEST_LOOP {
        return None;
    }
    Some(bisect(low, |time| (1..layers).any(|cut| loop_fits(step, cut, time))))
}

/// Returns whether a loop with its second round from layer `cut` on may take at most `time`.
fn loop_fits(step: Step<'_>, cut: usize, time: f64) -> bool {
    let layers = step.layers.count();
    let mut seconds: Vec<Option<usize>> = vec![None; cut + 1];
    seconds[0] = Some(cut);
    for rank in 0..step.ranks as usize {
        let mut next: Vec<Option<usize>> = vec![None; cut + 1];
        for (front, second) in seconds.iter().enumerate() {
            let &Some(second) = second else { continue };
            for (end, known) in next.iter_mut().enumerate().skip(front) {
                let fits = |stop: usize| fits(step, rank, [front..end, second..stop], time);
                if !fits(second) {
                    break;
                }
                let stop = highest(second, layers, fits);
                *known = (*known).max(Some(stop));
            }
        }
        seconds = next;
    }
    seconds[cut] == Some(layers)
}

fn fits(step: Step<'_>, rank: usize, ranges: [std::ops::Range<usize>; 2], time: f64) -> bool {
    let [first, second] = ranges;
    let start = first.start;
    let work = step.layers.work(first.clone()) + step.layers.work(second.clone());
    let critical = step.layers.forward(first.clone())
        + step.layers.input(first)
        + step.layers.forward(second.clone())
        + step.layers.input(second);
    step.rank_time(rank, start, work, critical) <= time
}

/// Returns the lowest number from `low` to `high` that fits; `high` does, and so does every number above one that does.
fn lowest(mut low: usize, mut high: usize, fits: impl Fn(usize) -> bool) -> usize {
    while low < high {
        let middle = usize::midpoint(low, high);
        if fits(middle) { high = middle } else { low = middle + 1 }
    }
    low
}

/// Returns the highest number from `low` to `high` that fits; `low` does, and so does every number below one that does.
fn highest(mut low: usize, mut high: usize, fits: impl Fn(usize) -> bool) -> usize {
    while low < high {
        let middle = (low + high).div_ceil(2);
        if fits(middle) { low = middle } else { high = middle - 1 }
    }
    low
}
