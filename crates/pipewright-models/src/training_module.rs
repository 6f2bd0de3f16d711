//! Modules of stages that can be trained, and the loss of a language model, which the last stage computes.

use burn::module::ModuleDisplay;
use burn::tensor::{Int, Tensor};
use pipewright::nn::{self, split_cross_entropy};
use pipewright::stage::{Stage, StageContext, StageModule};

use crate::split::SplitStage;

/// The loss of a model's last stage: from its output and the target ids `[batch, sequence]`.
pub type Loss<Output> = Box<dyn Fn(Output, Tensor<2, Int>, &StageContext) -> Tensor<1> + Send>;

/// The module of a stage of a model family.
pub trait TrainingModule: StageModule + ModuleDisplay {
    /// Returns the loss of a module that ends in the model's head. It takes outputs in half precision as they
    /// are.
    fn loss(&self) -> Loss<Self::Output>;

    /// Returns the stage for training. The last stage of a model computes the loss.
    fn into_stage(self, is_last: bool) -> Stage {
        if !is_last {
            return Stage::new(self);
        }
        let loss = self.loss();
        Stage::with_context_loss(self, loss).with_half_precision_loss()
    }
}

/// Returns the loss of a module that ends in the logits of its rank's part of the vocabulary: the mean cross
/// entropy.
pub(crate) fn loss_of_logits(SplitStage { tensor, vocabulary, .. }: &SplitStage) -> Loss<Tensor<3>> {
    let (tensor, vocabulary) = (tensor.clone(), *vocabulary);
    Box::new(move |logits, targets, _context| {
        if tensor.ranks() == 1 {
            return cross_entropy(logits, targets);
        }
        let [batch, sequence, part] = logits.dims();
        let tokens = batch * sequence;
        let (logits, targets) = (logits.reshape([tokens, part]), targets.reshape([tokens]));
        split_cross_entropy(logits, targets, vocabulary, &tensor)
    })
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
