//! Whether whole layers fit into the times of unlike ranks, by a search with a limited number of visits.
//!
//! The ranks together have some more time than there is work: the waste. One rank after another, the slowest one
//! first, gets each set of the layers that are left whose work fills its time but for the waste that is left, and
//! whose bytes fit into its memory. If no sets for all ranks leave no layer, the time is too short. There are few
//! such sets if the waste is small. This matters for models with a few layers for each rank.
//!
//! A rank is idle for the fill of its place in the order of the first layers, at least. No two ranks have one place.
//! So of any ranks, the one that is idle the least is idle for the first fill, the next one for the second fill, and
//! so on. The ranks that are left waste the least if the fastest of them have the shortest fills, by exchange of two
//! places. A rank without layers is idle all the time, and may take the last place.

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
    pub(super) speed: f64,
    pub(super) bytes: u64,
}

/// The time in which the layers must fit.
#[derive(Debug, Clone, Copy)]
pub(super) struct Deadline<'a> {
    pub(super) time: f64,
    /// The fill of each place, which does not shrink from one place to the next.
    pub(super) fills: &'a [f64],
}

impl Items {
    /// Returns the layers with this work and these bytes; `None` if they are too many.
    pub(super) fn of(mut sizes: Vec<(f64, u64)>) -> Option<Self> {
        sizes.sort_by(|one, other| other.0.total_cmp(&one.0));
        let work = sizes.iter().map(|size| size.0).sum();
        (sizes.len() <= u128::BITS as usize).then_some(Self { sizes, work })
    }

    /// Returns whether the layers may fit. It says yes if it has not found out.
    pub(super) fn may_fit(&self, mut bins: Vec<Bin>, deadline: Deadline<'_>) -> bool {
        bins.sort_by(|one, other| one.speed.total_cmp(&other.speed));
        let Deadline { time, fills } = deadline;
        let all: f64 = bins.iter().map(|bin| bin.speed * time).sum();
        let idle_of = |bins: &[Bin]| -> f64 {
            let fastest_first = bins.iter().rev().zip(fills);
            fastest_first.map(|(bin, fill)| bin.speed * fill.min(time)).sum()
        };
        let waste_after: Vec<f64> = (0..=bins.len()).map(|bin| idle_of(&bins[bin..])).collect();
        let left = u128::MAX >> (u128::BITS as usize - self.sizes.len().max(1));
        let mut visits = VISITS;
        let idle = Vec::with_capacity(bins.len());
        Packing { items: self, bins: &bins, deadline, waste_after, idle, visits: &mut visits }.fill(
            0,
            left,
            all - self.work,
        )
    }
}

struct Packing<'a> {
    items: &'a Items,
    bins: &'a [Bin],
    deadline: Deadline<'a>,
    /// The least waste of the ranks from each one on.
    waste_after: Vec<f64>,
    /// The times in which the ranks so far are idle, the shortest first.
    idle: Vec<f64>,
    visits: &'a mut usize,
}

/// A set of layers in the making.
#[derive(Clone, Copy)]
struct Chosen {
    /// The layers that no rank has.
    left: u128,
    /// The next layer that may be added.
    next: usize,
    work: f64,
    bytes: u64,
    /// The work of the layers from `next` on that are left.
    rest: f64,
}

impl Packing<'_> {
    /// Returns whether the ranks from `bin` on may have all layers that are left.
    fn fill(&mut self, bin: usize, left: u128, waste: f64) -> bool {
        if bin == self.bins.len() {
            return left == 0;
        }
        // Sums of times are not exact.
        if waste - self.waste_after[bin] < -1e-9 * self.items.work {
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
        let Bin { speed, bytes } = self.bins[bin];
        let work = speed * self.deadline.time;
        let own_waste = waste - self.waste_after[bin + 1];
        let least = work - own_waste * (1.0 + 1e-9) - 1e-9 * (work + self.items.work);
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
        if chosen.work < least {
            return false;
        }
        let wasted = (work - chosen.work).max(0.0);
        let idle = wasted / speed;
        let place = self.idle.partition_point(|&other| other < idle);
        self.idle.insert(place, idle);
        let has_places = self.has_places();
        let fits = has_places && self.fill(bin + 1, chosen.left, waste - wasted);
        self.idle.remove(place);
        fits
    }

    /// Returns whether the ranks so far have places whose fills are not longer than they are idle.
    fn has_places(&self) -> bool {
        let Deadline { time, fills } = self.deadline;
        // Sums of times are not exact.
        self.idle.iter().zip(fills).all(|(&idle, &fill)| idle >= fill.min(time) - 1e-9 * time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(sizes: &[f64], bins: &[f64], expected: bool) {
        check_filled(sizes, bins, &vec![0.0; bins.len()], expected);
    }

    /// Checks the same with fills, in a time of 1.
    fn check_filled(sizes: &[f64], bins: &[f64], fills: &[f64], expected: bool) {
        let items = Items::of(sizes.iter().map(|&size| (size, 1)).collect()).expect("few layers");
        let bins = bins.iter().map(|&speed| Bin { speed, bytes: 2 }).collect();
        assert_eq!(items.may_fit(bins, Deadline { time: 1.0, fills }), expected, "{sizes:?} {fills:?}");
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

    #[test]
    fn ranks_are_idle_for_the_fill_of_a_place() {
        check_filled(&[2.0, 1.0], &[2.0, 2.0], &[0.0, 0.5], true);
        check_filled(&[2.0, 1.0], &[2.0, 2.0], &[0.0, 0.6], false);
        // One of the two ranks that are busy all the time must wait.
        check_filled(&[2.0, 2.0, 0.1], &[2.0, 2.0, 1.0], &[0.0, 0.1, 0.2], false);
        check_filled(&[2.0, 1.8, 0.1], &[2.0, 2.0, 1.0], &[0.0, 0.1, 0.2], true);
        // A rank without layers takes the last place.
        check_filled(&[2.0], &[2.0, 1.0], &[0.0, 5.0], true);
    }
}
