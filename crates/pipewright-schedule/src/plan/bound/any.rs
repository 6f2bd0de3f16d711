//! The bound for every assignment of layers to ranks, also of layers that are not neighbours.
//!
//! Sort the ranks by the position of their first layer. At least `r` layers, and `r` messages, come before the first
//! layer of rank `r`, so it starts no earlier than `F` of the first `r` layers and `r` hops, and ends its last input
//! backward as much before the end. A time is too short if
//!
//! 1. the ranks together have less time than there is work, after their fill, or between their fill and their drain for
//!    `F` and `I`;
//! 2. the ranks together have less time than there is work for `I` and `W`, after their first backwards. Sort the ranks by
//!    the distance of their last layer from the end. At least `r` layers, on other ranks, come after that of rank `r`. So
//!    its first backward starts no earlier than `F` of all layers, `I` of the last `r` layers, and their messages;
//! 3. the layers, as items of a bin packing, do not fit into `p` bins of that time.
//!
//! For the packing, (a) among the heaviest `p k + 1` layers, some rank has `k + 1`; (b) the bound of Martello and Toth,
//! "Lower bounds and reduction procedures for the bin packing problem", 1990; (c) the dual feasible functions of Fekete
//! and Schepers, "New classes of fast lower bounds for bin packing problems", 2001; (d) whole units: for any size of a unit,
//! the whole units in the layers of a rank are at most those in its time after its fill.

use crate::plan::bound::bisect;
use crate::plan::rank_times::Step;

/// The largest number of parts of an item that a unit is.
const PARTS: u32 = 3;
/// The largest parameter of the dual feasible functions.
const FUNCTIONS: u32 = 12;

/// Returns a time that no step is below.
pub(super) fn bound(step: Step<'_>) -> f64 {
    let mut items: Vec<f64> = (0..step.layers.count())
        .map(|layer| step.microbatches * step.layers.work(layer..layer + 1))
        .collect();
    let slowest = step.layers.list.iter().map(|layer| layer.forward.max(layer.input)).fold(0.0, f64::max);
    let path = step.path() + (step.microbatches - 1.0) * slowest;
    let placed = (0..items.len()).map(|layer| step.layers.forward(0..layer) + items[layer]);
    let low = placed.fold(path, f64::max);
    items.sort_by(|one, other| other.total_cmp(one));
    let low = low.max(several(&items, step.ranks as usize));
    let units = units(&items);
    bisect(low, |time| {
        has_time(step, time)
            && fits(&items, step.ranks as usize, time)
            && units.iter().all(|unit| has_units(step, unit, time))
    })
}

/// A size, and the number of times that it fits into each item as a whole, summed over all items.
struct Unit {
    size: f64,
    needed: f64,
}

/// Returns units that divide the sizes of items. `items` descends.
fn units(items: &[f64]) -> Vec<Unit> {
    let mut sizes: Vec<f64> = items.to_vec();
    sizes.dedup_by(|one, other| (*one - *other).abs() <= 1e-9 * *other);
    let parts = sizes.iter().flat_map(|&size| (1..=PARTS).map(move |part| size / f64::from(part)));
    let unit = |size: f64| {
        // Slightly less, so that an item has as many units of its own size as it has parts. Any size is valid. A quotient
        // that rounding has made too large would break the bound.
        let size = size * (1.0 - 1e-9);
        let whole = |item: &f64| (item / size * (1.0 - 1e-12)).floor();
        Unit { size, needed: items.iter().map(whole).sum() }
    };
    parts.filter(|&size| size > 0.0).map(unit).collect()
}

/// Returns whether the whole units in the times of all ranks are as many as those in the items.
fn has_units(step: Step<'_>, unit: &Unit, time: f64) -> bool {
    let count = step.layers.count();
    let of_rank = |rank: usize| {
        let left = time - step.fill(rank, rank.min(count));
        (left / unit.size + 1e-9).floor().max(0.0)
    };
    (0..step.ranks as usize).map(of_rank).sum::<f64>() >= unit.needed
}

