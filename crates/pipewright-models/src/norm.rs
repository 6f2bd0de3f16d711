//! The root-mean-square normalisation of a decoder, whose factors may be stored as their difference from one.

use burn::module::{Module, Param};
use burn::tensor::Tensor;
use pipewright::nn::{at_least_single, rms_norm};
use pipewright::tensor::Placement;

use crate::parameter::{Builder, ParameterKind, ParameterSource};

/// The form of a model's normalisations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormForm {
    /// The number that is added to the mean square before the root is taken.
    pub epsilon: f64,
    /// Whether the weights are the factors less one, as in Gemma.
    pub adds_one: bool,
}

impl NormForm {
    /// Returns the usual form, whose weights are the factors.
    pub fn usual(epsilon: f64) -> Self {
        Self { epsilon, adds_one: false }
    }
}

/// A normalisation.
#[derive(Module, Debug)]
pub(crate) struct Norm {
    /// The factors, or the factors less one, `[width]`.
    weight: Param<Tensor<1>>,
    #[module(skip)]
    form: NormForm,
}

impl<S: ParameterSource> Builder<'_, S> {
    /// Builds a normalisation of rows that all ranks have.
    pub(crate) fn form_norm(&mut self, path: &str, width: usize, form: NormForm) -> Result<Norm, S::Error> {
        self.placed_norm(path, width, form, Placement::REPLICATED)
    }

    /// Builds a normalisation of heads. Every rank normalises its own heads, and computes a part of the
    /// gradient.
    pub(crate) fn head_norm(&mut self, path: &str, width: usize, form: NormForm) -> Result<Norm, S::Error> {
        self.placed_norm(path, width, form, Placement::REPLICATED_PARTIAL)
    }

    fn placed_norm(
        &mut self,
        path: &str,
        width: usize,
        form: NormForm,
        placement: Placement,
    ) -> Result<Norm, S::Error> {
        // Factors begin as ones, so what is added to one begins as zeros.
        let kind = if form.adds_one { ParameterKind::Bias } else { ParameterKind::Scale };
        Ok(Norm { weight: self.placed(path, "weight", [width], kind, placement)?, form })
    }
}

impl Norm {
    /// Returns the number of factors.
    pub(crate) fn width(&self) -> usize {
        self.weight.dims()[0]
    }

    /// Returns the normalised rows. Shapes: `[rows, width]` in and out.
    pub(crate) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let weight = self.weight.val();
        // Half precision has no numbers next to 1 for small differences.
        let factors = if self.form.adds_one { at_least_single(weight) + 1.0 } else { weight };
        rms_norm(x, factors, self.form.epsilon)
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device, TensorData};

    use super::*;

    #[test]
    fn small_differences_from_one_count_in_half_precision() {
        let device = Device::flex();
        let form = NormForm { epsilon: 0.0, adds_one: true };
        let weight = Tensor::<1>::from_data(TensorData::from([-0.0015f32; 4]), &device).cast(DType::BF16);
        let norm = Norm { weight: Param::from_tensor(weight), form };
        let x = Tensor::<2>::from_data(TensorData::from([[1.0f32, 1.0, 1.0, 3.0]]), &device);
        let y = norm.forward(x.cast(DType::BF16));
        assert_eq!(y.dtype(), DType::BF16);
        // 1.7320508 * 0.9985 is nearest to 221 / 128, and 1.7320508 itself to 222 / 128.
        assert_eq!(y.cast(DType::F32).into_data().iter::<f32>().last(), Some(221.0 / 128.0));
    }
}
