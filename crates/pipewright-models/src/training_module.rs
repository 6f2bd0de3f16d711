//! Modules of stages that can be trained, and the loss of a language model, which the last stage computes.

use burn::module::ModuleDisplay;
use burn::tensor::{Int, Tensor};
use pipewright::nn::{self, split_cross_entropy};
use pipewright::stage::{Stage, StageModule};

use crate::split::SplitStage;

/// The module of a stage of a model family.
pub trait TrainingModule: StageModule + ModuleDisplay {
    /// Returns the stage for training. The last stage of a model computes the loss from target ids `[batch,
    /// sequence]`.
    fn into_stage(self, is_last: bool) -> Stage;
}

/// Returns the stage of a module that ends in the logits of its rank's part of the vocabulary, whose loss is
/// the mean cross entropy.
pub(crate) fn stage_of_logits<M: StageModule<Output = Tensor<3>>>(
    module: M,
    is_last: bool,
    SplitStage { tensor, vocabulary, .. }: SplitStage,
) -> Stage {
    if !is_last {
        return Stage::new(module);
    }
    let stage = Stage::with_loss(module, move |logits: Tensor<3>, targets: Tensor<2, Int>| {
        if tensor.ranks() == 1 {
            return cross_entropy(logits, targets);
        }
        let [batch, sequence, part] = logits.dims();
        let tokens = batch * sequence;
        let (logits, targets) = (logits.reshape([tokens, part]), targets.reshape([tokens]));
        split_cross_entropy(logits, targets, vocabulary, &tensor)
    });
    stage.with_half_precision_loss()
}

/// Returns the cross entropy between `softmax(logits)` and the target ids in nats, as the mean over all
/// tokens.
///
/// Shapes: logits `[batch, sequence, vocabulary]`, targets `[batch, sequence]`, result `[1]`.
///
/// # Panics
/// When a target is outside the vocabulary.
pub fn cross_entropy(logits: Tensor<3>, targets: Tensor<2, Int>) -> Tensor<1> {
    let [batch, sequence, vocabulary] = logits.dims();
    let tokens = batch * sequence;
    nn::cross_entropy(logits.reshape([tokens, vocabulary]), targets.reshape([tokens]))
}
