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
use crate::plan::rank_times::StageTimes;
use crate::plan::tuning::{unlike, walk};

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
    /// The stages of each rank, in order, and the times of all stages, of the last layout.
    stages_of: Vec<Vec<usize>>,
    times: Vec<StageTimes>,
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
    walk.set(layout);
    (0..walk.stages_of.len()).map(|rank| walk.time(layout, rank)).fold(0.0, f64::max)
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
            stages_of: vec![Vec::new(); step.ranks as usize],
            times: Vec::new(),
            slowest: (0, 0.0),
        }
    }

    /// Computes the times of all stages of a layout.
    fn set(&mut self, layout: &PlacedCut) {
        self.stages_of.iter_mut().for_each(Vec::clear);
        for (stage, &rank) in layout.rank_of.iter().enumerate() {
            self.stages_of[rank as usize].push(stage);
        }
        self.task.step.set_unlike_stage_times(&layout.rank_of, &layout.starts, &mut self.times);
    }

    /// Returns the sum of the powers of the bounds of all ranks; a part of it if that is above `limit`.
    fn energy(&mut self, layout: &PlacedCut, limit: f64) -> f64 {
        self.set(layout);
        let mean = self.critical / layout.rank_of.len() as f64;
        let delayed = unlike::LONG_STAGE * f64::from(self.task.step.ranks);
        let mut sum = 0.0;
        for rank in 0..self.stages_of.len() {
            let own = self.stages_of[rank].iter().map(|&stage| &self.times[stage]);
            let longest = own.map(|stage| stage.forward + stage.input).fold(mean, f64::max);
            let time = self.time(layout, rank) + delayed * (longest - mean);
            let time = time / self.scale * self.excess(layout, rank).powi(2);
            if rank == 0 || time > self.slowest.1 {
                self.slowest = (rank as u32, time);
            }
            sum += time.powi(walk::POWER);
            if sum > limit {
                break;
            }
        }
        sum
    }

    /// Returns the bound of a rank, with the second forwards that its memory forces.
    fn time(&self, layout: &PlacedCut, rank: usize) -> f64 {
        let own = self.stages_of[rank].iter().map(|&stage| &self.times[stage]);
        self.task.step.time_of_rank(rank, 0, own) + self.second_forwards(layout, rank)
    }

    /// Returns the time of the second forwards that the memory of a rank forces.
    fn second_forwards(&self, layout: &PlacedCut, rank: usize) -> f64 {
        let Some(memory) = self.task.memory else { return 0.0 };
        let microbatches = self.task.step.microbatches;
        let (mut held, mut forward) = (0.0, 0.0);
        for &stage in &self.stages_of[rank] {
            let times = &self.times[stage];
            let in_flight = (times.first_backward - times.first_forward).clamp(0.0, self.scale);
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
        self.stages_of[rank].iter().map(|&stage| sum(&self.bytes, layout, stage)).fold(0, u64::saturating_add)
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
            walk.set(&layout);
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
