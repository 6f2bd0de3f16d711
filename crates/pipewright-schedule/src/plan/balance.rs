//! Cuts and placements that keep the bound of [`Step::cut_time`] small: where the search begins.
//!
//! A random walk from a fixed seed. It moves the boundary between two stages, or several boundaries in a row at once,
//! which hands a layer from a stage to a stage far away; and in free placements, it swaps the ranks of two stages of a
//! round. It minimises the sum of a high power of the bounds of all ranks, which behaves like their maximum but also
//! rewards a rank that is lighter than another. A rank whose parameters, gradients and optimizer state exceed the
//! memory counts as much slower.

use crate::plan::rank_times::Step;

/// The high power, which makes the sum behave like the maximum.
const POWER: i32 = 24;
/// The share by which a step of the walk may be worse, at first.
const TOLERANCE: f64 = 0.5;

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

/// The first layer of each stage with the number of layers at the end, and the rank of each stage.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Layout {
    pub(super) starts: Vec<usize>,
    pub(super) rank_of: Vec<u32>,
}

impl Layout {
    /// Changes one thing at random: boundaries, or with `is_free` the ranks of two stages of a round other than the
    /// first. The result has no empty stage.
    pub(super) fn shake(&mut self, ranks: usize, is_free: bool, numbers: &mut Numbers) {
        let stages = self.rank_of.len();
        if stages < 2 {
            return;
        }
        let rounds = stages / ranks;
        if is_free && rounds > 1 && numbers.below(3) == 0 {
            let round = ranks * (1 + numbers.below(rounds - 1));
            self.rank_of.swap(round + numbers.below(ranks), round + numbers.below(ranks));
            return;
        }
        let first = 1 + numbers.below(stages - 1);
        let last = if numbers.below(3) == 0 { first + numbers.below(stages - first) } else { first };
        let is_up = numbers.below(2) == 0;
        let fits = if is_up {
            self.starts[last] + 1 < self.starts[last + 1]
        } else {
            self.starts[first] - 1 > self.starts[first - 1]
        };
        if fits {
            for start in &mut self.starts[first..=last] {
                *start = if is_up { *start + 1 } else { *start - 1 };
            }
        }
    }
}

/// The walk over layouts.
struct Walk<'a> {
    step: Step<'a>,
    memory: Option<u64>,
    scale: f64,
    /// Running sums of the bytes that a rank always holds.
    bytes: Vec<u64>,
}

/// Returns a layout near `layout` with balanced ranks. `steps` is the length of the walk.
pub(super) fn balanced(
    step: Step<'_>,
    memory: Option<u64>,
    layout: Layout,
    is_free: bool,
    numbers: &mut Numbers,
    steps: usize,
) -> Layout {
    let walk = Walk::of(step, memory);
    let mut now = layout;
    let mut energy = walk.energy(&now);
    let mut best = (energy, now.clone());
    for round in 0..steps {
        let left = (steps - round) as f64 / steps as f64;
        let tolerance = TOLERANCE * left * left * left;
        let mut next = now.clone();
        next.shake(step.ranks as usize, is_free, numbers);
        let found = walk.energy(&next);
        if found > energy * (1.0 + tolerance) {
            continue;
        }
        energy = found;
        now = next;
        if energy < best.0 {
            best = (energy, now.clone());
        }
    }
    best.1
}

/// Returns the cut into stages of equal numbers of layers.
pub(super) fn even(layers: usize, stages: usize) -> Vec<usize> {
    (0..=stages).map(|stage| stage * layers / stages).collect()
}

impl<'a> Walk<'a> {
    fn of(step: Step<'a>, memory: Option<u64>) -> Self {
        let mut bytes = vec![0u64];
        for layer in &step.layers.list {
            // Parameters, gradients, two moments; and a little for activations.
            let always = layer.parameters.saturating_mul(4).saturating_add(layer.output);
            bytes.push(bytes[bytes.len() - 1].saturating_add(always));
        }
        let all = step.layers.work(0..step.layers.count());
        let scale = (step.microbatches * all / f64::from(step.ranks)).max(f64::MIN_POSITIVE);
        Self { step, memory, scale, bytes }
    }

    /// Returns the sum of the powers of all ranks.
    fn energy(&self, layout: &Layout) -> f64 {
        let times = self.step.rank_times(&layout.rank_of, &layout.starts);
        let mut bytes = vec![0u64; times.len()];
        for (range, &rank) in layout.starts.windows(2).zip(&layout.rank_of) {
            let held = &mut bytes[rank as usize];
            *held = held.saturating_add(self.bytes[range[1]] - self.bytes[range[0]]);
        }
        let powers = times.into_iter().zip(bytes).map(|(time, bytes)| {
            let excess = self.memory.map_or(1.0, |memory| (bytes as f64 / memory.max(1) as f64).max(1.0));
            (time / self.scale * excess * excess).powi(POWER)
        });
        powers.sum()
    }
}
