//! Whether whole layers fit into the times of unlike ranks, by a search with a limited number of visits.
//!
//! The ranks together have some more time than there is work: the waste. One rank after another, the smallest one
//! first, gets each set of the layers that are left whose work fills its time but for the waste that is left, and
//! whose bytes fit into its memory. If no sets for all ranks leave no layer, the time is too short. There are few
//! such sets if the waste is small. This matters for models with a few layers for each rank.

use crate::plan::tuning::unlike::VISITS;

/// The layers of a model.
pub(super) struct Items {
    /// The work and the bytes of each layer, from the most work to the least.
    sizes: Vec<(f64, u64)>,
    work: f64,
}

/// The room of a rank.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bin {
    /// The work that it has time for.
    pub(super) work: f64,
    pub(super) bytes: u64,
}

impl Items {
    /// Returns the layers with this work and these bytes; `None` if they are too many.
    pub(super) fn of(mut sizes: Vec<(f64, u64)>) -> Option<Self> {
        sizes.sort_by(|one, other| other.0.total_cmp(&one.0));
        let work = sizes.iter().map(|size| size.0).sum();
        (sizes.len() <= u64::BITS as usize).then_some(Self { sizes, work })
    }

    /// Returns whether the layers may fit. It says yes if it has not found out.
    pub(super) fn may_fit(&self, mut bins: Vec<Bin>) -> bool {
        bins.sort_by(|one, other| one.work.total_cmp(&other.work));
        let all: f64 = bins.iter().map(|bin| bin.work).sum();
        let left = u64::MAX >> (u64::BITS as usize - self.sizes.len().max(1));
        let mut visits = VISITS;
        Packing { items: self, bins: &bins, visits: &mut visits }.fill(0, left, all - self.work)
    }
}

struct Packing<'a> {
    items: &'a Items,
    bins: &'a [Bin],
    visits: &'a mut usize,
}

/// A set of layers in the making.
#[derive(Clone, Copy)]
struct Chosen {
    /// The layers that no rank has.
    left: u64,
    /// The next layer that may be added.
    next: usize,
    work: f64,
    bytes: u64,
    /// The work of the layers from `next` on that are left.
    rest: f64,
}

impl Packing<'_> {
    /// Returns whether the ranks from `bin` on may have all layers that are left.
    fn fill(&mut self, bin: usize, left: u64, waste: f64) -> bool {
        if bin == self.bins.len() {
            return left == 0;
        }
        // Sums of times are not exact.
        if waste < -1e-9 * self.items.work {
            return false;
        }
        let is_left = |&(at, _): &(usize, &(f64, u64))| left >> at & 1 == 1;
        let rest = self.items.sizes.iter().enumerate().filter(is_left).map(|(_, size)| size.0).sum();
        self.choose(bin, Chosen { left, next: 0, work: 0.0, bytes: 0, rest }, waste)
    }

    /// Adds layers to the set of a rank in each possible way.
    fn choose(&mut self, bin: usize, chosen: Chosen, waste: f64) -> bool {
        *self.visits = self.visits.saturating_sub(1);
        if *self.visits == 0 {
            return true;
        }
        let Bin { work, bytes } = self.bins[bin];
        let least = work - waste * (1.0 + 1e-9) - 1e-9 * (work + self.items.work);
        if chosen.work + chosen.rest < least {
            return false;
        }
        let mut chosen = chosen;
        let mut before: Option<(f64, u64)> = None;
        while chosen.next < self.items.sizes.len() {
            let at = chosen.next;
            chosen.next += 1;
            if chosen.left >> at & 1 == 0 {
                continue;
            }
            let size = self.items.sizes[at];
            chosen.rest -= size.0;
            // A set without the layer before, which is equal, is tried already.
            let fits =
                chosen.work + size.0 <= work * (1.0 + 1e-9) && chosen.bytes.saturating_add(size.1) <= bytes;
            if fits && before != Some(size) {
                let added = Chosen {
                    left: chosen.left & !(1 << at),
                    work: chosen.work + size.0,
                    bytes: chosen.bytes + size.1,
                    ..chosen
                };
                if self.choose(bin, added, waste) {
                    return true;
                }
            }
            before = Some(size);
            if chosen.work + chosen.rest < least {
                return false;
            }
        }
        chosen.work >= least && self.fill(bin + 1, chosen.left, waste - (work - chosen.work).max(0.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(sizes: &[f64], bins: &[f64], expected: bool) {
        let items = Items::of(sizes.iter().map(|&size| (size, 1)).collect()).expect("few layers");
        let bins = bins.iter().map(|&work| Bin { work, bytes: 2 }).collect();
        assert_eq!(items.may_fit(bins), expected, "{sizes:?}");
    }

    #[test]
    fn whole_layers_fit_or_not() {
        check(&[3.0, 2.0, 1.0], &[3.0, 3.0], true);
        check(&[2.0, 2.0, 2.0], &[3.0, 3.0], false);
        check(&[2.0, 2.0, 1.0], &[3.0, 2.5], true);
        check(&[5.0, 4.0], &[4.5, 4.5], false);
        // One rank has memory for two layers.
        check(&[1.0, 1.0, 1.0], &[4.0], false);
        check(&[1.0, 1.0, 1.0], &[2.0, 2.0], true);
    }
}
