//! A training state: tensors that share storage with the running model.
//!
//! Taking a state copies nothing. An operation writes its result to new storage if a state still holds the
//! old one, also on a device. So the next optimizer step needs new storage for the tensors that are not on disk
//! by then. The elements of a device's tensor are copied to the processor when the tensor is written.

use std::sync::Arc;

use burn::module::ParamId;
use burn::optim::ModuleOptimizer;
use pipewright_data::Cursor;
use serde_json::{Map, Value as Json};

use super::location::StoredShard;
use crate::ids::WorldRank;
use crate::loss_scale::LossScale;
use crate::memory::RankMemory;
use crate::tensor::shard::RowShard;
use crate::tensor::{TensorShard, Value};

/// The part of a training run's state between two steps that this process holds.
#[derive(Debug)]
pub struct TrainingState {
    /// Optimizer steps taken.
    pub step: u64,
    /// The next row of the data.
    pub cursor: Cursor,
    /// The run's own entries for the manifest.
    pub description: Map<String, Json>,
    /// The part of each rank.
    pub ranks: Vec<RankState>,
}

/// One rank's parameters and optimizer state, by global path.
pub struct RankState {
    pub(crate) rank: WorldRank,
    pub(crate) stages: Vec<StageState>,
    /// The loss scale after the last step, if the pipeline has one.
    pub(crate) loss_scale: Option<LossScale>,
    /// The rank's memory count, which counts the copies that are made for writing.
    pub(crate) memory: RankMemory,
}

/// One stage's part of the state.
pub(crate) struct StageState {
    pub(crate) parameters: Vec<HeldParameter>,
    pub(crate) optimizer: Option<ModuleOptimizer>,
    /// The rows of the parameters that the stage holds, if parameters are sharded over replicas, unless the
    /// parameter itself names other rows ([`HeldParameter::rows`]).
    pub(crate) row_shard: Option<RowShard>,
}

/// A parameter, with the keys of its optimizer state.
pub(crate) struct HeldParameter {
    /// Its index among the stage's parameters.
    pub(crate) index: usize,
    pub(crate) path: Arc<str>,
    pub(crate) id: ParamId,
    /// The shard that the stage holds, or the rows of it that the replica holds.
    pub(crate) shard: TensorShard,
    /// The rows of the shard that the replica holds.
    pub(crate) rows: RowShard,
    /// Whether it was frozen while the pipeline ran.
    pub(crate) is_frozen: bool,
    pub(crate) value: Value,
    /// The value before the last update, if parameters are delayed by one update.
    pub(crate) older: Option<Value>,
    /// Whether the training changes it.
    pub(crate) is_trained: bool,
}

impl HeldParameter {
    /// Returns the rows that a file has, if they differ from `part`, the rows of the parameters in the file.
    /// The first replica stores parameters that every replica has whole with the others.
    pub(super) fn other_rows(&self, part: Option<RowShard>) -> Option<RowShard> {
        let part = part?;
        let is_like_others = self.rows == part || (self.rows.has_all() && part.index == 0);
        (!is_like_others).then_some(self.rows)
    }

    /// Returns which shard of the parameter a file has.
    pub(super) fn stored_shard(&self) -> StoredShard {
        StoredShard { dimension: self.shard.dimension, part: RowShard::one(self.shard.index, self.shard.of) }
    }
}

impl RankState {
    /// Returns the rank whose state this is.
    pub fn rank(&self) -> WorldRank {
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
