//! 1F1B without a simulation: its time, and the activations that a rank holds at its peak.
//!
//! Interleaved 1F1B with `p` ranks, `v` chunks on each and `m` microbatches has `max(1, m / p)` rounds of `g`
//! microbatches. A rank runs the forwards of a round in its first chunk, then in its second one, and so on,
//! and the backwards from its last chunk to its first one. Rank `r` starts with `w` forwards,
//!
//! ```text
//! w = min(v m, (v - 1) g + 2 (p - 1 - r))
//! ```
//!
//! and then alternates a forward and a backward (arXiv 2104.04473, section 2.2). So it holds most after one of
//! the forwards that are before a backward: then `w + i + 1` forwards and `i` backwards have run.

use crate::costs::{Link, StageCosts};

/// The size of 1F1B, interleaved if a rank has several chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClosedForm {
    /// The number of ranks.
    pub ranks: u32,
    /// The number of microbatches.
    pub microbatches: u32,
    /// The number of chunks of each rank.
    pub chunks: u32,
}

impl ClosedForm {
    /// Returns the stages of each rank.
    pub fn stages_of_rank(&self) -> Vec<Vec<usize>> {
        let (ranks, chunks) = (self.ranks as usize, self.chunks as usize);
        (0..ranks).map(|rank| (0..chunks).map(|chunk| chunk * ranks + rank).collect()).collect()
    }

    /// Returns the seconds of a step: the work of the busiest rank, the way of the first microbatch to the last
    /// rank and back, and the messages of that way, each of `output` bytes.
    pub fn makespan(&self, stages: &[StageCosts], output: u64, link: Link) -> f64 {
        let seconds = |stage: usize| stages[stage].forward + stages[stage].backward;
        let of_rank = |own: Vec<usize>| own.into_iter().map(seconds).sum::<f64>();
        let busiest = self.stages_of_rank().into_iter().map(of_rank).fold(0.0, f64::max);
        let fill: f64 = (0..self.ranks.saturating_sub(1) as usize).map(seconds).sum();
        let hop = output as f64 / link.bandwidth + link.latency;
        let hops = 2.0 * (f64::from(self.ranks) - 1.0) * hop;
        f64::from(self.microbatches) * busiest + fill + hops
    }

    /// Returns the most bytes of activations that a rank holds at once. `chunks` are the bytes of a microbatch
    /// in each of its chunks.
    pub fn activations(&self, rank: u32, chunks: &[u64]) -> u64 {
        let followers = u64::from(self.ranks - 1 - rank);
        match chunks {
            [bytes] => bytes.saturating_mul(u64::from(self.microbatches).min(followers + 1)),
            _ => self.peak(2 * followers, chunks),
        }
    }

    /// Returns the bytes that a rank of interleaved ZB-H1 holds at least: its rounds are the rounds of
    /// interleaved 1F1B, with `p - 1 - r` instead of `2 (p - 1 - r)` further forwards. Tensors for gradients of
    /// weights are not included.
    pub fn least_activations_of_zb_h1(&self, rank: u32, chunks: &[u64]) -> u64 {
        self.peak(u64::from(self.ranks - 1 - rank), chunks)
    }

    /// Returns the most bytes of a rank that starts with a round in all chunks but one, and `further` forwards.
    fn peak(&self, further: u64, chunks: &[u64]) -> u64 {
        let (ranks, microbatches) = (u64::from(self.ranks), u64::from(self.microbatches));
        let round = microbatches.div_ceil((microbatches / ranks).max(1));
        let count = chunks.len() as u64;
        let all = count * microbatches;
        let warm_up = ((count - 1) * round + further).min(all);
        let forwards = Visits::new(chunks.iter().copied(), round);
        let backwards = Visits::new(chunks.iter().rev().copied(), round);
        let held = |done: u64| {
            let started = (warm_up + done + 1).min(all);
            forwards.bytes_of_first(started).saturating_sub(backwards.bytes_of_first(done))
        };
        // The bytes grow or shrink evenly until the next forward or the next backward is of another chunk. After a
        // round, they repeat.
        let last = all.saturating_sub(warm_up + 1);
        let until_forward = round - (warm_up + 1) % round;
        let changes = (0..=count).flat_map(|chunk| [chunk * round, chunk * round + until_forward]);
        let most = changes.filter(|&done| done < last).chain([last]).map(held).max().unwrap_or(0);
        most.min(u64::MAX.into()) as u64
    }
}

/// The forwards or the backwards of a rank in their order.
struct Visits {
    /// The bytes of the chunks before each chunk, and of all chunks.
    before: Vec<u128>,
    /// The microbatches of a round.
    round: u64,
}

impl Visits {
    fn new(chunks: impl Iterator<Item = u64>, round: u64) -> Self {
        let mut before = vec![0];
        let mut sum = 0;
        before.extend(chunks.map(|bytes| {
            sum += u128::from(bytes);
            sum
        }));
        Self { before, round }
    }

    /// Returns the bytes of the first `count` visits.
    fn bytes_of_first(&self, count: u64) -> u128 {
        let chunks = self.before.len() - 1;
        let of_round = self.round * chunks as u64;
        let (rounds, rest) = (count / of_round, count % of_round);
        let (chunk, started) = ((rest / self.round) as usize, rest % self.round);
        let own = self.before[chunk + 1] - self.before[chunk];
        u128::from(self.round) * (u128::from(rounds) * self.before[chunks] + self.before[chunk])
            + u128::from(started) * own
    }
}
