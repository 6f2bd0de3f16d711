//! The settings from which a stage in training is made.

use std::sync::Arc;

use burn::optim::ModuleOptimizer;
use burn::tensor::{Device, Tensor};
use pipewright_schedule::recompute::LayerParts;
use pipewright_schedule::{Slices, StageBackward};

use super::error::StageError;
use super::module::StageContext;
use super::weight_work::WeightRunner;
use crate::optimizer::{ClipGroup, OptimizerGroup};
use crate::tensor::shard::RowShards;
use crate::tensor::{Precision, Values};

/// The settings with which a pipeline prepares a stage.
#[derive(Clone, Default)]
pub(crate) struct StageSettings {
    /// Where the stage computes; `None` for the device of its module.
    pub device: Option<Device>,
    /// The precision in which the stage computes.
    pub precision: Precision,
    /// The optimizer; `None` for a stage that is not trained.
    pub optimizer: Option<ModuleOptimizer>,
    /// The number of ranks that compute the stage together.
    pub tensor_ranks: u32,
    /// The number of replicas that hold the experts of the stage together.
    pub expert_ranks: u32,
    /// The groups of parameters with an optimizer of their own.
    pub optimizer_groups: Arc<[OptimizerGroup]>,
    /// The groups of parameters with a largest norm of their own.
    pub clip_groups: Arc<[ClipGroup]>,
    /// The rows of the trained parameters that this replica holds; `None` if it holds all.
    pub row_shards: Option<RowShards>,
    /// Whether batches are computed at the parameters before the last update ([`PipelineConfig::delayed`](crate::pipeline::PipelineConfig::delayed)).
    pub delayed: bool,
    /// Whether the stage must end in a loss.
    pub must_have_loss: bool,
    /// The number of slices into which microbatches are cut.
    pub slices: Slices,
    /// Whether a forward that is recomputed is recomputed block by block instead of as a whole.
    pub by_block: bool,
    /// The number of the first blocks that a forward that is recomputed computes again; `None` for all.
    pub recomputed_layers: Option<usize>,
    /// The parts of layers that every backward computes again.
    pub recomputed_parts: LayerParts,
    /// The gradients that the backward of the stage computes in the program that trains.
    pub backward: StageBackward,
}

/// A loss without the type of its target.
pub(crate) type Loss<O> = Box<dyn Fn(O, Values, &StageContext) -> Result<Tensor<1>, StageError> + Send>;

/// The settings that the user has made for a stage.
#[derive(Default)]
pub(super) struct StageOptions {
    /// Whether the loss gets outputs in half precision as they are.
    pub(super) loss_takes_half: bool,
    /// The prefixes of the parameters' paths, the innermost first.
    pub(super) prefixes: Vec<String>,
    pub(super) weight_runner: Option<WeightRunner>,
    /// Accepts the paths of the parameters that are the base of an adapter; `None` if there are none.
    pub(super) is_base: Option<BasePaths>,
}

/// Accepts the global paths of the parameters that are the base of an adapter.
pub(crate) type BasePaths = Box<dyn Fn(&str) -> bool + Send>;
