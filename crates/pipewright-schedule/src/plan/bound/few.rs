//! The bound for arrangements with few cuts: the smallest of all.

use crate::plan::class::Class;
use crate::plan::cuts::{count_cuts, for_each_cut};
use crate::plan::rank_times::Step;

/// The largest number of cuts that are tried.
const MOST: u64 = 6_000;

/// Returns the smallest [`Step::cut_time`] of all cuts; `None` if there are too many.
pub(super) fn bound(step: Step<'_>, class: Class) -> Option<f64> {
    if count_cuts(step.layers.count(), class.stages()) > MOST {
        return None;
    }
    let rank_of = class.ranks_of();
    let mut least = f64::INFINITY;
    for_each_cut(step.layers.count(), class.stages(), &mut |starts| {
        least = least.min(step.cut_time(&rank_of, starts));
    });
    Some(least)
}

/// Returns the smallest bound of all cuts with two stages a rank, whichever ranks the second round visits first; `None`
/// if there are too many.
///
/// For a cut, the longest stage of the first round is best with the shortest of the second, and so on: exchanging two
/// partners never makes the larger of two sums smaller.
pub(super) fn matched(step: Step<'_>, class: Class) -> Option<f64> {
    let ranks = class.ranks as usize;
    if class.chunks != 2 || count_cuts(step.layers.count(), class.stages()) > MOST {
        return None;
    }
    let mut least = f64::INFINITY;
    for_each_cut(step.layers.count(), class.stages(), &mut |starts| {
        let work = |stage: usize| step.microbatches * step.layers.work(starts[stage]..starts[stage + 1]);
        let mut first: Vec<f64> = (0..ranks).map(|rank| step.fill(rank, starts[rank]) + work(rank)).collect();
        let mut second: Vec<f64> = (ranks..2 * ranks).map(work).collect();
        first.sort_by(f64::total_cmp);
        second.sort_by(|one, other| other.total_cmp(one));
        let longest = first.iter().zip(&second).map(|(one, other)| one + other).fold(0.0, f64::max);
        least = least.min(longest);
    });
    Some(least)
}
