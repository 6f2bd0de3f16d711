//! A lower bound on the time of a step for given layers of each rank: the basis of the cuts and of the proved
//! bound.
//!
//! Rank `r` owns stage `r` and later ones. Let `first` be the first layer of stage `r`, `m` the number of
//! microbatches, and `r hop` the time of the messages from rank 0 to rank `r`. Then a step takes at least as
//! long as each of these:
//!
//! 1. **Fill and work.** `F(0..first) + r hop + m (F + I + W)(layers of the rank)`: the rank cannot start
//!    before the first microbatch has passed the earlier layers, and then computes one thing at a time.
//! 2. **Fill, work and drain.** `(F + I)(0..first) + 2 r hop + m (F + I)(layers of the rank) + W(layer 0)`:
//!    among all forwards and input backwards of the rank, the last in time is an input backward of its first
//!    stage, because every other one leads to one. It is followed by the input backwards of all earlier
//!    layers, and a weight gradient.
//! 3. **Path.** `(F + I)(all layers) + 2 (p - 1) hop + W(layer 0)`, plus `m - 1` times the larger of `F` and
//!    `I` of the layers of any one stage: each microbatch passes all ranks and returns, and a stage takes one
//!    after another.
//! 4. **Starvation.** The forward of microbatch `n` (from 0) of a stage starts no earlier than
//!    `F(layers before) + n slowest` and the time of the messages, where `slowest` is the largest `F` of the
//!    stages up to this one. The first backward of a stage starts when one microbatch has passed all stages,
//!    and the input backwards of the stages after it; backward `n` starts `n slowest` later, with the largest
//!    of `F` of all stages and `I` of this stage and those after it. So for any time `t`, the step takes at
//!    least `t` and the work of the rank that cannot start before `t`. The earliest starts of the first
//!    forwards and of the first backwards of its stages are tried for `t`. With the first one of them, this
//!    is bound 1.
//!
//! **Frozen layers.** Let `k` be the first trained layer. The layers before it have no `I` and no `W`, and
//! other frozen layers no `W` ([`Layers`]). Let stage `f` have layer `k`. Each stage has a layer, so `f <= k`.
//! Gradients travel from the last stage to `f` only, so at least the messages from rank `r` down to rank `k`
//! are left of the way back from stage `r`. In bound 2, all computations of a rank lead to an input backward
//! of its first stage that runs backward, or of stage `f` if the rank has no such stage. Then `W(layer k)`
//! follows, and not `W(layer 0)`. In bound 4, stages that run forward only have no first backward.

use std::ops::Range;

use crate::plan::layers::Layers;
use crate::plan::unlike_cut::UnlikeCut;
use crate::trained::StageBackward;

/// The sizes that the bounds of a step share.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step<'a> {
    pub(super) layers: &'a Layers,
    pub(super) ranks: u32,
    pub(super) microbatches: f64,
    /// The shortest times of a message inside a node and between nodes.
    hops: [f64; 2],
}

impl<'a> Step<'a> {
    /// Returns the step of `microbatches` microbatches over `ranks` ranks.
    pub(super) fn of(layers: &'a Layers, ranks: u32, microbatches: u32) -> Self {
        let hops = layers.network.hop_times(layers.smallest_output());
        Self { layers, ranks, microbatches: f64::from(microbatches), hops }
    }

