//! The bound for unlike ranks, over all orders, cuts and subsets of the ranks, also for layers that are not
//! neighbours.
//!
//! A rank computes no layer faster than at the speed of the kind of layer that it is best at. Sort the ranks that
//! have layers by the position of their first one. Some number `k >= r` of layers comes before the first layer of rank
//! `r` in this order, and at least one of them is on each of the `r` ranks before it. So the rank starts no earlier
//! than its fill: `r` messages, and
//!
//! - for some `k`, `F` of the first `k` layers at the largest speed of all ranks, and for a different one of these
//!   layers on each of the `r` ranks the time by which it is longer at the speed of that rank. This is the shortest if
//!   the ranks are the `r` fastest ones, and the slowest of them have the shortest layers (rearrangement inequality);
//! - the shortest `F` of a layer on each of the ranks before it, at their speeds.
//!
//! A time is too short if
//!
//! 1. the ranks together have less time than there is work, after the first kind of fill. A rank also has no more
//!    work than the layers whose parameters, gradients and optimizer state fit into its memory, or parts of layers;
//! 2. for some measure, the measures of the times of all ranks are less than the measures of all layers: a layer is
//!    on one rank. A measure of a sum must be at least the sum of the measures. It counts whole units of some size, and
//!    of what is left over nothing up to a share of a unit, and beyond that as much as makes a whole unit 1;
//!    Or a limited search finds no way to divide the layers among the times of the ranks after the first kind of fill
//!    (`packing.rs`);
//! 3. the ranks have less time than there is work, after the second kind of fill. With the ranks from the fastest
//!    one to the slowest one, the fills of all ranks, each times the speed of the rank, have the smallest sum: to
//!    exchange two neighbours that are not in this order makes it smaller;
//! 4. one microbatch takes longer to pass all layers and to come back, if the ranks with the largest speeds have as
//!    many layers as the time allows, and the slowest layer takes all others after it.
//!
//! The ranks of 1 and 2 may be in any order. If the time that a rank has is a sum of a last part and of what each
//! earlier place adds, no order has more than the sum of the last parts of all ranks and, for each place `r`, the
//! `r + 1` largest additions.

use crate::plan::bound::bisect::bisect;
use crate::plan::bound::packing::{Bin, Deadline, Items};
use crate::plan::layers::Layer;
use crate::plan::rank_memory::RankMemory;
use crate::plan::rank_times::Step;
use crate::plan::tuning::unlike;

/// The data of all ranks.
struct Ranks<'a> {
    step: Step<'a>,
    /// From the fastest rank to the slowest one.
    speeds: Vec<f64>,
    /// The bytes of each rank, in the same order; the largest number for any amount.
    bytes: Vec<u64>,
    /// The fill of each place.
    fills: Vec<f64>,
    hop: f64,
}

/// Returns a time that no step on some or all of the ranks is below.
/// With `is_exact`, it also counts that layers are whole, which takes longer.
pub(super) fn bound(step: Step<'_>, memory: Option<&RankMemory>, is_exact: bool) -> f64 {
    let ranks = Ranks::of(step, memory);
    let layers = step.layers;
    let works: Vec<f64> =
        layers.list.iter().map(|layer| layer.forward + layer.input + layer.weight).collect();
    let items: Vec<f64> = works.iter().map(|work| step.microbatches * work).collect();
    let all = step.microbatches * layers.work(0..layers.count());
    let work_limits = ranks.limits(&items);
    let has_work = |time: f64| {
        let worked = |rank: usize, place: usize| ranks.worked(rank, place, time).min(work_limits[rank]);
        // Sums of times are not exact.
        ranks.most(worked) >= all * (1.0 - 1e-9)
            && ranks.has_time_in_order(time, all)
            && ranks.path(time) <= time
    };
    let low = bisect(ranks.path(f64::INFINITY), unlike::ACCURACY, has_work);
    if !is_exact || ranks.speeds.len() > unlike::MOST_ORDERED {
        return low;
    }
    let measures = measures(&items);
    let needed: Vec<(f64, Vec<f64>)> = measures
        .iter()
        .map(|measure| {
            let amounts: Vec<f64> = items.iter().map(|item| measure.of(item * (1.0 - 1e-12))).collect();
            (amounts.iter().sum::<f64>() * (1.0 - 1e-12), ranks.limits(&amounts))
        })
        .collect();
    let fixed = layers.list.iter().map(fixed_bytes);
    let packed = Items::of(items.iter().copied().zip(fixed).collect());
    bisect(low, unlike::ACCURACY, |time| {
        let has_room = |(measure, (needed, limits)): (&Measure, &(f64, Vec<f64>))| {
            let amount = |rank: usize, place: usize| {
                let worked = ranks.worked(rank, place, time);
                measure.of(worked + 1e-9 * measure.size).min(limits[rank])
            };
            ranks.most(amount) >= *needed
        };
        let bin = |(&speed, &bytes): (&f64, &u64)| Bin { speed, bytes };
        let bins = || ranks.speeds.iter().zip(&ranks.bytes).map(bin).collect();
        let deadline = Deadline { time, fills: &ranks.fills };
        has_work(time)
            && measures.iter().zip(&needed).all(has_room)
            && packed.as_ref().is_none_or(|items| items.may_fit(bins(), deadline))
    })
}

