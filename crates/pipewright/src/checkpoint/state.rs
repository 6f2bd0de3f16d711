//! What a training state is, as it leaves the ranks: tensors that share storage with the running model.
//!
//! Taking a state copies nothing. Whoever writes to storage that a state still holds copies it first: the optimizer's
//! next step does, for what is not on disk by then.

use std::sync::Arc;

use burn::module::ParamId;
use burn::optim::ModuleOptimizer;
use pipewright_schedule::Rank;
use serde_json::{Map, Value as Json};

use super::cursor::Cursor;
use crate::memory::RankMemory;
use crate::tensor::Value;
use crate::tensor::shard::RowShard;

/// The state of a training run between two steps, as far as this process holds it.
#[derive(Debug)]
pub struct TrainingState {
    /// Optimizer steps taken.
    pub step: u64,
    /// The row of the data that comes next.
    pub cursor: Cursor,
    /// What the run's owner wants to find in the manifest again.
    pub description: Map<String, Json>,
    /// Every rank's part.
    pub ranks: Vec<RankState>,
}

/// One rank's parameters and optimizer state, by global path.
pub struct RankState {
    pub(crate) rank: Rank,
    pub(crate) stages: Vec<StageState>,
    /// Copies that are made for writing are on the rank's count.
    pub(crate) memory: RankMemory,
}

/// One stage's part.
pub(crate) struct StageState {
    pub(crate) parameters: Vec<HeldParameter>,
    pub(crate) optimizer: Option<ModuleOptimizer>,
    /// Which part of each parameter it is, where they are spread over replicas.
    pub(crate) part: Option<RowShard>,
}

/// A parameter with what its optimizer state is found by.
pub(crate) struct HeldParameter {
    /// Its place among the stage's parameters.
    pub(crate) place: usize,
    pub(crate) path: Arc<str>,
    pub(crate) id: ParamId,
    pub(crate) value: Value,
}

impl RankState {
    /// The rank that it was taken from.
    pub fn rank(&self) -> Rank {
        self.rank
    }
}

impl std::fmt::Debug for RankState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let parameters: usize = self.stages.iter().map(|stage| stage.parameters.len()).sum();
        f.debug_struct("RankState")
            .field("rank", &self.rank)
            .field("parameters", &parameters)
            .finish_non_exhaustive()
    }
}
