//! The router of a mixture of experts: the experts of each token, their weights, and the balance of the
//! choices.

use std::sync::Arc;

use burn::tensor::{Int, Tensor, TensorData, activation};
use pipewright_kernel::routing::{
    backward, balance, balance_backward, choose, loads, softmax, weights as weights_of,
};

use super::composed::at_least_single;
use super::operation::{CpuTensor, Operation, cpu_tensor, elements, on_cpu};

/// The experts of each token with their weights.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use pipewright::nn::Routing;
///
/// let logits = Tensor::<2>::from_data([[0.0, 2.0, 1.0], [1.0, 0.0, 2.0]], &Device::flex());
/// let routing = Routing::new(logits, 2, true);
/// assert_eq!(routing.chosen(), [1, 2, 2, 0]);
/// assert_eq!(routing.weights().dims(), [2, 2]);
/// ```
#[derive(Clone, Debug)]
pub struct Routing {
    weights: Tensor<2>,
    chosen: Arc<[usize]>,
    experts: usize,
    is_finite: bool,
    probabilities: Probabilities,
}

/// The softmax of the logits.
#[derive(Clone, Debug)]
enum Probabilities {
    /// Off the tape, with the logits, which may be on it.
    Fused { probabilities: CpuTensor, logits: Tensor<2> },
    /// On the tape if the logits are.
    Composed(Tensor<2>),
}

impl Routing {
    /// Chooses `count` experts for each token: the experts with the largest `softmax(logits)`, in single
    /// precision over all experts. The weight of a chosen expert is its probability, divided by the sum of
    /// the token's chosen ones if `normalised`. Gradients flow through the weights. If probabilities are
    /// equal, the first expert is chosen.
    ///
    /// Shape: logits `[tokens, experts]`.
    ///
    /// # Panics
    /// When `count` is 0 or larger than the number of experts.
    pub fn new(logits: Tensor<2>, count: usize, normalised: bool) -> Self {
        let [tokens, experts] = logits.dims();
        assert!((1..=experts).contains(&count), "{count} of {experts} experts cannot be chosen");
        let Some(([primitive], tape)) = on_cpu([logits.clone().into_dispatch()]) else {
            return Self::composed(logits, count, normalised);
        };
        let probabilities = softmax(&elements(&primitive), experts);
        let is_finite = probabilities.iter().all(|p| p.is_finite());
        let chosen: Arc<[usize]> = choose(&probabilities, experts, count).into();
        let weights = weights_of(&probabilities, &chosen, experts, count, normalised);
        let probabilities = cpu_tensor(probabilities, [tokens, experts]);
        let weights = tape.record(weights, [tokens, count], |_| WeightsBackward {
            probabilities: probabilities.clone(),
            chosen: chosen.clone(),
            experts,
            normalised,
        });
        let probabilities = Probabilities::Fused { probabilities, logits };
        Self { weights, chosen, experts, is_finite, probabilities }
    }

    /// Like [`Routing::new`], but made of Burn's operations. The choice is made on the host from the
    /// probabilities, so that it is the same on every device.
    fn composed(logits: Tensor<2>, count: usize, normalised: bool) -> Self {
        let [tokens, experts] = logits.dims();
        let precision = logits.dtype();
        let probabilities = activation::softmax(at_least_single(logits), 1);
        let on_host: Vec<f32> = probabilities.clone().into_data().iter().collect();
        let chosen: Arc<[usize]> = choose(&on_host, experts, count).into();
        let ids: Vec<i64> = chosen.iter().map(|&expert| expert as i64).collect();
        let ids = TensorData::new(ids, [tokens, count]);
        let mut weights =
            probabilities.clone().gather(1, Tensor::<2, Int>::from_data(ids, &probabilities.device()));
        if normalised {
            weights = weights.clone() / weights.sum_dim(1);
        }
        Self {
            weights: weights.cast(precision),
            chosen,
            experts,
            is_finite: on_host.iter().all(|p| p.is_finite()),
            probabilities: Probabilities::Composed(probabilities),
        }
    }

    /// Returns the weights of the chosen experts, shape `[tokens, count]`.
    pub fn weights(&self) -> Tensor<2> {
        self.weights.clone()
    }

    /// Returns the chosen experts, `count` for each token, in the order of the weights: the largest
    /// probability first.
    pub fn chosen(&self) -> &[usize] {
        &self.chosen
    }

    /// Returns the number of experts.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Returns how many tokens chose each expert, for
    /// [`StageContext::expert_load`](crate::stage::StageContext::expert_load).
    pub fn counts(&self) -> Vec<u64> {
        count_choices(&self.chosen, self.experts)
    }

