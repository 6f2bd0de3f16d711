//! Cuts and placements that keep the bounds of all ranks small: where the search begins.
//!
//! A random walk from a fixed seed. It moves the boundary between two stages, or several boundaries in a row at once,
//! which hands a layer from a stage to a stage far away; and in free placements, it swaps the ranks of two stages of a
//! round. It minimises the sum of a high power of the bounds of all ranks, which behaves like their maximum but also
//! rewards a rank that is lighter than another. A rank whose parameters, gradients and optimizer state exceed the
//! memory counts as much slower.
//!
//! A change touches the sums of few ranks, and only their bounds are computed again: those of fill, work and drain, and of
//! starvation without the spacing of microbatches ([`Step::own_time`]).

use std::ops::Range;

use crate::plan::rank_times::{OwnSums, Step};

/// The high power, which makes the sum behave like the maximum.
const POWER: i32 = 24;
/// The share by which a step of the walk may be worse, at first.
const TOLERANCE: f64 = 2.0;

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

/// A change of a layout.
#[derive(Debug, Clone)]
enum Change {
    /// Two stages exchange their ranks.
    Swap([usize; 2]),
    /// The first layers of some stages move up or down by one.
    Shift { stages: Range<usize>, is_up: bool },
}

impl Layout {
    /// Changes one thing at random: boundaries, or with `is_free` the ranks of two stages of a round other than the
    /// first. The result has no empty stage.
    pub(super) fn shake(&mut self, ranks: usize, is_free: bool, numbers: &mut Numbers) {
        if let Some(change) = self.draw(ranks, is_free, numbers) {
            self.apply(&change);
        }
    }

    /// Returns a change at random; `None` if it would make an empty stage.
    fn draw(&self, ranks: usize, is_free: bool, numbers: &mut Numbers) -> Option<Change> {
        let stages = self.rank_of.len();
        if stages < 2 {
            return None;
        }
        let rounds = stages / ranks;
        if is_free && rounds > 1 && numbers.below(3) == 0 {
            let round = ranks * (1 + numbers.below(rounds - 1));
            return Some(Change::Swap([round + numbers.below(ranks), round + numbers.below(ranks)]));
        }
        let first = 1 + numbers.below(stages - 1);
        let last = if numbers.below(3) == 0 { first + numbers.below(stages - first) } else { first };
        let is_up = numbers.below(2) == 0;
        let fits = if is_up {
            self.starts[last] + 1 < self.starts[last + 1]
        } else {
            self.starts[first] - 1 > self.starts[first - 1]
        };
        fits.then_some(Change::Shift { stages: first..last + 1, is_up })
    }

    fn apply(&mut self, change: &Change) {
        match change {
            Change::Swap([one, other]) => self.rank_of.swap(*one, *other),
            Change::Shift { stages, is_up } => {
                for start in &mut self.starts[stages.clone()] {
                    *start = if *is_up { *start + 1 } else { *start - 1 };
                }
            }
        }
    }
}

