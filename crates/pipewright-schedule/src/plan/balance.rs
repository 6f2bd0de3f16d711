//! Cuts that keep the bound of [`Step::cut_time`] small: where the search for the best cut begins.
//!
//! A random walk over the boundaries between stages, from a fixed seed. It minimises the sum of a high power of the
//! bounds of all ranks, which behaves like their maximum but also rewards a rank that is lighter than another. A rank
//! whose parameters, gradients and optimizer state exceed the memory counts as much slower.

use crate::plan::class::Class;
use crate::plan::rank_times::Step;

/// The high power, which makes the sum behave like the maximum.
const POWER: i32 = 24;

/// A generator of pseudo-random numbers: SplitMix64 of Steele, Lea and Flood, 2014.
#[derive(Debug, Clone)]
pub(super) struct Numbers(pub(super) u64);

impl Numbers {
    /// Returns a number below `bound`.
    pub(super) fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % bound as u64) as usize
    }
}

/// The walk over cuts.
struct Walk<'a> {
    step: Step<'a>,
    class: Class,
    memory: Option<u64>,
    starts: Vec<usize>,
    /// The stages of each rank.
    own: Vec<Vec<usize>>,
    energy: Vec<f64>,
    scale: f64,
    /// Running sums of the bytes that a rank always holds.
    bytes: Vec<u64>,
}

/// Returns a cut of all layers for `class`: the first layer of each stage, and the number of layers. `walk` is the
/// number of steps of the walk.
pub(super) fn balanced(
    step: Step<'_>,
    class: Class,
    memory: Option<u64>,
    seed: u64,
    walk: usize,
) -> Vec<usize> {
    let (layers, stages) = (step.layers.count(), class.stages());
    let mut it = Walk::of(step, class, memory, even(layers, stages));
    if stages == 1 {
        return it.starts;
    }
    let mut numbers = Numbers(seed);
    let mut total: f64 = it.energy.iter().sum();
    let mut best = (total, it.starts.clone());
    for round in 0..walk {
        let left = (walk - round) as f64 / walk as f64;
        let tolerance = 0.5 * left * left * left;
        let boundary = 1 + numbers.below(stages - 1);
        let reach = 1 + numbers.below(2);
        let moved = if numbers.below(2) == 0 {
            it.starts[boundary].saturating_sub(reach)
        } else {
            it.starts[boundary] + reach
        };
        if moved <= it.starts[boundary - 1] || moved >= it.starts[boundary + 1] {
            continue;
        }
        let before = std::mem::replace(&mut it.starts[boundary], moved);
        let changed = [class.rank_of(boundary - 1), class.rank_of(boundary)];
        let energies = changed.map(|rank| it.rank_energy(rank));
        let (one, other) = (changed[0], changed[1]);
        let mut found = total - it.energy[one] + energies[0];
        if one != other {
            found += energies[1] - it.energy[other];
        }
        if found > total * (1.0 + tolerance) {
            it.starts[boundary] = before;
            continue;
        }
        it.energy[one] = energies[0];
        it.energy[other] = energies[1];
        // A sum of the terms, because differences of such powers lose all digits.
        total = it.energy.iter().sum();
        if total < best.0 {
            best = (total, it.starts.clone());
        }
    }
    best.1
}

/// Returns the cut into stages of equal numbers of layers.
pub(super) fn even(layers: usize, stages: usize) -> Vec<usize> {
    (0..=stages).map(|stage| stage * layers / stages).collect()
}

impl<'a> Walk<'a> {
    fn of(step: Step<'a>, class: Class, memory: Option<u64>, starts: Vec<usize>) -> Self {
        let mut own = vec![Vec::new(); class.ranks as usize];
        for stage in 0..class.stages() {
            own[class.rank_of(stage)].push(stage);
        }
        let mut bytes = vec![0u64];
        for layer in &step.layers.list {
            // Parameters, gradients, two moments; and the activations of one microbatch.
            let always = layer.parameters.saturating_mul(4).saturating_add(layer.output);
            bytes.push(bytes[bytes.len() - 1].saturating_add(always));
        }
        let all = step.layers.work(0..step.layers.count());
        let scale = (step.microbatches * all / f64::from(class.ranks)).max(f64::MIN_POSITIVE);
        let mut walk = Self { step, class, memory, starts, own, energy: Vec::new(), scale, bytes };
        walk.energy = (0..class.ranks as usize).map(|rank| walk.rank_energy(rank)).collect();
        walk
    }

    fn rank_energy(&self, rank: usize) -> f64 {
        let (mut work, mut critical, mut bytes) = (0.0, 0.0, 0u64);
        for &stage in &self.own[rank] {
            let range = self.starts[stage]..self.starts[stage + 1];
            work += self.step.layers.work(range.clone());
            critical += self.step.layers.forward(range.clone()) + self.step.layers.input(range.clone());
            bytes += self.bytes[range.end] - self.bytes[range.start];
        }
        debug_assert_eq!(self.class.rank_of(rank), rank, "the first stage of a rank has its number");
        let time = self.step.rank_time(rank, self.starts[rank], work, critical);
        let excess = self.memory.map_or(1.0, |memory| (bytes as f64 / memory.max(1) as f64).max(1.0));
        (time / self.scale * excess * excess).powi(POWER)
    }
}
