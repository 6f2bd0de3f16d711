//! [`StoredState`]: a state from which stages restore their parameters and optimizers.

use std::path::Path;
use std::sync::Arc;

use burn::tensor::{DType, TensorData};

use super::error::CheckpointError;
use crate::tensor::TensorShard;
use crate::tensor::shard::RowShard;

/// The state of an optimizer for one parameter: fields with their texts, and fields with their tensors.
#[derive(Debug, Default)]
pub(crate) struct OptimizerFields {
    pub(super) scalars: Vec<(String, String)>,
    pub(super) tensors: Vec<(String, TensorData)>,
}

/// Parameters and optimizer state by path: a checkpoint, or the state of layers that move between stages.
pub(crate) trait StoredState {
    /// Returns the name of the state for errors.
    fn place(&self) -> &Path;

    /// Returns whether the state has a parameter of this path.
    fn has_parameter(&self, path: &str) -> bool;

    /// Returns whether the parameter was frozen while the pipeline ran.
    fn is_frozen(&self, path: &str) -> bool;

    /// Reads the rows of one part of a shard of a parameter; `shape` is the shape of the whole shard.
    ///
    /// # Errors
    /// When there is no such parameter, or its shape or type differs.
    fn read_rows(
        &self,
        parameter: &Arc<str>,
        shape: &[usize],
        dtype: DType,
        shard: TensorShard,
        part: RowShard,
    ) -> Result<TensorData, CheckpointError>;

    /// Reads the optimizer's state for the same rows of a parameter; nothing if it has no state.
    ///
    /// # Errors
    /// When it cannot be read.
    fn read_optimizer(
        &self,
        parameter: &str,
        shard: TensorShard,
        part: RowShard,
    ) -> Result<OptimizerFields, CheckpointError>;
}
