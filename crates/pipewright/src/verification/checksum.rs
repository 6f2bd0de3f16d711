//! [`Checksums`]: checksums of a rank's results in each computation of a step.

use std::cmp::Ordering;

use burn::tensor::TensorData;
use pipewright_schedule::{Microbatch, StageIndex};
use serde::{Deserialize, Serialize};

use super::difference::Content;
use crate::ids::WorldRank;

/// A result of a step. Every computation of the step has it, on the same rank or on another one. Results are
/// ordered such that each follows the results that it is computed from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ResultKey {
    pub(crate) content: Content,
    pub(crate) stage: StageIndex,
    /// The microbatches of the step's earlier batches on a replica.
    pub(crate) earlier: u32,
    pub(crate) microbatch: Microbatch,
    /// The number of slices of a microbatch: `microbatch` counts them.
    pub(crate) slices: u32,
    /// The number of an exchange of tokens in the action: the result is what the rank has sent. `None` for
    /// the result of the action, which follows all exchanges.
    pub(crate) exchange: Option<u32>,
    /// The share of the batch: the index of the replica that gets it in the first computation. Of parameters,
    /// the index of their rows if they are sharded; the numbers after these are for the experts of replicas
    /// that hold them together.
    pub(crate) share: u32,
    /// The index in the tensor group.
    pub(crate) tensor: u32,
}

impl ResultKey {
    /// Returns the numbers by which results are ordered.
    fn order(&self) -> [u32; 7] {
        let Self { content, stage, earlier, microbatch, slices, exchange, share, tensor } = *self;
        let (kind, stage) = match content {
            Content::Parameters => (0, stage.get()),
            Content::Forward => (1, stage.get()),
            // A program has `B` or `I` of a stage.
            Content::Backward | Content::InputBackward => (2, u32::MAX - stage.get()),
            Content::Weights => (3, stage.get()),
        };
        let (number, slice) = (microbatch.get(), microbatch.get() % slices);
        let place = match content {
            // The backwards of a microbatch run from its last slice to its first.
            Content::Backward | Content::InputBackward => number - slice + (slices - 1 - slice),
            _ => number,
        };
        [kind, stage, earlier, place, exchange.unwrap_or(u32::MAX), share, tensor]
    }

    /// Returns whether both are the same result, of two ranks of a tensor group.
    pub(super) fn is_of_group(&self, other: &Self) -> bool {
        Self { tensor: 0, ..*self } == Self { tensor: 0, ..*other }
    }
}

impl Ord for ResultKey {
    fn cmp(&self, other: &Self) -> Ordering {
        self.order().cmp(&other.order())
    }
}

impl PartialOrd for ResultKey {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// The checksums of a rank's results in each computation of a step. A computation that failed may lack some.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Checksums {
    computations: Vec<Vec<(ResultKey, u64)>>,
}

impl Checksums {
    /// Begins a computation of a batch. `repetition` is 0 in the first computation, and `is_first` says that
    /// it is the first batch of its step.
    pub(crate) fn begin(&mut self, repetition: u32, is_first: bool) {
        if is_first {
            self.computations.truncate(repetition as usize);
        }
        self.computations.resize(repetition as usize + 1, Vec::new());
    }

    /// Adds a result of the computation that runs.
    pub(crate) fn note(&mut self, result: ResultKey, sum: u64) {
        if let Some(computation) = self.computations.last_mut() {
            computation.push((result, sum));
        }
    }

    /// Returns whether the computation that runs has the result.
    pub(crate) fn has(&self, result: &ResultKey) -> bool {
        self.computations
            .last()
            .is_some_and(|computation| computation.iter().any(|(known, _)| known == result))
    }

    /// Returns the results with their checksums, each with the number of its computation.
    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, ResultKey, u64)> {
        let computations = self.computations.iter().enumerate();
        computations
            .flat_map(|(number, results)| results.iter().map(move |&(result, sum)| (number, result, sum)))
    }
}

/// The checksums of a rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RankChecksums {
    pub(crate) rank: WorldRank,
    pub(crate) sums: Checksums,
}

/// Returns a checksum of the bits of tensors; some may be absent.
pub(crate) fn checksum(tensors: impl IntoIterator<Item = Option<TensorData>>) -> u64 {
    let mut hasher = blake3::Hasher::new();
    for tensor in tensors {
        hasher.update(&[u8::from(tensor.is_some())]);
        if let Some(tensor) = tensor {
            hasher.update(tensor.as_bytes());
        }
    }
    let hash = hasher.finalize();
    u64::from_le_bytes(*hash.as_bytes().first_chunk().expect("a hash has 32 bytes"))
}
