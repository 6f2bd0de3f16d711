//! The order in which a rank runs its chunks, shared by all interleaved schedules.
//!
//! Forwards: chunk 0 for a group of microbatches, chunk 1 for the same group, and so on up to the last chunk,
//! then chunk 0 for the next group. Backwards: the same with the chunks reversed. Narayanan et al.,
//! "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021.

/// The number of chunks of a rank, and of microbatches that a chunk runs before the next chunk.
#[derive(Debug, Clone, Copy)]
pub(super) struct Interleaving {
    /// The number of chunks on the rank.
    pub(super) chunks: u32,
    /// The number of microbatches that a chunk runs before the next chunk.
    pub(super) group: u32,
}

impl Interleaving {
    /// Returns the chunk of a rank's forward number `op`, counted from 0.
    pub(super) fn forward(self, op: u32) -> usize {
        (op / self.group % self.chunks) as usize
    }

    /// Returns the chunk of a rank's backward number `op`, counted from 0.
    pub(super) fn backward(self, op: u32) -> usize {
        self.chunks as usize - 1 - self.forward(op)
    }
}
