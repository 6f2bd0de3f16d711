//! Lion: the sign of a mean of gradients as the update, with one number of state for each element.

use burn::backend::Flex;
use burn::optim::{LearningRate, ModuleOptimizer, Optimizer, RecordState, StateSink, StateSource};
use burn::tensor::{Device, Tensor};
use pipewright_kernel::lion::{Coefficients, step};

use super::adamw::cpu;
use crate::nn::elements;

/// Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023). Its learning rate is the size of the
/// update of each element, so it is usually a third to a tenth of AdamW's, with a weight decay that is as much larger.
///
/// ```
/// use pipewright::optimizer::Lion;
///
/// let optimizer = Lion { weight_decay: 1.0, ..Lion::default() }.init();
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lion {
    /// The share of the momentum in the update, and in the next momentum.
    pub betas: (f32, f32),
    /// The decay rate: a step subtracts `learning rate x weight decay x parameter`.
    pub weight_decay: f32,
}

impl Default for Lion {
    /// The authors' values.
    fn default() -> Self {
        Self { betas: (0.9, 0.99), weight_decay: 0.0 }
    }
}

impl Lion {
    /// Returns the optimizer of a whole module.
    pub fn init(self) -> ModuleOptimizer {
        ModuleOptimizer::from(self)
    }
}

/// The momentum of a parameter, with the parameter's shape.
#[derive(Clone)]
pub struct LionMomentum<const D: usize>(Tensor<D>);

impl<const D: usize> RecordState for LionMomentum<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        out.push_tensor(prefix, "momentum", self.0.to_data());
    }

    fn state_unflatten(prefix: &str, from: &mut StateSource, _device: &Device) -> Option<Self> {
        let momentum = from.take_tensor(prefix, "momentum").filter(|data| data.shape().len() == D)?;
        // The next step moves it to the device of the parameter.
        Some(Self(Tensor::from_data(momentum, &Device::flex())))
    }
}

impl Optimizer for Lion {
    type State<const D: usize> = LionMomentum<D>;

    fn step<const D: usize>(
        &self,
        learning_rate: LearningRate,
        parameter: Tensor<D>,
        gradient: Tensor<D>,
        state: Option<LionMomentum<D>>,
    ) -> (Tensor<D>, Option<LionMomentum<D>>) {
        let momentum = state.map_or_else(|| gradient.zeros_like(), |LionMomentum(momentum)| momentum);
        let keep = (1.0 - learning_rate * f64::from(self.weight_decay)) as f32;
        let tensors = [parameter, gradient, momentum];
        let on_cpu = tensors.clone().map(cpu);
        let [parameter, momentum] = match on_cpu {
            [Some(mut parameter), Some(gradient), Some(mut momentum)] => {
                drop(tensors);
                let by = Coefficients { betas: self.betas, learning_rate: learning_rate as f32, keep };
                step(parameter.storage_mut(), &elements(&gradient), momentum.storage_mut(), by);
                [parameter, momentum].map(Tensor::from_primitive::<Flex>)
            }
            _ => {
                let [parameter, gradient, momentum] = tensors;
                let (beta_1, beta_2) = self.betas;
                let direction = momentum.clone() * beta_1 + gradient.clone() * (1.0 - beta_1);
                let momentum = momentum * beta_2 + gradient * (1.0 - beta_2);
                [parameter * keep - direction.sign() * learning_rate as f32, momentum]
            }
        };
        (parameter, Some(LionMomentum(momentum)))
    }

    fn to_device<const D: usize>(
        LionMomentum(momentum): LionMomentum<D>,
        device: &Device,
    ) -> LionMomentum<D> {
        LionMomentum(momentum.to_device(device))
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Tolerance;

    use super::*;

    #[test]
    fn steps_on_the_processor_equal_their_formula() {
        let device = Device::flex();
        let numbers = |seed: f32| -> Vec<f32> { (0..37).map(|i| (i as f32 * 0.37 + seed).sin()).collect() };
        let tensor = |values: &[f32]| Tensor::<1>::from_floats(values, &device);
        let lion = Lion { weight_decay: 0.1, ..Lion::default() };
        let (mut expected, mut momentum) = (numbers(0.0), vec![0.0f32; 37]);
        let (mut parameter, mut state) = (tensor(&expected), None);
        for t in 1..=3 {
            let gradient = numbers(t as f32);
            for ((p, m), g) in expected.iter_mut().zip(&mut momentum).zip(&gradient) {
                *p = *p * 0.999 - 0.01 * (0.9 * *m + 0.1 * g).signum();
                *m = 0.99 * *m + 0.01 * g;
            }
            // The parameter is also held by others in the second step.
            let held = (t == 2).then(|| parameter.clone());
            let before = held.as_ref().map(|held| held.to_data());
            (parameter, state) = lion.step(0.01, parameter, tensor(&gradient), state);
            assert_eq!(held.map(|held| held.to_data()), before);
        }
        let tolerance = Tolerance::<f32>::rel_abs(1e-5, 1e-6);
        parameter.to_data().assert_approx_eq::<f32>(&tensor(&expected).to_data(), tolerance);
    }
}