    /// Returns the same step of other layers, whose messages have the same sizes.
    pub(super) fn with_layers<'b>(&self, layers: &'b Layers) -> Step<'b> {
        Step { layers, ranks: self.ranks, microbatches: self.microbatches, hops: self.hops }
    }

    /// Returns the earliest start of a rank. Its first stage follows `rank` other stages and begins with the
    /// layer `first`.
    pub(super) fn fill(&self, rank: usize, first: usize) -> f64 {
        self.layers.forward(0..first) + self.hops(rank)
    }

    /// Returns whether the ranks together, after their fill, have enough of `time` for all microbatches if
    /// each takes `work`.
    pub(super) fn has_time(&self, time: f64, work: f64) -> bool {
        if self.layers.is_unlike() {
            return self.unlike_has_time(time, work);
        }
        let count = self.layers.count();
        let left = |rank: usize| (time - self.fill(rank, rank.min(count))).max(0.0);
        (0..self.ranks as usize).map(left).sum::<f64>() >= self.microbatches * work
    }

    /// Returns the shortest time of the messages between the ranks from the first one to `rank`.
    fn hops(&self, rank: usize) -> f64 {
        let far = rank as u32 / self.layers.network.in_a_row;
        f64::from(rank as u32 - far) * self.hops[0] + f64::from(far) * self.hops[1]
    }

    /// Returns the shortest time of the messages with gradients from the first stage of `rank` to the first
    /// stage that runs backward. It does not depend on the cut.
    fn hops_back(&self, rank: usize) -> f64 {
        self.hops(rank) - self.hops(self.layers.first_trained.min(rank))
    }

    /// Returns the shortest time of the messages on the way of one microbatch.
    fn path_hops(&self) -> f64 {
        let last = self.ranks as usize - 1;
        self.hops(last) + self.hops_back(last)
    }

    /// Returns the time of the last weight gradient.
    fn last_weight(&self) -> f64 {
        self.layers.list[self.layers.first_trained].weight
    }

    /// Returns the shortest time of a message from one rank to another; 0 if they are the same.
    fn hop(&self, from: u32, to: u32) -> f64 {
        let row = self.layers.network.in_a_row;
        if from == to { 0.0 } else { self.hops[usize::from(from / row != to / row)] }
    }

    /// Returns the shortest time of `count` messages between any ranks.
    pub(super) fn shortest_hops(&self, count: usize) -> f64 {
        let [near, far] = self.hops;
        count as f64 * if self.layers.network.in_a_row > 1 { near.min(far) } else { far }
    }

    /// Returns the earliest start of the first backward of the rank whose last layer comes before `after`,
    /// which is also the first layer after it. Besides the messages from the first rank to the last one, at
    /// least `more_hops` messages come before it.
    pub(super) fn first_backward(&self, after: usize, more_hops: usize) -> f64 {
        let end = self.layers.count();
        let hops = self.hops(self.ranks as usize - 1) + self.shortest_hops(more_hops);
        self.layers.forward(0..end) + self.layers.input(after..end) + hops
    }

    /// Returns the time after the last input backward of such a rank.
    pub(super) fn drain(&self, rank: usize, first: usize) -> f64 {
        if rank == 0 {
            return self.last_weight();
        }
        self.layers.input(0..first) + self.hops_back(rank) + self.last_weight()
    }

    /// Returns the time of the path of one microbatch.
    pub(super) fn path(&self) -> f64 {
        let all = 0..self.layers.count();
        self.layers.forward(all.clone()) + self.layers.input(all) + self.path_hops() + self.last_weight()
    }

    /// Returns the bounds 1 and 2 for a rank with this much work for one microbatch: `F + I + W`, and
    /// `F + I`.
    pub(super) fn rank_time(&self, rank: usize, first: usize, work: f64, critical: f64) -> f64 {
        let filled = self.fill(rank, first) + self.microbatches * work;
        let drained = self.fill(rank, first) + self.microbatches * critical + self.drain(rank, first);
        filled.max(drained)
    }

    /// Returns the shortest time of the messages from the first stage to each one.
    pub(super) fn hops_before(&self, rank_of: &[u32]) -> Vec<f64> {
        let mut hops = vec![0.0];
        hops.extend(rank_of.windows(2).scan(0.0, |sum, pair| {
            *sum += self.hop(pair[0], pair[1]);
            Some(*sum)
        }));
        hops
    }

    /// Returns the bounds 1 and 2 of a rank, and bound 4 as if forwards arrived at once. `first` is the first
    /// layer of the rank's first stage.
    pub(super) fn own_time(&self, rank: usize, first: usize, sums: &OwnSums) -> f64 {
        let backward = self.microbatches * (sums.work - sums.forward);
        let forwards_end = self.fill(rank, first) + self.microbatches * sums.forward;
        let starved = self.first_backward(sums.end, 0).max(forwards_end) + backward;
        self.rank_time(rank, first, sums.work, sums.critical).max(starved)
    }

    /// Returns the times of all stages of a cut over equal ranks. `hops` has the times of the messages from the
    /// first stage to each one.
    pub(super) fn stage_times(&self, hops: &[f64], starts: &[usize]) -> Vec<StageTimes> {
        let of_stage =
            |(stage, range): (usize, &[usize])| StageTimes::of(self, range[0]..range[1], hops, stage);
        let mut times: Vec<StageTimes> = starts.windows(2).enumerate().map(of_stage).collect();
        set_slowest(&mut times, |_, _| {});
        times
    }

    /// Returns the bounds 1, 2 and 4 of one of equal ranks with these stages. `first` is the first layer of the first
    /// one.
    pub(super) fn time_of_rank<'s>(
        &self,
        rank: usize,
        first: usize,
        own: impl Iterator<Item = &'s StageTimes> + Clone,
    ) -> f64 {
        let critical: f64 = own.clone().map(|stage| stage.forward + stage.input).sum();
        let ends = self.fill(rank, first) + self.drain(rank, first);
        let mut longest = ends + self.microbatches * critical;
        let with_rest = |time: f64| {
            let left = own.clone().map(|stage| stage.work_from(time, self.microbatches)).sum::<f64>();
            time + left
        };
        for stage in own.clone() {
            longest = longest.max(with_rest(stage.first_forward)).max(with_rest(stage.first_backward));
        }
        longest
    }

    /// Returns the bound for a cut: the largest of all. `rank_of` has the rank of each stage; the first
    /// stages of equal ranks are on the ranks of their number.
    pub(super) fn cut_time(&self, rank_of: &[u32], starts: &[usize]) -> f64 {
        if self.layers.is_unlike() {
            let mut cut = UnlikeCut::of(self.layers, self.ranks, self.microbatches);
            cut.set(rank_of, starts);
            return cut.time();
        }
        let hops = self.hops_before(rank_of);
        let times = self.stage_times(&hops, starts);
        let slowest = times.iter().map(|stage| stage.forward.max(stage.input)).fold(0.0, f64::max);
        let first = starts.partition_point(|&start| start <= self.layers.first_trained) - 1;
        let more_hops = 2.0 * hops[hops.len() - 1] - hops[first] - self.path_hops();
        let path = self.path() + more_hops.max(0.0) + (self.microbatches - 1.0) * slowest;
        self.rank_times(rank_of, starts, &times).fold(path, f64::max)
    }

    /// Returns the bounds 1, 2 and 4 of every rank.
    fn rank_times<'s>(
        &'s self,
        rank_of: &'s [u32],
        starts: &'s [usize],
        times: &'s [StageTimes],
    ) -> impl Iterator<Item = f64> {
        (0..self.ranks).map(move |rank| {
            let own = rank_of.iter().zip(times).filter(move |&(&of, _)| of == rank).map(|(_, times)| times);
            self.time_of_rank(rank as usize, starts[rank as usize], own)
        })
    }
}