    /// Returns whether all probabilities are numbers. They are not if a logit is NaN or plus infinity.
    pub fn is_finite(&self) -> bool {
        self.is_finite
    }

    /// Returns the load-balancing loss `E sum(f_e P_e)` over the experts, shape `[1]`. `f_e` is the fraction
    /// of the tokens that chose expert `e`, which carries no gradient, and `P_e` the mean of its probability.
    /// The loss is `count` if all experts are chosen equally often.
    pub fn balance_loss(&self) -> Tensor<1> {
        let tokens = self.weights.dims()[0];
        let loads = loads(&self.chosen, self.experts, tokens);
        match &self.probabilities {
            Probabilities::Fused { probabilities, logits } => {
                let (_, tape) = on_cpu([logits.clone().into_dispatch()])
                    .expect("the logits were of the CPU back end when the experts were chosen");
                let loss = balance(&elements(probabilities), &loads);
                let probabilities = probabilities.clone();
                tape.in_single().record(vec![loss], [1], |_| BalanceBackward { probabilities, loads })
            }
            Probabilities::Composed(probabilities) => {
                let loads = TensorData::new(loads, [1, self.experts]);
                let loads = Tensor::<2>::from_data(loads, &probabilities.device());
                let loads = loads.cast(probabilities.dtype());
                (probabilities.clone().mean_dim(0) * loads).sum()
            }
        }
    }
}

/// Returns how often each of `experts` experts is in the list of choices.
pub fn count_choices(chosen: &[usize], experts: usize) -> Vec<u64> {
    let mut counts = vec![0; experts];
    chosen.iter().for_each(|&expert| counts[expert] += 1);
    counts
}

#[derive(Clone, Debug)]
struct WeightsBackward {
    probabilities: CpuTensor,
    chosen: Arc<[usize]>,
    experts: usize,
    normalised: bool,
}

impl Operation<1> for WeightsBackward {
    fn backward(self, gradient: CpuTensor, _wanted: [bool; 1]) -> [Option<CpuTensor>; 1] {
        let Self { probabilities, chosen, experts, normalised } = &self;
        let d = backward(&elements(probabilities), chosen, &elements(&gradient), *experts, *normalised);
        [Some(cpu_tensor(d, probabilities.layout().shape().clone()))]
    }
}

#[derive(Clone, Debug)]
struct BalanceBackward {
    probabilities: CpuTensor,
    loads: Vec<f32>,
}

impl Operation<1> for BalanceBackward {
    fn backward(self, gradient: CpuTensor, _wanted: [bool; 1]) -> [Option<CpuTensor>; 1] {
        let d = balance_backward(&elements(&self.probabilities), &self.loads, elements(&gradient)[0]);
        [Some(cpu_tensor(d, self.probabilities.layout().shape().clone()))]
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{check_in_f64, numbers};
    use super::*;

    fn check(tokens: usize, experts: usize, count: usize, normalised: bool) {
        let routing = |x: Tensor<1>| Routing::new(x.reshape([tokens, experts]), count, normalised);
        let logits = || [numbers([tokens * experts], 3.0)];
        check_in_f64(logits(), |[x]| routing(x).weights());
        check_in_f64(logits(), |[x]| routing(x).balance_loss().unsqueeze());
        check_in_f64(logits(), |[x]| {
            let routing = routing(x);
            routing.weights() + routing.balance_loss().unsqueeze()
        });
    }

    #[test]
    fn equals_its_composition_in_f64() {
        for normalised in [false, true] {
            check(7, 5, 2, normalised);
            check(3, 40, 8, normalised);
            check(4, 3, 1, normalised);
            check(2, 4, 4, normalised);
            check(6, 1, 1, normalised);
        }
    }

    #[test]
    fn logits_that_overflow_are_noticed() {
        let device = burn::tensor::Device::flex();
        let finite =
            |logits: [[f32; 2]; 1]| Routing::new(Tensor::from_data(logits, &device), 1, true).is_finite();
        assert!(finite([[1e30, -1e30]]));
        assert!(finite([[0.0, f32::NEG_INFINITY]]));
        assert!(!finite([[f32::INFINITY, 0.0]]));
        assert!(!finite([[f32::NAN, 0.0]]));
    }

    #[test]
    #[should_panic(expected = "3 of 2 experts cannot be chosen")]
    fn more_choices_than_experts_are_refused() {
        Routing::new(numbers([4, 2], 1.0), 3, false);
    }
}
