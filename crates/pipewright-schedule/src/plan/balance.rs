//! Cuts and placements that keep the bounds of all ranks small: where the search begins.
//!
//! A random walk from a fixed seed. It moves the boundary between two stages, or several boundaries in a row
//! at once, which hands a layer from a stage to a stage far away; and in free placements, it swaps the ranks
//! of two stages of a round. It minimises the sum of a high power of the bounds of all ranks, which behaves
//! like their maximum but also rewards a rank that is lighter than another. The bounds do not know all that a
//! long stage delays, so a rank with one counts as a little slower. A rank whose parameters, gradients and
//! optimizer state exceed the memory counts as much slower.
//!
//! A change touches few stages, and only the bounds of their ranks are computed again. Messages take the time
//! that they take where the walk begins. `unlike_walk.rs` has the walk for unlike ranks, where each change also
//! moves the starts of other stages.

use crate::plan::numbers::Numbers;
use crate::plan::placed_cut::{PlacedCut, WalkChange, WalkTask};
use crate::plan::rank_memory::RankMemory;
use crate::plan::rank_times::{StageTimes, Step, set_slowest};
use crate::plan::tuning::walk;
use crate::plan::unlike_walk::balanced_unlike;

/// The walk over layouts.
struct Walk<'a> {
    step: Step<'a>,
    memory: Option<&'a RankMemory>,
    scale: f64,
    /// The mean `F + I` of all stages.
    mean: f64,
    /// Running sums of the bytes that a rank always holds, if memory is limited.
    bytes: Vec<u64>,
    layout: PlacedCut,
    /// The times of the messages from the first stage to each one.
    hops: Vec<f64>,
    times: Vec<StageTimes>,
    /// The stages of each rank, in order.
    stages_of: Vec<Vec<usize>>,
    /// The power of each rank's bound.
    powers: Vec<f64>,
    /// The ranks whose bounds must be computed again.
    is_old: Vec<bool>,
    /// The values that the last change replaced, in order.
    old_times: Vec<(usize, StageTimes)>,
    old_powers: Vec<(usize, f64)>,
}

/// Returns a layout near `layout` with balanced ranks. Adds the number of changes that it makes, including
/// the changes that it takes back, to `changes`, and one for its start.
pub(super) fn balanced(
    task: WalkTask<'_>,
    layout: PlacedCut,
    numbers: &mut Numbers,
    changes: &mut u64,
) -> PlacedCut {
    let WalkTask { step, swaps, steps, .. } = task;
    if step.layers.is_unlike() {
        return balanced_unlike(task, layout, numbers, changes);
    }
    let mut walk = Walk::of(task, layout);
    *changes += 1;
    let mut energy = walk.energy();
    let mut best = (energy, walk.layout.clone());
    for round in 0..steps {
        let left = (steps - round) as f64 / steps as f64;
        let tolerance = walk::TOLERANCE * left * left * left;
        let Some(change) = walk.layout.draw(step.ranks as usize, swaps, numbers) else { continue };
        walk.make(&change);
        *changes += 1;
        let found = walk.energy();
        if found > energy * (1.0 + tolerance) {
            walk.take_back(&change);
            continue;
        }
        energy = found;
        if energy < best.0 {
            best.0 = energy;
            best.1.clone_from(&walk.layout);
        }
    }
    best.1
}

/// Returns the cut into stages of equal numbers of layers.
pub(super) fn even(layers: usize, stages: usize) -> Vec<usize> {
    (0..=stages).map(|stage| stage * layers / stages).collect()
}

impl<'a> Walk<'a> {
    fn of(task: WalkTask<'a>, layout: PlacedCut) -> Self {
        let hops = task.step.hops_before(&layout.rank_of);
        Self::with_hops(task, layout, hops)
    }

    fn with_hops(task: WalkTask<'a>, layout: PlacedCut, hops: Vec<f64>) -> Self {
        let WalkTask { step, memory, .. } = task;
        let chunks = layout.rank_of.len().div_ceil((step.ranks as usize).max(1));
        let mut bytes = vec![0u64];
        for layer in step.layers.list.iter().filter(|_| memory.is_some()) {
            // A little for activations.
            let always = step.layers.layer_bytes(layer, chunks).saturating_add(layer.output);
            bytes.push(bytes[bytes.len() - 1].saturating_add(always));
        }
        let all = 0..step.layers.count();
        let critical = step.layers.forward(all.clone()) + step.layers.input(all.clone());
        let work = step.microbatches * step.layers.work(all);
        let ranks = step.ranks as usize;
        let speed = f64::from(step.ranks);
        let mut walk = Self {
            step,
            memory,
            scale: (work / speed).max(f64::MIN_POSITIVE),
            mean: critical / layout.rank_of.len() as f64,
            bytes,
            times: step.stage_times(&hops, &layout.starts),
            hops,
            layout,
            stages_of: vec![Vec::new(); ranks],
            powers: vec![0.0; ranks],
            is_old: vec![true; ranks],
            old_times: Vec::new(),
            old_powers: Vec::new(),
        };
        walk.group();
        walk.update();
        walk
    }

