//! Modules of stages that can be trained: how the last stage of a model computes its loss.

use burn::tensor::Tensor;
use pipewright::stage::{Stage, StageModule};

use crate::loss::cross_entropy;

/// The module of a stage of a model family.
pub trait TrainingModule: StageModule {
    /// Returns the stage for training. The last stage of a model computes the loss from target ids `[batch, sequence]`.
    fn into_stage(self, is_last: bool) -> Stage;
}

/// Returns the stage of a module that ends in logits, whose loss is the mean cross entropy.
pub(crate) fn stage_of_logits<M: StageModule<Output = Tensor<3>>>(module: M, is_last: bool) -> Stage {
    if is_last { Stage::with_loss(module, cross_entropy) } else { Stage::new(module) }
}
