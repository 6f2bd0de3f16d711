//! The items that most programs import: `use pipewright::prelude::*;`.
//!
//! It has the types of a model of your own, of its training, and of its checkpoints, and the types of Burn
//! that a layer names. Layers are in [`crate::nn`] and in `burn::nn`.

pub use burn::module::Module;
pub use burn::optim::AdamWConfig;
pub use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
pub use pipewright_schedule::{Recompute, StageIndex};

pub use crate::batch::{Batch, SplitRule, SplitSpec};
pub use crate::checkpoint::{Checkpoint, CheckpointFolder, CheckpointWriter, Cursor, TrainingState};
pub use crate::mesh::DataParallelMode;
pub use crate::pipeline::{
    BuildError, EvalSummary, LayerList, Layers, Pipeline, PipelineConfig, PipelineError, StepSummary,
};
pub use crate::stage::{Stage, StageContext, StageModule};
pub use crate::tensor::Precision;
pub use crate::train::{Metrics, RunLog};
pub use crate::transport::World;
