//! Adam with decoupled weight decay (Loshchilov and Hutter, 2019), in one pass over parameter, gradient and
//! moments.

use burn::backend::Flex;
use burn::optim::{AdamWState, AdaptiveMomentumState, LearningRate, ModuleOptimizer, Optimizer};
use burn::tensor::{DType, Device, Tensor};
use pipewright_kernel::adamw::{Coefficients, step, step_apart, step_over_gradient};

use super::restored_state::RestoredState;
use crate::nn::{CpuTensor, cpu_tensor, elements, owned};

/// Burn's `AdamW` with the same update and the same state, in place on the CPU back end and composed of
/// Burn's operations elsewhere.
///
/// ```
/// use pipewright::optimizer::AdamW;
/// use pipewright::pipeline::PipelineConfig;
///
/// let optimizer = AdamW { betas: (0.9, 0.95), ..AdamW::default() }.init();
/// let config = PipelineConfig { optimizer: Some(optimizer), ..PipelineConfig::default() };
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Decay rates of the first and second moment.
    pub betas: (f32, f32),
    /// Added to the root of the second moment.
    pub epsilon: f32,
    /// The decay rate: a step subtracts `learning rate x weight decay x parameter`.
    pub weight_decay: f32,
}

impl Default for AdamW {
    /// PyTorch's values.
    fn default() -> Self {
        Self { betas: (0.9, 0.999), epsilon: 1e-8, weight_decay: 0.01 }
    }
}

impl AdamW {
    /// Returns the optimizer of a whole module.
    pub fn init(self) -> ModuleOptimizer {
        ModuleOptimizer::from(self)
    }

    /// Returns the coefficients of step `t`, from 1. Bias corrections are computed in f64, as in PyTorch.
    pub(super) fn at(&self, t: usize, learning_rate: LearningRate) -> Coefficients {
        let power = |beta: f32| libm::pow(f64::from(beta), t as f64);
        Coefficients {
            betas: self.betas,
            step_size: (learning_rate / (1.0 - power(self.betas.0))) as f32,
            second_correction: (1.0 / (1.0 - power(self.betas.1))) as f32,
            epsilon: self.epsilon,
            keep: (1.0 - learning_rate * f64::from(self.weight_decay)) as f32,
        }
    }
}

/// The moments of a parameter.
pub type AdamWMoments<const D: usize> = RestoredState<AdamWState<D>>;

impl Optimizer for AdamW {
    type State<const D: usize> = AdamWMoments<D>;

    fn step<const D: usize>(
        &self,
        learning_rate: LearningRate,
        parameter: Tensor<D>,
        gradient: Tensor<D>,
        state: Option<AdamWMoments<D>>,
    ) -> (Tensor<D>, Option<AdamWMoments<D>>) {
        let RestoredState(state) = state.unwrap_or_else(|| {
            // Storage of their own, which the step writes over.
            let [moment_1, moment_2] = [(); 2].map(|()| gradient.zeros_like());
            RestoredState(AdamWState::new(AdaptiveMomentumState::new(0, moment_1, moment_2)))
        });
        let AdaptiveMomentumState { time, moment_1, moment_2, .. } = state.momentum;
        let step = self.at(time + 1, learning_rate);
        let tensors = [parameter, gradient, moment_1, moment_2];
        let on_cpu = tensors.clone().map(cpu);
        let [parameter, moment_1, moment_2] = match on_cpu {
            [Some(parameter), Some(gradient), Some(moment_1), Some(moment_2)] => {
                drop(tensors);
                let are_unique = [&gradient, &moment_1, &moment_2].map(CpuTensor::is_unique);
                if parameter.is_unique() {
                    in_place(parameter, &gradient, moment_1, moment_2, step)
                } else if are_unique == [true; 3] {
                    over_gradient(&parameter, gradient, moment_1, moment_2, step)
                } else {
                    apart([&parameter, &gradient, &moment_1, &moment_2], step)
                }
            }
            _ => composed(tensors, step),
        };
        let momentum = AdaptiveMomentumState::new(time + 1, moment_1, moment_2);
        (parameter, Some(RestoredState(AdamWState::new(momentum))))
    }

    fn to_device<const D: usize>(RestoredState(state): AdamWMoments<D>, device: &Device) -> AdamWMoments<D> {
        RestoredState(AdamWState::new(state.momentum.to_device(device)))
    }
}

/// Returns the CPU back end's tensor if it has single precision.
pub(super) fn cpu<const D: usize>(tensor: Tensor<D>) -> Option<CpuTensor> {
    if tensor.dtype() != DType::F32 {
        return None;
    }
    tensor.try_into_primitive::<Flex>().ok().map(owned)
}

fn in_place<const D: usize>(
    mut parameter: CpuTensor,
    gradient: &CpuTensor,
    mut moment_1: CpuTensor,
    mut moment_2: CpuTensor,
    by: Coefficients,
) -> [Tensor<D>; 3] {
    let (first, second) = (moment_1.storage_mut(), moment_2.storage_mut());
    step(parameter.storage_mut(), &elements(gradient), first, second, by);
    [parameter, moment_1, moment_2].map(Tensor::from_primitive::<Flex>)
}

