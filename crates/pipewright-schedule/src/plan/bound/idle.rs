//! The bound for several stages a rank from the time in which ranks are idle, over all cuts and all orders of the later
//! rounds.
//!
//! The sum of the idle times of all ranks is a sum over stages (`terms.rs`), so a table over stages and layers finds the
//! cut with the smallest sum. The ranks together have `p T`, which is at least their work and their idle time. Cuts in
//! which the work of one stage exceeds `T` do not count.

use crate::plan::bound::bisect;
use crate::plan::bound::terms::{Arrivals, Terms, weights};
use crate::plan::class::Class;
use crate::plan::rank_times::Step;

/// The largest table over stages, first and last layers for which the bound is computed: a second on one core.
const LARGEST_TABLE: usize = 8_000_000;

/// Returns a time that no step with the rounds of `class` is below; `low`, which is a bound already, if the model has so many
/// layers that this takes too long.
pub(super) fn bound(step: Step<'_>, class: Class, low: f64) -> f64 {
    let layers = step.layers.count();
    if class.stages().saturating_mul(layers).saturating_mul(layers) > LARGEST_TABLE {
        return low;
    }
    let arrivals = Arrivals::of(step);
    let ranks = f64::from(step.ranks);
    let work = step.microbatches * step.layers.work(0..step.layers.count());
    let weights = weights();
    bisect(low, |time| {
        // A cut that is short enough for one mean is often short enough for others.
        let mut known: Vec<Vec<usize>> = Vec::new();
        weights.iter().all(|&weights| {
            let terms = Terms { step, class, arrivals: &arrivals, weights };
            let is_enough = |idle: f64| work + idle <= ranks * time;
            if known.iter().any(|starts| is_enough(of_cut(&terms, starts))) {
                return true;
            }
            let Some((idle, starts)) = least(&terms, time) else { return false };
            known.push(starts);
            is_enough(idle)
        })
    })
}

/// Returns the smallest idle time of all ranks together, and its cut; `None` if every cut has a stage with more work
/// than `time`.
fn least(terms: &Terms<'_>, time: f64) -> Option<(f64, Vec<usize>)> {
    let (layers, stages) = (terms.step.layers.count(), terms.class.stages());
    let mut before = vec![f64::INFINITY; layers + 1];
    before[0] = 0.0;
    // For each stage and each end of it, its best first layer.
    let mut firsts = vec![0; stages * (layers + 1)];
    for stage in 0..stages {
        let mut after = vec![f64::INFINITY; layers + 1];
        let last = layers - (stages - stage - 1);
        for first in (stage..last).filter(|&first| before[first].is_finite()) {
            let start = terms.start(stage, first);
            for end in first + 1..=last {
                if start + terms.step.microbatches * terms.step.layers.work(first..end) > time {
                    break;
                }
                let sum = before[first] + terms.idle(stage, first..end);
                if sum < after[end] {
                    after[end] = sum;
                    firsts[stage * (layers + 1) + end] = first;
                }
            }
        }
        before = after;
    }
    let mut starts = vec![layers; stages + 1];
    for stage in (0..stages).rev() {
        starts[stage] = firsts[stage * (layers + 1) + starts[stage + 1]];
    }
    before[layers].is_finite().then_some((before[layers], starts))
}

/// Returns the idle time of all ranks together for a cut.
fn of_cut(terms: &Terms<'_>, starts: &[usize]) -> f64 {
    starts.windows(2).enumerate().map(|(stage, range)| terms.idle(stage, range[0]..range[1])).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::bound::equal_layers;
    use crate::plan::class::Path;

    /// Checks the bound for two stages a rank of one layer each, whose three times are 1. No order and no placement is
    /// faster than `optimum`.
    fn check(ranks: u32, microbatches: u32, expected: f64, optimum: f64) {
        let layers = equal_layers(2 * ranks as usize, ranks);
        let step = Step::of(&layers, ranks, microbatches);
        let found = bound(step, Class { ranks, chunks: 2, path: Path::Loop }, 0.0);
        // The bisection ends below the bound.
        assert!((expected * 0.999..=expected).contains(&found) && found <= optimum, "{found} {expected}");
    }

    /// The last stage of each rank receives few forwards before its first backward. An enumeration of all orders gave
    /// the optima.
    #[test]
    fn ranks_are_idle_before_their_first_backwards() {
        // Work of 12 a rank. Before its first backward, one rank is idle for 1 of 4, and the other one for 1 of 5.
        check(2, 2, 13.0, 13.0);
        check(2, 1, 8.5, 9.0);
        check(2, 3, 18.5, 19.0);
        check(3, 1, 11.0, 13.0);
        check(3, 2, 46.0 / 3.0, 16.0);
        check(3, 3, 59.0 / 3.0, 20.0);
        // Work of 24 a rank. The ranks are idle for 3 of 8, 2 of 9, 2 of 10 and 3 of 11.
        check(4, 4, 26.5, f64::INFINITY);
    }

    /// With many microbatches, only the fill is left.
    #[test]
    fn enough_microbatches_keep_ranks_busy() {
        check(4, 40, 240.0 + 1.5, f64::INFINITY);
    }
}
