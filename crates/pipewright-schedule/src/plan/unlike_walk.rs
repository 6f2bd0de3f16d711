//! The walk that balances layouts of unlike ranks.
//!
//! Each change moves the starts of most stages, because these depend on the ranks before them. So the bounds of all
//! ranks are computed again after each change, until they show that it is too much worse. As in `balance.rs`, the walk
//! minimises the sum of a high power of the bounds of all ranks, and a rank with a long stage counts as a little
//! slower. In some changes, the slowest rank gives layers away.
//!
//! If memory is limited, a rank also counts as slower by the second forwards that it then needs: each stage keeps a
//! microbatch at least from its first forward to its first backward, and the bytes times time of all microbatches are
//! at most the memory times the step. In an order, microbatches wait for each other and stay several times as long
//! ([`WalkTask::stay`]). A rank whose parameters, gradients and optimizer state exceed the memory counts
//! as much slower.

use crate::plan::numbers::Numbers;
use crate::plan::placed_cut::{PlacedCut, Swaps, WalkTask};
use crate::plan::tuning::{ROUNDING, unlike, walk};
use crate::plan::unlike_cut::UnlikeCut;

/// The data of a walk.
struct Walk<'a> {
    task: WalkTask<'a>,
    /// The step of ranks that are all busy.
    scale: f64,
    /// `F + I` of all layers on ranks of the mean speed.
    critical: f64,
    /// Running sums of the bytes that a rank always holds, with the activations of one microbatch, and of the
    /// activations of a microbatch; if memory is limited.
    bytes: Vec<u64>,
    kept: Vec<u64>,
    /// The times of the last layout.
    cut: UnlikeCut<'a>,
    /// The least power of each rank in the last layout.
    powers: Vec<f64>,
    /// The order in which the bounds of ranks are computed. The ranks that were too slow last come first.
    order: Vec<usize>,
    /// The rank with the longest time of the last layout, and this time.
    slowest: (u32, f64),
}

/// Returns a layout near `layout` with balanced ranks. Adds the number of changes that it makes, including
/// the changes that it takes back, to `changes`, and one for its start.
pub(super) fn balanced_unlike(
    task: WalkTask<'_>,
    layout: PlacedCut,
    numbers: &mut Numbers,
    changes: &mut u64,
) -> PlacedCut {
    let (ranks, steps) = (task.step.ranks as usize, task.steps);
    let mut walk = Walk::of(task);
    let mut now = layout;
    let mut energy = walk.energy(&now, f64::INFINITY);
    *changes += 1;
    let mut slowest = walk.slowest.0;
    let mut best = (energy, now.clone());
    for round in 0..steps {
        let left = (steps - round) as f64 / steps as f64;
        let limit = energy * (1.0 + unlike::TOLERANCE * left * left * left);
        let is_guided = task.swaps == Swaps::Any && numbers.below(unlike::GUIDED) == 0;
        let change = if is_guided {
            now.draw_move(slowest, ranks, numbers)
        } else {
            now.draw(ranks, task.swaps, numbers)
        };
        let Some(change) = change else { continue };
        now.apply(&change);
        *changes += 1;
        let found = walk.energy(&now, limit);
        if found > limit {
            now.apply(&change.reversed());
            continue;
        }
        energy = found;
        slowest = walk.slowest.0;
        if energy < best.0 {
            best.0 = energy;
            best.1.clone_from(&now);
        }
    }
    best.1
}

/// Returns the largest time of a rank in a layout, with the second forwards that its memory forces.
pub(super) fn time_with_memory(task: WalkTask<'_>, layout: &PlacedCut) -> f64 {
    let mut walk = Walk::of(task);
    walk.cut.set(&layout.rank_of, &layout.starts);
    (0..walk.cut.stages_of.len()).map(|rank| walk.time(layout, rank)).fold(0.0, f64::max)
}

impl<'a> Walk<'a> {
    fn of(task: WalkTask<'a>) -> Self {
        let WalkTask { step, memory, .. } = task;
        let (mut bytes, mut kept) = (vec![0u64], vec![0u64]);
        for layer in step.layers.list.iter().filter(|_| memory.is_some()) {
            let always = step.layers.layer_bytes(layer, 1).saturating_add(layer.activation);
            bytes.push(bytes[bytes.len() - 1].saturating_add(always));
            kept.push(kept[kept.len() - 1].saturating_add(layer.activation));
        }
        let all = 0..step.layers.count();
        let critical = step.layers.forward(all.clone()) + step.layers.input(all.clone());
        let speed = step.sum_of_speeds();
        let work = step.microbatches * step.layers.work(all);
        Self {
            task,
            scale: (work / speed).max(f64::MIN_POSITIVE),
            critical: critical * (f64::from(step.ranks) / speed),
            bytes,
            kept,
            cut: UnlikeCut::of(step.layers, step.ranks, step.microbatches),
            powers: Vec::new(),
            order: (0..step.ranks as usize).collect(),
            slowest: (0, 0.0),
        }
    }