/// Returns the same update, with the parameter in the storage of the gradient. The old parameter is still used, for example by
/// a batch that is computed with it.
fn over_gradient<const D: usize>(
    parameter: &CpuTensor,
    mut gradient: CpuTensor,
    mut moment_1: CpuTensor,
    mut moment_2: CpuTensor,
    by: Coefficients,
) -> [Tensor<D>; 3] {
    let (first, second) = (moment_1.storage_mut(), moment_2.storage_mut());
    step_over_gradient(&elements(parameter), gradient.storage_mut(), first, second, by);
    [gradient, moment_1, moment_2].map(Tensor::from_primitive::<Flex>)
}

/// Returns the same update in storage of its own, in one pass. The old parameter is still used, for example by
/// a stage that may undo the update.
fn apart<const D: usize>(tensors: [&CpuTensor; 4], by: Coefficients) -> [Tensor<D>; 3] {
    let shape = tensors[0].layout().shape().clone();
    let [parameter, gradient, first, second] = tensors.map(elements);
    let updated = step_apart(&parameter, &gradient, &first, &second, by);
    updated.map(|elements| Tensor::from_primitive::<Flex>(cpu_tensor(elements, shape.clone())))
}

/// Returns the same update, composed of Burn's operations.
fn composed<const D: usize>(tensors: [Tensor<D>; 4], by: Coefficients) -> [Tensor<D>; 3] {
    let Coefficients { betas: (beta_1, beta_2), step_size, second_correction, epsilon, keep } = by;
    let [parameter, gradient, moment_1, moment_2] = tensors;
    let moment_1 = moment_1 * beta_1 + gradient.clone() * (1.0 - beta_1);
    let moment_2 = moment_2 * beta_2 + gradient.square() * (1.0 - beta_2);
    let root = (moment_2.clone() * second_correction).sqrt() + epsilon;
    [parameter * keep - moment_1.clone() / root * step_size, moment_1, moment_2]
}

#[cfg(test)]
mod tests {
    use burn::optim::AdamWConfig;

    use super::*;

    /// Compares three steps with Burn's AdamW, which divides where this one multiplies by the inverse.
    #[test]
    fn equals_burns() {
        let device = Device::flex();
        let numbers = |seed: f32| {
            let values: Vec<f32> = (0..37).map(|i| (i as f32 * 0.37 + seed).sin()).collect();
            Tensor::<1>::from_floats(values.as_slice(), &device)
        };
        let ours = AdamW { betas: (0.9, 0.95), epsilon: 1e-8, weight_decay: 0.1 };
        let burns = AdamWConfig::new().with_beta_2(0.95).with_epsilon(1e-8).with_weight_decay(0.1).build();
        let (mut a, mut b, mut composition) = (numbers(0.0), numbers(0.0), numbers(0.0));
        let (mut state_a, mut state_b) = (None, None);
        let mut moments = [Tensor::zeros([37], &device), Tensor::zeros([37], &device)];
        for t in 1..=3 {
            let gradient = numbers(t as f32);
            let [first, second] = moments;
            let tensors = [composition, gradient.clone(), first, second];
            let [next, first, second] = composed(tensors, ours.at(t, 1e-2));
            (composition, moments) = (next, [first, second]);
            (a, state_a) = ours.step(1e-2, a, gradient.clone(), state_a);
            (b, state_b) = burns.step(1e-2, b, gradient, state_b);
            let expected = b.to_data();
            let tolerance = burn::tensor::Tolerance::<f32>::rel_abs(1e-5, 1e-6);
            a.to_data().assert_approx_eq::<f32>(&expected, tolerance);
            composition.to_data().assert_approx_eq::<f32>(&expected, tolerance);
        }
    }

    #[test]
    fn storage_that_someone_else_holds_stays_as_it_is() {
        let device = Device::flex();
        let parameter = Tensor::<1>::ones([4], &device);
        let (updated, _) = AdamW::default().step(0.1, parameter.clone(), Tensor::ones([4], &device), None);
        assert_eq!(parameter.clone().into_data().iter::<f32>().collect::<Vec<_>>(), [1.0; 4]);
        assert!(updated.clone().into_data().iter::<f32>().all(|x| x < 1.0));
        let ones = || Tensor::<1>::ones([4], &device);
        let (in_place, mut state) = AdamW::default().step(0.1, ones(), ones(), None);
        assert_eq!(in_place.to_data(), updated.into_data());
        // The first moments share their storage.
        let copy = Tensor::from_data(in_place.to_data(), &device);
        let (expected, _) = AdamW::default().step(0.1, copy, ones(), state.clone());
        let (apart, _) = AdamW::default().step(0.1, in_place.clone(), ones(), state.clone());
        let (over_gradient, _) = AdamW::default().step(0.1, in_place.clone(), ones(), state.take());
        assert_eq!([apart, over_gradient].map(Tensor::into_data), [(); 2].map(|()| expected.to_data()));
        assert_ne!(in_place.into_data(), expected.into_data(), "the old parameter stays");
    }
}