    /// Lists the stages of each rank.
    fn group(&mut self) {
        self.stages_of.iter_mut().for_each(Vec::clear);
        for (stage, &rank) in self.layout.rank_of.iter().enumerate() {
            self.stages_of[rank as usize].push(stage);
        }
    }

    /// Returns the sum of the powers of all ranks.
    fn energy(&self) -> f64 {
        self.powers.iter().sum()
    }

    /// Makes a change, and computes the powers of the ranks that it touches.
    fn make(&mut self, change: &WalkChange) {
        self.old_times.clear();
        self.old_powers.clear();
        self.layout.apply(change);
        match change {
            WalkChange::Swap(stages) => {
                self.swap(*stages);
                for stage in stages {
                    self.is_old[self.layout.rank_of[*stage] as usize] = true;
                }
            }
            // The stage before the first one has another end.
            WalkChange::Shift { stages, .. } => {
                let Self { step, layout, hops, times, is_old, old_times, .. } = self;
                for stage in stages.start - 1..stages.end {
                    let range = layout.starts[stage]..layout.starts[stage + 1];
                    let old = times[stage];
                    old_times.push((stage, old));
                    times[stage] = StageTimes::of(step, range, hops, stage).with_slowest_of(old);
                    is_old[layout.rank_of[stage] as usize] = true;
                }
                let Self { layout, times, is_old, old_times, .. } = self;
                set_slowest(times, |stage, old| {
                    old_times.push((stage, old));
                    is_old[layout.rank_of[stage] as usize] = true;
                });
            }
            // Only unlike ranks change like this.
            WalkChange::Give { .. }
            | WalkChange::Split { .. }
            | WalkChange::Merge { .. }
            | WalkChange::Move { .. } => {}
        }
        self.update();
    }

    /// Takes the last change back.
    fn take_back(&mut self, change: &WalkChange) {
        self.layout.apply(&change.reversed());
        if let WalkChange::Swap(stages) = change {
            self.swap(*stages);
        }
        for (stage, times) in self.old_times.drain(..).rev() {
            self.times[stage] = times;
        }
        for (rank, power) in self.old_powers.drain(..) {
            self.powers[rank] = power;
        }
    }

    /// Gives two stages, whose ranks the layout has exchanged, to their new ranks.
    fn swap(&mut self, stages: [usize; 2]) {
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
        }
    }

    /// Computes the powers of the bounds that have changed.
    fn update(&mut self) {
        let delayed = walk::LONG_STAGE * f64::from(self.step.ranks);
        for rank in 0..self.powers.len() {
            if !std::mem::replace(&mut self.is_old[rank], false) {
                continue;
            }
            let own = self.stages_of[rank].iter().map(|&stage| &self.times[stage]);
            let longest = own.clone().map(|stage| stage.forward + stage.input).fold(self.mean, f64::max);
            let first = self.layout.starts[self.stages_of[rank][0]];
            let bound = self.step.time_of_rank(rank, first, own);
            let time = bound + delayed * (longest - self.mean);
            self.old_powers.push((rank, self.powers[rank]));
            self.powers[rank] = (time / self.scale * self.excess(rank).powi(2)).powi(walk::POWER);
        }
    }

    /// Returns how many times the memory a rank holds, at least 1.
    fn excess(&self, rank: usize) -> f64 {
        let Some(memory) = self.memory else { return 1.0 };
        let starts = &self.layout.starts;
        let bytes_of = |&stage: &usize| self.bytes[starts[stage + 1]] - self.bytes[starts[stage]];
        let bytes = self.stages_of[rank].iter().map(bytes_of).fold(0, u64::saturating_add);
        (bytes as f64 / memory.of_rank(rank).max(1) as f64).max(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::placed_cut::Swaps;
    use crate::plan::tests::model;

    #[test]
    fn bounds_follow_every_change_and_its_reverse() {
        for seed in 0..20 {
            let layers = model(seed, 24, 4, 1);
            let step = Step::of(&layers, 4, 6);
            let task = WalkTask {
                step,
                memory: Some(&RankMemory::Equal(2_000)),
                stay: 1.0,
                swaps: Swaps::Rounds,
                steps: 0,
            };
            let layout = PlacedCut { starts: even(24, 12), rank_of: [0, 1, 2, 3].repeat(3) };
            let mut walk = Walk::of(task, layout);
            let mut numbers = Numbers(seed);
            for _ in 0..200 {
                let Some(change) = walk.layout.draw(4, Swaps::Rounds, &mut numbers) else { continue };
                let before = (walk.layout.clone(), walk.powers.clone());
                walk.make(&change);
                // Messages take the time that they take where the walk begins.
                let other = Walk::with_hops(task, walk.layout.clone(), walk.hops.clone());
                assert_eq!((&walk.powers, &walk.times), (&other.powers, &other.times), "{change:?}");
                walk.take_back(&change);
                assert_eq!((&walk.layout, &walk.powers), (&before.0, &before.1), "{change:?}");
                walk.make(&change);
            }
        }
    }
}