    /// Returns the sum of the powers of the bounds of all ranks; infinity if that is above `limit`.
    fn energy(&mut self, layout: &PlacedCut, limit: f64) -> f64 {
        self.cut.set(&layout.rank_of, &layout.starts);
        let ranks = self.task.step.ranks as usize;
        // Bound 1 shows of most changes that they are too much worse.
        let least = |rank: usize| (self.cut.least_time_of_rank(rank) / self.scale).powi(walk::POWER);
        self.powers.clear();
        self.powers.extend((0..ranks).map(least));
        let mut left: f64 = self.powers.iter().sum();
        if left * (1.0 - ROUNDING) > limit {
            return f64::INFINITY;
        }
        let mean = self.critical / layout.rank_of.len() as f64;
        let delayed = unlike::LONG_STAGE * f64::from(self.task.step.ranks);
        let mut sum = 0.0;
        self.slowest.1 = 0.0;
        for place in 0..ranks {
            let rank = self.order[place];
            left -= self.powers[rank];
            let own = self.cut.stages_of[rank].iter().map(|&stage| &self.cut.stages[stage]);
            let longest = own.map(|stage| stage.forward + stage.input).fold(mean, f64::max);
            let time = self.time(layout, rank) + delayed * (longest - mean);
            let time = time / self.scale * self.excess(layout, rank).powi(2);
            if time > self.slowest.1 {
                self.slowest = (rank as u32, time);
            }
            sum += time.powi(walk::POWER);
            if sum + left * (1.0 - ROUNDING) > limit {
                self.order[..=place].rotate_right(1);
                return f64::INFINITY;
            }
        }
        sum
    }

    /// Returns the bound of a rank, with the second forwards that its memory forces.
    fn time(&self, layout: &PlacedCut, rank: usize) -> f64 {
        self.cut.time_of_rank(rank) + self.second_forwards(layout, rank)
    }

    /// Returns the time of the second forwards that the memory of a rank forces.
    fn second_forwards(&self, layout: &PlacedCut, rank: usize) -> f64 {
        let Some(memory) = self.task.memory else { return 0.0 };
        let microbatches = self.task.step.microbatches;
        let (mut held, mut forward) = (0.0, 0.0);
        for &stage in &self.cut.stages_of[rank] {
            let times = &self.cut.stages[stage];
            let in_flight = (times.backwards.first - times.forwards.first).clamp(0.0, self.scale);
            held += sum(&self.kept, layout, stage) as f64 * in_flight * microbatches;
            forward += times.forward;
        }
        let always = self.always(layout, rank) as f64;
        let room = (memory.of_rank(rank) as f64 - always).max(0.0) * self.scale / self.task.stay;
        if held <= room { 0.0 } else { (1.0 - room / held) * forward * microbatches }
    }

    /// Returns how many times the memory a rank holds, at least 1.
    fn excess(&self, layout: &PlacedCut, rank: usize) -> f64 {
        let Some(memory) = self.task.memory else { return 1.0 };
        (self.always(layout, rank) as f64 / memory.of_rank(rank).max(1) as f64).max(1.0)
    }

    /// Returns the bytes that a rank always holds, with one microbatch in flight.
    fn always(&self, layout: &PlacedCut, rank: usize) -> u64 {
        self.cut.stages_of[rank]
            .iter()
            .map(|&stage| sum(&self.bytes, layout, stage))
            .fold(0, u64::saturating_add)
    }
}

/// Returns the sum over the layers of a stage.
fn sum(sums: &[u64], layout: &PlacedCut, stage: usize) -> u64 {
    sums[layout.starts[stage + 1]] - sums[layout.starts[stage]]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::rank_memory::RankMemory;
    use crate::plan::rank_times::Step;
    use crate::plan::tests::unlike;

    #[test]
    fn microbatches_that_stay_longer_need_more_second_forwards() {
        let mut longer = 0;
        for seed in 0..100 {
            let (layers, layout) = unlike(seed, 3);
            let (step, plenty) = (Step::of(&layers, 3, 12), RankMemory::Equal(1 << 40));
            let task = WalkTask { step, memory: Some(&plenty), stay: 1.0, swaps: Swaps::Any, steps: 0 };
            let mut walk = Walk::of(task);
            walk.cut.set(&layout.rank_of, &layout.starts);
            let always = (0..3).map(|rank| walk.always(&layout, rank)).max().unwrap_or(0);
            let time = |memory: u64, stay: f64| {
                let memory = RankMemory::Equal(memory);
                time_with_memory(WalkTask { memory: Some(&memory), stay, ..task }, &layout)
            };
            assert_eq!(time(1 << 40, 3.0), time(1 << 40, 1.0), "seed {seed}");
            // The fullest rank has room for about one more microbatch.
            let [short, long] = [1.0, 3.0].map(|stay| time(always + 200, stay));
            assert!(short <= long, "seed {seed}: {short} and {long}");
            longer += usize::from(short < long);
        }
        assert!(longer > 10, "{longer} layouts need more time");
    }
}