impl Change {
    /// Returns the change that takes this one back.
    fn reversed(&self) -> Self {
        match self {
            Self::Swap(stages) => Self::Swap(*stages),
            Self::Shift { stages, is_up } => Self::Shift { stages: stages.clone(), is_up: !is_up },
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
    layout: Layout,
    /// The stages of each rank, in order.
    stages_of: Vec<Vec<usize>>,
    /// The power of each rank's bound.
    powers: Vec<f64>,
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
    let mut walk = Walk::of(step, memory, layout);
    let mut energy = walk.energy();
    let mut best = (energy, walk.layout.clone());
    for round in 0..steps {
        let left = (steps - round) as f64 / steps as f64;
        let tolerance = TOLERANCE * left * left * left;
        let Some(change) = walk.layout.draw(step.ranks as usize, is_free, numbers) else { continue };
        walk.make(&change);
        let found = walk.energy();
        if found > energy * (1.0 + tolerance) {
            walk.make(&change.reversed());
            continue;
        }
        energy = found;
        if energy < best.0 {
            best = (energy, walk.layout.clone());
        }
    }
    best.1
}

/// Returns the cut into stages of equal numbers of layers.
pub(super) fn even(layers: usize, stages: usize) -> Vec<usize> {
    (0..=stages).map(|stage| stage * layers / stages).collect()
}

impl<'a> Walk<'a> {
    fn of(step: Step<'a>, memory: Option<u64>, layout: Layout) -> Self {
        let chunks = layout.rank_of.len().div_ceil((step.ranks as usize).max(1));
        let mut bytes = vec![0u64];
        for layer in &step.layers.list {
            // A little for activations.
            let always = step.layers.layer_bytes(layer, chunks).saturating_add(layer.output);
            bytes.push(bytes[bytes.len() - 1].saturating_add(always));
        }
        let all = step.layers.work(0..step.layers.count());
        let scale = (step.microbatches * all / f64::from(step.ranks)).max(f64::MIN_POSITIVE);
        let ranks = step.ranks as usize;
        let mut stages_of = vec![Vec::new(); ranks];
        for (stage, &rank) in layout.rank_of.iter().enumerate() {
            stages_of[rank as usize].push(stage);
        }
        let mut walk = Self { step, memory, scale, bytes, layout, stages_of, powers: vec![0.0; ranks] };
        (0..ranks).for_each(|rank| walk.update(rank));
        walk
    }

    /// Returns the sum of the powers of all ranks.
    fn energy(&self) -> f64 {
        self.powers.iter().sum()
    }

    /// Makes a change, and computes the powers of the ranks that it touches.
    fn make(&mut self, change: &Change) {
        self.layout.apply(change);
        match change {
            Change::Swap(stages) => {
                let ranks = stages.map(|stage| self.layout.rank_of[stage] as usize);
                if ranks[0] == ranks[1] {
                    return;
                }
                for (to, stage, from) in [(ranks[0], stages[0], ranks[1]), (ranks[1], stages[1], ranks[0])] {
                    self.stages_of[from].retain(|&own| own != stage);
                    self.stages_of[to].push(stage);
                }
                for rank in ranks {
                    self.stages_of[rank].sort_unstable();
                    self.update(rank);
                }
            }
            // The stage before the first one has another end.
            Change::Shift { stages, .. } if stages.len() < self.powers.len() => {
                for stage in stages.start - 1..stages.end {
                    self.update(self.layout.rank_of[stage] as usize);
                }
            }
            Change::Shift { .. } => (0..self.powers.len()).for_each(|rank| self.update(rank)),
        }
    }

    /// Computes the power of a rank's bound.
    fn update(&mut self, rank: usize) {
        let (mut sums, mut bytes) = (OwnSums::default(), 0u64);
        for &stage in &self.stages_of[rank] {
            let range = self.layout.starts[stage]..self.layout.starts[stage + 1];
            bytes = bytes.saturating_add(self.bytes[range.end] - self.bytes[range.start]);
            sums.add(&self.step, range);
        }
        let time = self.step.own_time(rank, self.layout.starts[rank], &sums);
        let excess = self.memory.map_or(1.0, |memory| (bytes as f64 / memory.max(1) as f64).max(1.0));
        self.powers[rank] = (time / self.scale * excess * excess).powi(POWER);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tests::model;

    #[test]
    fn bounds_follow_every_change_and_its_reverse() {
        for seed in 0..20 {
            let layers = model(seed, 24, 4, 1);
            let step = Step::of(&layers, 4, 6);
            let layout = Layout { starts: even(24, 12), rank_of: [0, 1, 2, 3].repeat(3) };
            let mut walk = Walk::of(step, Some(2_000), layout);
            let mut numbers = Numbers(seed);
            for _ in 0..200 {
                let Some(change) = walk.layout.draw(4, true, &mut numbers) else { continue };
                let before = (walk.layout.clone(), walk.powers.clone());
                walk.make(&change);
                assert_eq!(
                    walk.powers,
                    Walk::of(step, Some(2_000), walk.layout.clone()).powers,
                    "{change:?}"
                );
                walk.make(&change.reversed());
                assert_eq!((&walk.layout, &walk.powers), (&before.0, &before.1), "{change:?}");
                walk.make(&change);
            }
        }
    }
}