/// A measure of times: whole units, and a part of what is left over.
struct Measure {
    size: f64,
    /// The share of a unit up to which the rest counts nothing.
    share: f64,
}

impl Measure {
    fn of(&self, time: f64) -> f64 {
        let units = time / self.size;
        let whole = units.floor();
        whole + ((units - whole - self.share) / (1.0 - self.share)).max(0.0)
    }
}

/// Returns measures by the sizes of items.
fn measures(items: &[f64]) -> Vec<Measure> {
    let mut sizes: Vec<f64> = items.iter().copied().filter(|&size| size > 0.0).collect();
    sizes.sort_by(f64::total_cmp);
    sizes.dedup_by(|one, other| (*one - *other).abs() <= 1e-9 * *other);
    let every = sizes.len().div_ceil(unlike::SIZES).max(1);
    let units = sizes.iter().rev().step_by(every).flat_map(|&size| {
        // Slightly less, so that an item has as many units of its own size as it has parts.
        (1..=unlike::PARTS).map(move |part| size * (1.0 - 1e-9) / f64::from(part))
    });
    units.flat_map(|size| unlike::SHARES.map(|share| Measure { size, share })).collect()
}

/// Returns the bytes of a layer's parameters, gradients and optimizer state.
fn fixed_bytes(layer: &Layer) -> u64 {
    layer.gradient.saturating_add(layer.state.total())
}

/// Returns the first kind of fill of each place. `speeds` come from the fastest rank to the slowest one. With more ranks
/// than the bound orders, only the first place counts, and its fill is 0.
fn fills(step: Step<'_>, speeds: &[f64], hop: f64) -> Vec<f64> {
    if speeds.len() > unlike::MOST_ORDERED {
        return vec![0.0; speeds.len()];
    }
    let (layers, fastest) = (step.layers, speeds[0]);
    let count = layers.count();
    let all: Vec<f64> = layers.list.iter().map(|layer| layer.forward).collect();
    // The sum for the slowest of the fastest ranks and the shortest of `sorted` layers.
    let longer = |sorted: &[f64], place: usize| -> f64 {
        let slowest_first = speeds[..place].iter().rev();
        slowest_first.zip(sorted).map(|(speed, forward)| forward * (1.0 / speed - 1.0 / fastest)).sum()
    };
    let mut sorted_all = all.clone();
    sorted_all.sort_by(f64::total_cmp);
    let mut fills = Vec::with_capacity(speeds.len());
    let mut last = 0.0f64;
    for place in 0..speeds.len() {
        let least_longer = longer(&sorted_all, place);
        let mut sorted = all[..place.min(count)].to_vec();
        sorted.sort_by(f64::total_cmp);
        let mut shortest = f64::INFINITY;
        for end in place.min(count)..=count {
            let before = layers.forward(0..end) / fastest;
            if before + least_longer >= shortest {
                break;
            }
            shortest = shortest.min(before + longer(&sorted, place));
            if let Some(&next) = all.get(end) {
                sorted.insert(sorted.partition_point(|&other| other < next), next);
            }
        }
        // Sums of times are not exact, and fills do not shrink.
        last = last.max(shortest + place as f64 * hop);
        fills.push(last);
    }
    fills
}

impl<'a> Ranks<'a> {
    fn of(step: Step<'a>, memory: Option<&RankMemory>) -> Self {
        let bytes = |rank: usize| memory.map_or(u64::MAX, |memory| memory.of_rank(rank));
        let mut ranks: Vec<(f64, u64)> =
            step.speeds().into_iter().enumerate().map(|(rank, speed)| (speed, bytes(rank))).collect();
        ranks.sort_by(|one, other| other.0.total_cmp(&one.0));
        let (speeds, bytes): (Vec<f64>, Vec<u64>) = ranks.into_iter().unzip();
        let hop = step.shortest_message();
        let fills = fills(step, &speeds, hop);
        Self { step, speeds, bytes, fills, hop }
    }

