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
