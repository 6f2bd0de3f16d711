//! The training loss of a language model.

use burn::tensor::{Int, Tensor};
use pipewright::nn;

/// Returns the cross entropy between `softmax(logits)` and the target ids in nats, as the mean over all tokens.
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
