//! The losses of routers over some of the tokens. Each is one operation, so that a router's logits have as
//! few gradients to add as possible: a sum of two does not depend on their order, which differs with the cut
//! of a model. The losses of half precision have single precision.

use std::sync::Arc;

use burn::tensor::{Tensor, TensorData, activation};
use pipewright_kernel::router_losses::{backward, choice, choice_backward, forward};

use super::composed::at_least_single;
use super::operation::{CpuTensor, Operation, cpu_tensor, elements, on_cpu};

/// Returns the balance loss and the loss of the logits, shape `[2]`: the means over tokens of
/// `sum_e p_e loads_e` (Fedus et al., 2022), with `p` the softmax of a token's logits, and of
/// `(log sum_e exp l_e)²` (Zoph et al., 2022).
///
/// `loads` carries no gradient; with `E` times the share of the tokens that chose an expert, the first loss
/// is the number of a token's choices if all experts are chosen equally often. `weights` has each token's
/// weight in the means.
///
/// Shape: logits `[tokens, experts]`.
///
/// # Panics
/// When the numbers of loads and weights differ from the numbers of experts and tokens.
pub fn router_losses(logits: Tensor<2>, loads: Arc<[f32]>, weights: Arc<[f32]>) -> Tensor<1> {
    let shape = logits.dims();
    assert_eq!(shape, [weights.len(), loads.len()], "a weight for each token, a load for each expert");
    let Some(([logits], tape)) = on_cpu([logits.clone().into_dispatch()]) else {
        return composed(logits, &loads, &weights);
    };
    let losses = forward(&elements(&logits), &loads, &weights).to_vec();
    tape.in_single().record(losses, [2], |_| LossesBackward { logits, shape, loads, weights })
}

fn composed(logits: Tensor<2>, loads: &[f32], weights: &[f32]) -> Tensor<1> {
    let logits = at_least_single(logits);
    let (device, dtype) = (logits.device(), logits.dtype());
    let constant = |numbers: &[f32], shape: [usize; 2]| {
        Tensor::<2>::from_data(TensorData::new(numbers.to_vec(), shape), &device).cast(dtype)
    };
    let (loads, weights) = (constant(loads, [1, loads.len()]), constant(weights, [weights.len(), 1]));
    let logarithms = activation::log_softmax(logits.clone(), 1);
    let normaliser = (logits - logarithms.clone()).narrow(1, 0, 1);
    let balance = (logarithms.exp() * loads * weights.clone()).sum();
    Tensor::cat(vec![balance, (normaliser.square() * weights).sum()], 0)
}

#[derive(Clone, Debug)]
struct LossesBackward {
    logits: CpuTensor,
    shape: [usize; 2],
    loads: Arc<[f32]>,
    weights: Arc<[f32]>,
}

impl Operation<1> for LossesBackward {
    fn backward(self, gradient: CpuTensor, _wanted: [bool; 1]) -> [Option<CpuTensor>; 1] {
        let gradient = elements(&gradient);
        let gradient = [gradient[0], gradient[1]];
        let d = backward(&elements(&self.logits), &self.loads, &self.weights, gradient);
        [Some(cpu_tensor(d, self.shape))]
    }
}

/// Returns the mean over tokens of the binary cross entropy of a score against 1 if the token was chosen and
/// 0 if not, shape `[1]`. `weights` has each token's weight in the mean.
///
/// Shape: scores `[tokens, 1]`.
///
/// # Panics
/// When the numbers of choices and weights differ from the number of scores.
pub fn choice_loss(scores: Tensor<2>, was_chosen: Arc<[f32]>, weights: Arc<[f32]>) -> Tensor<1> {
    let shape = scores.dims();
    assert_eq!((shape, weights.len()), ([was_chosen.len(), 1], was_chosen.len()), "each token has a score");
    let Some(([scores], tape)) = on_cpu([scores.clone().into_dispatch()]) else {
        return composed_choice(scores, &was_chosen, &weights);
    };
    let loss = choice(&elements(&scores), &was_chosen, &weights);
    tape.in_single().record(vec![loss], [1], |_| ChoiceBackward { scores, was_chosen, weights })
}

fn composed_choice(scores: Tensor<2>, was_chosen: &[f32], weights: &[f32]) -> Tensor<1> {
    let scores = at_least_single(scores);
    let (shape, device, dtype) = (scores.dims(), scores.device(), scores.dtype());
    let constant = |numbers: &[f32]| {
        Tensor::<2>::from_data(TensorData::new(numbers.to_vec(), shape), &device).cast(dtype)
    };
    // `softplus(r)` is `relu(r) + ln(1 + exp(-|r|))`, which does not overflow.
    let softplus = activation::relu(scores.clone()) + scores.clone().abs().neg().exp().log1p();
    ((softplus - scores * constant(was_chosen)) * constant(weights)).sum()
}

#[derive(Clone, Debug)]
struct ChoiceBackward {
    scores: CpuTensor,
    was_chosen: Arc<[f32]>,
    weights: Arc<[f32]>,
}

impl Operation<1> for ChoiceBackward {
    fn backward(self, gradient: CpuTensor, _wanted: [bool; 1]) -> [Option<CpuTensor>; 1] {
        let gradient = elements(&gradient)[0];
        let d = choice_backward(&elements(&self.scores), &self.was_chosen, &self.weights, gradient);
        [Some(cpu_tensor(d, [self.weights.len(), 1]))]
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{check, numbers};
    use super::*;

    fn weights() -> Arc<[f32]> {
        [0.25, 0.0, 0.5, 0.25, 0.0].into()
    }

    #[test]
    fn losses_equal_their_composition() {
        let loads: Arc<[f32]> = [0.5, 1.5, 0.0, 2.0].into();
        for scale in [1.0, 40.0] {
            check(
                [numbers([20], scale)],
                |[x]| router_losses(x.reshape([5, 4]), loads.clone(), weights()).unsqueeze(),
                |[x]| composed(x.reshape([5, 4]), &loads, &weights()).unsqueeze(),
            );
        }
    }

    #[test]
    fn a_choice_equals_its_composition() {
        let was_chosen: Arc<[f32]> = [1.0, 0.0, 0.0, 1.0, 1.0].into();
        for scale in [1.0, 60.0] {
            check(
                [numbers([5], scale)],
                |[x]| choice_loss(x.reshape([5, 1]), was_chosen.clone(), weights()).unsqueeze(),
                |[x]| composed_choice(x.reshape([5, 1]), &was_chosen, &weights()).unsqueeze(),
            );
        }
    }
}
