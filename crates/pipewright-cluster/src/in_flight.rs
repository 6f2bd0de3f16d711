//! The activations that a rank of 1F1B holds at its peak, without a simulation.
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

use crate::layout::Layout;

/// Returns the most bytes that a rank of 1F1B holds at once, interleaved if it has several chunks. `chunks`
/// are the bytes of a microbatch in each of its chunks.
pub(crate) fn of_1f1b(layout: &Layout, rank: u32, chunks: &[u64]) -> u64 {
    let followers = u64::from(layout.pipeline - 1 - rank);
    match chunks {
        [bytes] => bytes.saturating_mul(u64::from(layout.microbatches()).min(followers + 1)),
        _ => peak(layout, 2 * followers, chunks),
    }
}

/// Returns the bytes that a rank of interleaved ZB-H1 holds at least: its rounds are the rounds of interleaved
/// 1F1B, with `p - 1 - r` instead of `2 (p - 1 - r)` further forwards. Tensors for gradients of weights are
/// not included.
pub(crate) fn of_interleaved_zb_h1(layout: &Layout, rank: u32, chunks: &[u64]) -> u64 {
    peak(layout, u64::from(layout.pipeline - 1 - rank), chunks)
}

/// Returns the most bytes of a rank that starts with a round in all chunks but one, and `further` forwards.
fn peak(layout: &Layout, further: u64, chunks: &[u64]) -> u64 {
    let (ranks, microbatches) = (u64::from(layout.pipeline), u64::from(layout.microbatches()));
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
