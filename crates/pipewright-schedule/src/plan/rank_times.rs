//! A lower bound on the time of a step for given layers of each rank: the basis of the cuts and of the proved bound.
//!
//! Rank `r` owns stage `r` and later ones. Let `first` be the first layer of stage `r`, `m` the number of microbatches,
//! and `hop` the time of a message. Then a step takes at least as long as each of these:
//!
//! 1. **Fill and work.** `F(0..first) + r hop + m (F + I + W)(layers of the rank)`: the rank cannot start before the
//!    first microbatch has passed the earlier layers, and then computes one thing at a time.
//! 2. **Fill, work and drain.** `(F + I)(0..first) + 2 r hop + m (F + I)(layers of the rank) + W(layer 0)`: among all
//!    forwards and input backwards of the rank, the last in time is an input backward of its first stage, because every
//!    other one leads to one. It is followed by the input backwards of all earlier layers, and a weight gradient.
//! 3. **Path.** `(F + I)(all layers) + 2 (p - 1) hop + W(layer 0)`, plus `m - 1` times the larger of `F` and `I` of the
//!    layers of any one stage: each microbatch passes all ranks and returns, and a stage takes one after another.

use crate::plan::class::Class;
use crate::plan::layers::Layers;

/// The sizes that the bounds of a step share.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step<'a> {
    pub(super) layers: &'a Layers,
    pub(super) ranks: u32,
    pub(super) microbatches: f64,
    /// The shortest time of a message.
    pub(super) hop: f64,
}

impl<'a> Step<'a> {
    /// Returns the step of `microbatches` microbatches over `ranks` ranks.
    pub(super) fn of(layers: &'a Layers, ranks: u32, microbatches: u32) -> Self {
        Self { layers, ranks, microbatches: f64::from(microbatches), hop: layers.shortest_hop() }
    }

    /// Returns the earliest time at which a rank can start whose first stage follows `rank` stages and begins with the
    /// layer `first`.
    pub(super) fn fill(&self, rank: usize, first: usize) -> f64 {
        self.layers.forward(0..first) + rank as f64 * self.hop
    }

    /// Returns the time after the last input backward of such a rank.
    pub(super) fn drain(&self, rank: usize, first: usize) -> f64 {
        if rank == 0 {
            return self.layers.list[0].weight;
        }
        self.layers.input(0..first) + rank as f64 * self.hop + self.layers.list[0].weight
    }

    /// Returns the time of the path of one microbatch.
    pub(super) fn path(&self) -> f64 {
        let all = 0..self.layers.count();
        let hops = 2.0 * f64::from(self.ranks - 1) * self.hop;
        self.layers.forward(all.clone()) + self.layers.input(all) + hops + self.layers.list[0].weight
    }

    /// Returns the bounds 1 and 2 for a rank with this much work for one microbatch: `F + I + W`, and `F + I`.
    pub(super) fn rank_time(&self, rank: usize, first: usize, work: f64, critical: f64) -> f64 {
        let filled = self.fill(rank, first) + self.microbatches * work;
        let drained = self.fill(rank, first) + self.microbatches * critical + self.drain(rank, first);
        filled.max(drained)
    }

    /// Returns the bound for a cut: the largest of all.
    pub(super) fn cut_time(&self, class: Class, starts: &[usize]) -> f64 {
        let ranks = class.ranks as usize;
        let mut work = vec![[0.0; 2]; ranks];
        let mut slowest = 0.0f64;
        for (stage, range) in starts.windows(2).enumerate() {
            let (forward, input) =
                (self.layers.forward(range[0]..range[1]), self.layers.input(range[0]..range[1]));
            let of_rank = &mut work[class.rank_of(stage)];
            of_rank[0] += self.layers.work(range[0]..range[1]);
            of_rank[1] += forward + input;
            slowest = slowest.max(forward.max(input));
        }
        let path = self.path() + (self.microbatches - 1.0) * slowest;
        let times = work.iter().enumerate();
        times
            .map(|(rank, &[work, critical])| self.rank_time(rank, starts[rank], work, critical))
            .fold(path, f64::max)
    }
}
