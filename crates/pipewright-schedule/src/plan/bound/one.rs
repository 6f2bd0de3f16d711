//! The bound for one stage per rank, exact up to the assumptions of [`Step::cut_time`].
//!
//! If there are few cuts, all are tried. Otherwise each stage in turn takes as many layers as the time
//! allows. That is best: if a stage begins later, it saves `m` times the work of the layers that it does not
//! have, and starts at most one forward and one input backward of them later. Its first backward does not
//! start later, because that depends on the layers after the stage.

use crate::plan::bound::bisect::bisect;
use crate::plan::cuts::{count_cuts, for_each_cut};
use crate::plan::rank_times::{OwnSums, Step};
use crate::plan::tuning::bound::{ACCURACY, MOST_CUTS};

/// Returns a time that no step with one stage per rank is below. `low` is a bound already.
pub(super) fn bound(step: Step<'_>, low: f64) -> f64 {
    if count_cuts(step.layers.count(), step.ranks as usize) <= MOST_CUTS {
        return shortest(step);
    }
    bisect(low, ACCURACY, |time| {
        let mut start = 0;
        for rank in 0..step.ranks as usize {
            start = furthest(step, rank, start, time);
        }
        start == step.layers.count()
    })
}

/// Returns the smallest [`Step::cut_time`] of all cuts.
fn shortest(step: Step<'_>) -> f64 {
    let rank_of: Vec<u32> = (0..step.ranks).collect();
    let mut least = f64::INFINITY;
    for_each_cut(step.layers.count(), step.ranks as usize, &mut |starts| {
        least = least.min(step.cut_time(&rank_of, starts));
    });
    least
}

/// Returns the end of the longest stage that rank `rank` can have from layer `start` on.
fn furthest(step: Step<'_>, rank: usize, start: usize, time: f64) -> usize {
    let path = step.path();
    let fits = |end: usize| {
        let range = start..end;
        let (forward, input) = (step.layers.forward(range.clone()), step.layers.input(range.clone()));
        let mut sums = OwnSums::default();
        sums.add(&step, range);
        (end == start || step.own_time(rank, start, &sums) <= time)
            && path + (step.microbatches - 1.0) * forward.max(input) <= time
    };
    let (mut low, mut high) = (start, step.layers.count());
    while low < high {
        let middle = (low + high).div_ceil(2);
        if fits(middle) { low = middle } else { high = middle - 1 }
    }
    low
}