/// Returns the bound from the ranks that have several of the heaviest layers. `items` descends.
fn several(items: &[f64], ranks: usize) -> f64 {
    let mut most = 0.0f64;
    let mut of_rank = 1;
    while ranks * of_rank < items.len() {
        let last = ranks * of_rank;
        most = most.max(items[last - of_rank..=last].iter().sum());
        of_rank += 1;
    }
    most
}

fn has_time(step: Step<'_>, time: f64) -> bool {
    let all = 0..step.layers.count();
    let critical = step.layers.forward(all.clone()) + step.layers.input(all.clone());
    let (mut filled, mut drained) = (0.0, 0.0);
    for rank in 0..step.ranks as usize {
        let left = time - step.fill(rank, rank.min(all.end));
        filled += left.max(0.0);
        drained += (left - step.drain(rank, rank.min(all.end))).max(0.0);
    }
    let backward: f64 = (0..step.ranks as usize)
        .map(|behind| (time - step.first_backward(all.end - behind.min(all.end), behind)).max(0.0))
        .sum();
    if backward < step.microbatches * (step.layers.work(all.clone()) - step.layers.forward(all.clone())) {
        return false;
    }
    filled >= step.microbatches * step.layers.work(all) && drained >= step.microbatches * critical
}

/// Returns whether none of the bounds proves that the items do not fit into so many bins of this size. `items`
/// descends.
fn fits(items: &[f64], bins: usize, size: f64) -> bool {
    let size = size * (1.0 + 1e-12);
    if items.first().is_some_and(|&largest| largest > size) {
        return false;
    }
    let (bins, half) = (bins as f64, size / 2.0);
    let thresholds = items.iter().copied().filter(|&item| item <= half).chain([0.0]);
    for threshold in thresholds {
        let alone = items.iter().filter(|&&item| item > size - threshold && item > half).count() as f64;
        let large = items.iter().filter(|&&item| item > half && item <= size - threshold);
        let (count, sum) = large.fold((0.0, 0.0), |(count, sum), item| (count + 1.0, sum + item));
        let small: f64 = items.iter().filter(|&&item| item >= threshold && item <= half).sum();
        let more = ((small - (count * size - sum)) / size - 1e-9).ceil().max(0.0);
        if alone + count + more > bins {
            return false;
        }
    }
    (2..=FUNCTIONS).all(|parameter| {
        let of = |item: &f64| {
            let scaled = f64::from(parameter + 1) * item / size;
            // A scaled item that is nearly a whole number counts as a little less, which only weakens the bound.
            let rounded = (scaled - 1e-9).floor() / f64::from(parameter);
            if scaled - scaled.round() == 0.0 { rounded.min(item / size) } else { rounded.max(0.0) }
        };
        items.iter().map(of).sum::<f64>() <= bins + 1e-9
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::bound::equal_layers;

    fn check(layers: usize, ranks: u32, microbatches: u32, expected: f64) {
        let layers = equal_layers(layers, ranks);
        let found = bound(Step::of(&layers, ranks, microbatches));
        // The bisection ends below the bound.
        assert!((expected * 0.999..=expected).contains(&found), "{found} {expected}");
    }

    /// Layers are whole: a rank that starts late has time for fewer of them. The packing alone proves 144, 72 and 384.
    #[test]
    fn whole_layers_do_not_fill_the_time_of_late_ranks() {
        check(40, 16, 16, 151.0);
        check(24, 8, 8, 79.0);
        check(64, 16, 32, 399.0);
    }

    #[test]
    fn equal_items_need_whole_bins() {
        let items = vec![1.0; 40];
        assert_eq!(several(&items, 16), 3.0);
        assert!(!fits(&items, 16, 2.99));
        assert!(fits(&items, 16, 3.0));
        assert!(!fits(&[0.6; 5], 4, 1.1), "no two fit together");
    }
}
