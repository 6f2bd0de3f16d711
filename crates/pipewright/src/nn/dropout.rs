//! Dropout with the same mask for every cut of the model.

use burn::module::Module;
use burn::tensor::{Tensor, TensorData};

use crate::random::RandomStream;

/// Sets elements to zero with a probability and scales the others, so that the expected value stays the same
/// (Srivastava et al., 2014).
///
/// Burn's own `Dropout` draws from the device's generator, which all ranks of a process share; its masks
/// depend on the cut and on the order in which ranks run. This layer draws from a [`RandomStream`]; in a
/// stage, get it from
/// [`StageContext::random`](crate::stage::StageContext::random). In an evaluation it is the identity.
#[derive(Module, Debug)]
pub struct Dropout {
    probability: f64,
}

impl Dropout {
    /// Makes a layer that drops elements with this probability, which is clamped to `0.0..=1.0`.
    pub fn new(probability: f64) -> Self {
        Self { probability: probability.clamp(0.0, 1.0) }
    }

    /// Returns `input` with dropped elements; the shape stays.
    pub fn forward<const D: usize>(&self, input: Tensor<D>, mut stream: RandomStream) -> Tensor<D> {
        if !stream.is_training() || self.probability == 0.0 {
            return input;
        }
        let keep = 1.0 - self.probability;
        let scale = if keep > 0.0 { (1.0 / keep) as f32 } else { 0.0 };
        let shape = input.shape();
        let flags = stream.flags(shape.num_elements(), keep);
        let mask = flags.into_iter().map(|keeps| if keeps { scale } else { 0.0 }).collect();
        let mask: Tensor<D> = Tensor::from_data(TensorData::new(mask, shape), &input.device());
        let mask = mask.cast(input.dtype());
        input * mask
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::random::StreamKey;

    #[test]
    fn dropped_elements_are_zero_and_the_others_are_scaled() {
        let input = Tensor::<1>::ones([10_000], &Device::flex());
        let stream = RandomStream::new(StreamKey::default(), "dropout");
        let output = Dropout::new(0.2).forward(input.clone(), stream).into_data();
        let output: Vec<f32> = output.try_to_vec().expect("floats");
        let kept = output.iter().filter(|&&element| element == 1.25).count();
        let dropped = output.iter().filter(|&&element| element == 0.0).count();
        assert_eq!(kept + dropped, 10_000);
        assert!((7_800..8_200).contains(&kept), "{kept} elements are kept");
    }

    #[test]
    fn the_gradient_has_the_mask_of_the_output() {
        let input = Tensor::<1>::ones([100], &Device::flex().autodiff()).require_grad();
        let stream = RandomStream::new(StreamKey::default(), "dropout");
        let output = Dropout::new(0.5).forward(input.clone(), stream);
        let gradients = output.clone().sum().backward();
        let gradient = input.grad(&gradients).expect("a gradient");
        assert_eq!(gradient.into_data(), output.inner().into_data());
    }

    #[test]
    fn an_evaluation_drops_nothing() {
        let input = Tensor::<1>::ones([100], &Device::flex());
        let output = Dropout::new(0.5).forward(input.clone(), RandomStream::evaluation());
        assert_eq!(output.into_data(), input.into_data());
    }
}