    /// Returns the work at speed 1 that a rank has time for if its first layer is at a place in the order.
    fn worked(&self, rank: usize, place: usize, time: f64) -> f64 {
        self.speeds[rank] * (time - self.fills[place]).max(0.0)
    }

    /// Returns a sum that no order of the ranks exceeds, for the amount of a rank at a place. It does not grow
    /// from one place to the next.
    fn most(&self, amount: impl Fn(usize, usize) -> f64) -> f64 {
        let ranks = self.speeds.len();
        if ranks > unlike::MOST_ORDERED {
            return (0..ranks).map(|rank| amount(rank, 0)).sum();
        }
        let mut sum: f64 = (0..ranks).map(|rank| amount(rank, ranks - 1)).sum();
        for place in 0..ranks - 1 {
            let mut added: Vec<f64> =
                (0..ranks).map(|rank| amount(rank, place) - amount(rank, place + 1)).collect();
            added.sort_by(|one, other| other.total_cmp(one));
            sum += added[..=place].iter().sum::<f64>();
        }
        sum
    }

    /// Returns the most of `amounts`, which belong to layers, that fits into the memory of each rank.
    fn limits(&self, amounts: &[f64]) -> Vec<f64> {
        let layers = &self.step.layers.list;
        let fixed = |at: usize| fixed_bytes(&layers[at]) as f64;
        let mut order: Vec<usize> = (0..layers.len()).collect();
        // The layers with the most for their bytes come first.
        let density = |at: usize| if amounts[at] > 0.0 { amounts[at] / fixed(at) } else { 0.0 };
        order.sort_by(|&one, &other| density(other).total_cmp(&density(one)));
        let limit = |&bytes: &u64| {
            let mut left = bytes as f64;
            let mut sum = 0.0;
            for &layer in &order {
                let share = if fixed(layer) > left { left / fixed(layer) } else { 1.0 };
                sum += share * amounts[layer];
                left -= share * fixed(layer);
                if share < 1.0 {
                    break;
                }
            }
            sum * (1.0 + 1e-9)
        };
        self.bytes.iter().map(limit).collect()
    }

    /// Returns whether the ranks have time for all work after the second kind of fill. Some ranks may be left out,
    /// so this says yes if a rank may delay the others more than it works.
    fn has_time_in_order(&self, time: f64, all: f64) -> bool {
        if self.speeds.len() > unlike::MOST_ORDERED {
            return true;
        }
        let shortest = self.step.layers.list.iter().map(|layer| layer.forward).fold(f64::INFINITY, f64::min);
        let before = |speed: f64| shortest / speed + self.hop;
        let mut sum = 0.0;
        let mut fill = 0.0;
        for (place, &speed) in self.speeds.iter().enumerate() {
            let own = speed * (time - fill);
            let delayed: f64 = self.speeds[place + 1..].iter().map(|later| later * before(speed)).sum();
            if own < delayed {
                return true;
            }
            sum += own;
            fill += before(speed);
        }
        sum >= all * (1.0 - 1e-9)
    }

    /// Returns a time that one microbatch takes to pass all layers and to come back, and the slowest layer takes
    /// for all others, if the ranks have `time` for all microbatches.
    fn path(&self, time: f64) -> f64 {
        let (step, layers) = (&self.step, self.step.layers);
        let critical = |forward: f64, input: f64, weight: f64| {
            let work = forward + input + weight;
            if work > 0.0 { (forward + input) / work } else { 1.0 }
        };
        let shares = layers.list.iter().map(|layer| critical(layer.forward, layer.input, layer.weight));
        let share = shares.fold(1.0, f64::min);
        let all = layers.work(0..layers.count());
        let mut left = all;
        let mut spent = 0.0;
        for &speed in &self.speeds {
            let work = left.min(speed * time / step.microbatches);
            spent += share * work / speed;
            left -= work;
        }
        let least = (layers.forward(0..layers.count()) + layers.input(0..layers.count())) / self.speeds[0];
        let slowest = layers.list.iter().map(|layer| layer.forward.max(layer.input)).fold(0.0, f64::max);
        spent.max(least) + (step.microbatches - 1.0) * slowest / self.speeds[0]
    }
}