/// The sums over the layers of a rank, which are added stage by stage.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct OwnSums {
    /// `F + I + W`.
    work: f64,
    /// `F + I`.
    critical: f64,
    forward: f64,
    /// The first layer after the rank's layers.
    end: usize,
}

impl OwnSums {
    /// Adds the layers of a stage.
    pub(super) fn add(&mut self, step: &Step<'_>, range: Range<usize>) {
        let forward = step.layers.forward(range.clone());
        self.work += step.layers.work(range.clone());
        self.critical += forward + step.layers.input(range.clone());
        self.forward += forward;
        self.end = range.end;
    }
}

/// The times of a stage in a cut: the times of one microbatch, and the earliest starts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct StageTimes {
    /// `F`, `I`, and `F + I + W`.
    pub(super) forward: f64,
    pub(super) input: f64,
    work: f64,
    /// The largest `F` of the stages up to this one, and the largest of `F` of all stages and `I` of this
    /// stage and those after it.
    slowest: [f64; 2],
    pub(super) first_forward: f64,
    /// Of a stage that runs forward only, the same as `first_forward`.
    pub(super) first_backward: f64,
}

impl StageTimes {
    /// Returns the times of a stage without the slowest stages.
    pub(super) fn of(step: &Step<'_>, range: Range<usize>, hops: &[f64], stage: usize) -> Self {
        let (layers, end) = (step.layers, step.layers.count());
        let (hops, all_hops) = (hops[stage], hops[hops.len() - 1]);
        let first_forward = layers.forward(0..range.start) + hops;
        let first_backward = match layers.backward_of(range.clone()) {
            StageBackward::None => first_forward,
            _ => layers.forward(0..end) + layers.input(range.end..end) + 2.0 * all_hops - hops,
        };
        Self {
            forward: layers.forward(range.clone()),
            input: layers.input(range.clone()),
            work: layers.work(range.clone()),
            slowest: [0.0; 2],
            first_forward,
            first_backward,
        }
    }

