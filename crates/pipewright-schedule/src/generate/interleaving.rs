//! The order in which a rank runs its chunks, shared by all interleaved schedules.
//!
//! Forwards: chunk 0 for a group of microbatches, chunk 1 for the same group, and so on up to the last chunk,
//! then chunk 0 for the next group. Backwards: the same with the chunks reversed. The last group is short if
//! the size of a group does not divide the number of microbatches. Narayanan et al., "Efficient Large-Scale
//! Language Model Training on GPU Clusters Using Megatron-LM", 2021; [`crate::vpp`] has the same order as a
//! table.

/// The number of chunks of a rank, and of microbatches that a chunk runs before the next chunk.
#[derive(Debug, Clone, Copy)]
pub(super) struct Interleaving {
    /// The number of chunks on the rank.
    pub(super) chunks: u32,
    /// The number of microbatches that a chunk runs before the next chunk.
    pub(super) group: u32,
    /// The number of microbatches of the schedule.
    pub(super) microbatches: u32,
}

impl Interleaving {
    /// Returns the number of forwards of the rank, which is also the number of its backwards.
    pub(super) fn all(self) -> u32 {
        self.chunks * self.microbatches
    }

    /// Returns the chunk of a rank's forward number `op`, counted from 0.
    pub(super) fn forward(self, op: u32) -> usize {
        let of_group = u64::from(self.group) * u64::from(self.chunks);
        let (group, op) = (u64::from(op) / of_group, u64::from(op) % of_group);
        let left = u64::from(self.microbatches) - group * u64::from(self.group);
        (op / left.min(u64::from(self.group))) as usize
    }

    /// Returns the chunk of a rank's backward number `op`, counted from 0.
    pub(super) fn backward(self, op: u32) -> usize {
        self.chunks as usize - 1 - self.forward(op)
    }

    /// Returns the number of forwards of the warm-up: one group in all chunks but one, and `further` ones.
    pub(super) fn warm_up(self, further: u32) -> u32 {
        (self.chunks - 1).saturating_mul(self.group).saturating_add(further).min(self.all())
    }

    /// Returns the number of forwards of a warm-up with two further forwards, instead of one, for each of the
    /// later ranks, `followers`, and `more` forwards. A short last group limits them: with more, the first rank
    /// would wait for a forward that the last rank runs only after a backward, which waits for the first rank.
    pub(super) fn wide_warm_up(self, followers: u32, more: u32, ranks: u32) -> u32 {
        self.warm_up(followers + followers.saturating_add(more).min(self.most_further(ranks)))
    }

    /// Returns the most forwards of a warm-up beyond one for each later rank.
    fn most_further(self, ranks: u32) -> u32 {
        let short = self.microbatches % self.group;
        if short == 0 {
            return u32::MAX;
        }
        // A group is smaller than the number of ranks only if all microbatches are one group, which is not short.
        let most = short + 1 + (self.group - ranks);
        if (self.chunks - 1) * short <= 1 { most + self.group } else { most }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vpp::{VirtualPipeline, tables};

    #[test]
    fn the_order_is_that_of_the_table() {
        for chunks in 1..5 {
            for microbatches in 1..14 {
                for group in 1..16 {
                    let order = Interleaving { chunks, group, microbatches };
                    let pipeline =
                        VirtualPipeline { ranks: 1, chunks, microbatches, group_size: Some(group) };
                    let table = tables(&pipeline).expect("tables").table;
                    let found: Vec<u32> = (0..order.all()).map(|op| order.forward(op) as u32).collect();
                    let expected: Vec<u32> = table.iter().map(|(_, chunk)| *chunk).collect();
                    assert_eq!(found, expected, "{order:?}");
                }
            }
        }
    }
}
