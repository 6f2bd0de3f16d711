//! The bound for every assignment of layers to ranks, also of layers that are not neighbours.
//!
//! Sort the ranks by the position of their first layer. At least `r` layers, and `r` messages, come before
//! the first layer of rank `r`, so it starts no earlier than `F` of the first `r` layers and `r` hops. A time
//! is too short if
//!
//! 1. the ranks together have less time than there is work, after their fill;
//! 2. for some size of a unit, the whole units in the times of all ranks, after their fill, are fewer than
//!    the whole units in the layers: a layer is on one rank.
//!
//! A time that is shorter than the path of all microbatches through the slowest layer is also too short.

use crate::plan::bound::bisect::bisect;
use crate::plan::rank_times::Step;
use crate::plan::tuning::bound::{ACCURACY, PARTS};

/// Returns a time that no step is below.
pub(super) fn bound(step: Step<'_>) -> f64 {
    let items: Vec<f64> = (0..step.layers.count())
        .map(|layer| step.microbatches * step.layers.work(layer..layer + 1))
        .collect();
    let slowest = step.layers.list.iter().map(|layer| layer.forward.max(layer.input)).fold(0.0, f64::max);
    let path = step.path() + (step.microbatches - 1.0) * slowest;
    let units = units(items, PARTS);
    let work = step.layers.work(0..step.layers.count());
    bisect(path, ACCURACY, |time| {
        step.has_time(time, work) && units.iter().all(|unit| has_units(step, unit, time))
    })
}

/// A size, and the number of times that it fits into each item as a whole, summed over all items.
struct Unit {
    size: f64,
    needed: f64,
}

/// Returns units that divide the sizes of items into at most `most_parts` parts.
fn units(mut items: Vec<f64>, most_parts: u32) -> Vec<Unit> {
    items.sort_by(|one, other| other.total_cmp(one));
    let mut sizes: Vec<f64> = items.clone();
    sizes.dedup_by(|one, other| (*one - *other).abs() <= 1e-9 * *other);
    let parts = sizes.iter().flat_map(|&size| (1..=most_parts).map(move |part| size / f64::from(part)));
    let unit = |size: f64| {
        // Slightly less, so that an item has as many units of its own size as it has parts. Any size is
        // valid. A quotient that rounding has made too large would break the bound.
        let size = size * (1.0 - 1e-9);
        let whole = |item: &f64| (item / size * (1.0 - 1e-12)).floor();
        Unit { size, needed: items.iter().map(whole).sum() }
    };
    parts.filter(|&size| size > 0.0).map(unit).collect()
}

/// Returns whether the whole units in the times of all ranks are as many as the units in the items.
fn has_units(step: Step<'_>, unit: &Unit, time: f64) -> bool {
    let count = step.layers.count();
    let units_of = |rank: usize| {
        let left = time - step.fill(rank, rank.min(count));
        (left / unit.size + 1e-9).floor().max(0.0)
    };
    (0..step.ranks as usize).map(units_of).sum::<f64>() >= unit.needed
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

    /// Layers are whole: a rank that starts late has time for fewer of them. Without the fill, 144, 72 and
    /// 384 are enough.
    #[test]
    fn whole_layers_do_not_fill_the_time_of_late_ranks() {
        check(40, 16, 16, 151.0);
        check(24, 8, 8, 79.0);
        check(64, 16, 32, 399.0);
    }

    #[test]
    fn items_need_whole_units() {
        let needed = |items: &[f64], size: f64| {
            let units = units(items.to_vec(), 2);
            let unit = units.iter().find(|unit| (unit.size - size).abs() < 1e-6).expect("the unit");
            unit.needed
        };
        assert_eq!(needed(&[1.0; 40], 1.0), 40.0);
        assert_eq!(needed(&[1.0, 0.7, 0.3], 0.5), 3.0);
        assert_eq!(needed(&[1.0, 0.7, 0.3], 0.7), 2.0);
    }
}