    /// Returns the times with the slowest stages of others.
    pub(super) fn with_slowest_of(self, other: Self) -> Self {
        Self { slowest: other.slowest, ..self }
    }

    /// Returns the work of the stage that cannot start before `time`.
    fn work_from(&self, time: f64, microbatches: f64) -> f64 {
        let forwards = left(time - self.first_forward, self.slowest[0], microbatches);
        let backwards = left(time - self.first_backward, self.slowest[1], microbatches);
        forwards * self.forward + backwards * (self.work - self.forward)
    }
}

/// Returns the number of microbatches that start at `since` or later, if the first one starts at 0 and each
/// other one at least `slowest` after the one before it.
fn left(since: f64, slowest: f64, microbatches: f64) -> f64 {
    if since <= 0.0 {
        return microbatches;
    }
    // Without a distance, the quotient is infinite.
    let begun = (since / slowest).min(microbatches);
    // Many processors need a call for `ceil`.
    let whole = f64::from(begun as u32);
    microbatches - if whole < begun { whole + 1.0 } else { whole }
}

/// Sets the slowest stages of all stages. Calls `change` with a stage and its times before they change.
pub(super) fn set_slowest(times: &mut [StageTimes], mut change: impl FnMut(usize, StageTimes)) {
    let mut slowest = 0.0f64;
    for (stage, times) in times.iter_mut().enumerate() {
        slowest = slowest.max(times.forward);
        if times.slowest[0] != slowest {
            change(stage, *times);
            times.slowest[0] = slowest;
        }
    }
    for (stage, times) in times.iter_mut().enumerate().rev() {
        slowest = slowest.max(times.input);
        if times.slowest[1] != slowest {
            change(stage, *times);
            times.slowest[1] = slowest;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::Mesh;
    use crate::plan::class::{Class, Path};
    use crate::plan::network::Network;
    use crate::plan::request::TrainingState;
    use crate::profile::{LayerProfile, LinkProfile, Profile};

    /// Checks the bounds of two stages per rank in a loop, one layer each. `I` and `W` take 1.
    fn check(forward: &[f64], ranks: u32, microbatches: u32, expected: &[f64]) {
        let layer = |&forward_s: &f64| LayerProfile {
            forward_s,
            input_backward_s: 1.0,
            weight_backward_s: 1.0,
            ..LayerProfile::default()
        };
        let link = LinkProfile::new(0.0, f64::INFINITY);
        let profile = Profile { link, layers: forward.iter().map(layer).collect(), ..Profile::default() };
        let mesh = Mesh { pipeline: ranks, ..Mesh::default() };
        let network = Network::of(&profile, mesh).expect("a mesh");
        let layers = Layers::of(&profile, 1, network, TrainingState::default());
        let starts: Vec<usize> = (0..=forward.len()).collect();
        let rank_of = Class { ranks, chunks: 2, path: Path::Loop }.ranks_of();
        let step = Step::of(&layers, ranks, microbatches);
        let times = step.stage_times(&step.hops_before(&rank_of), &starts);
        assert_eq!(step.rank_times(&rank_of, &starts, &times).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn ranks_wait_for_the_forwards_and_backwards_of_each_stage() {
        // At the first backwards, at 5 and 4, rank 0 has work of 8 left, and rank 1 a forward more.
        check(&[1.0; 4], 2, 2, &[13.0, 13.0]);
        // Rank 0 has work of 30. At 4, when the first forward of its second stage can start, 28 of it are
        // left. The first backwards of the first stages of the others start at 23, 22 and 21. Then work of 4
        // is left in these stages, and work of 3 in the second ones: the second microbatch, which arrives 10
        // after the first one.
        check(&[1.0, 1.0, 1.0, 1.0, 10.0, 1.0, 1.0, 1.0], 4, 2, &[32.0, 30.0, 29.0, 28.0]);
    }
}
