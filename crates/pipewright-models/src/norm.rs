//! The normalisation of a decoder: by the root of the mean square, with factors that may be stored as their
//! difference from one, or a layer normalisation.

use burn::module::{Module, Param};
use burn::tensor::Tensor;
use pipewright::nn::{
    TensorParallel, at_least_single, centre_rows, inverse_root, rms_norm, row_sums, scale_rows,
};
use pipewright::tensor::Placement;

use crate::error::ModelError;
use crate::parameter::{Builder, ParameterKind};

/// The form of a model's normalisations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormForm {
    /// The number that is added to the mean square before the root is taken.
    pub epsilon: f64,
    /// Whether the weights are the factors less one, as in Gemma.
    pub adds_one: bool,
    /// Whether the mean of a row is subtracted first, and a bias added last: layer normalisation (Ba et al.,
    /// 2016, <https://arxiv.org/abs/1607.06450>).
    pub centres: bool,
}

impl NormForm {
    /// Returns the usual form, whose weights are the factors.
    pub fn usual(epsilon: f64) -> Self {
        Self { epsilon, adds_one: false, centres: false }
    }
}

/// A normalisation.
#[derive(Module, Debug)]
pub(crate) struct Norm {
    /// The factors, or the factors less one, `[width]`.
    weight: Param<Tensor<1>>,
    /// The summands of a layer normalisation, `[width]`.
    bias: Option<Param<Tensor<1>>>,
    #[module(skip)]
    form: NormForm,
    /// The whole rows, if this rank has a part of each.
    #[module(skip)]
    split: Option<SplitRows>,
}

/// The rows of a normalisation whose elements are split over ranks.
#[derive(Clone, Copy, Debug)]
struct SplitRows {
    /// The elements of a whole row.
    width: usize,
    /// The ranks that have the same elements.
    copies: u32,
}

impl Builder<'_> {
    /// Builds a normalisation of the hidden states of the tokens that a rank has.
    pub(crate) fn form_norm(&mut self, path: &str, width: usize, form: NormForm) -> Result<Norm, ModelError> {
        self.placed_norm(path, width, form, self.of_tokens())
    }

    /// Builds a normalisation of heads. Every rank normalises its own heads, and computes a part of the
    /// gradient.
    pub(crate) fn head_norm(&mut self, path: &str, width: usize, form: NormForm) -> Result<Norm, ModelError> {
        self.placed_norm(path, width, form, Placement::REPLICATED_PARTIAL)
    }

    /// Builds a normalisation of rows whose elements are split over the ranks in `shards` parts.
    pub(crate) fn split_norm(
        &mut self,
        path: &str,
        width: usize,
        form: NormForm,
        shards: u32,
    ) -> Result<Norm, ModelError> {
        let norm = self.placed_norm(path, width, form, Placement::split(0, shards))?;
        let copies = self.tensor_ranks() / shards.max(1);
        Ok(Norm { split: (self.tensor_ranks() > 1).then_some(SplitRows { width, copies }), ..norm })
    }

    fn placed_norm(
        &mut self,
        path: &str,
        width: usize,
        form: NormForm,
        placement: Placement,
    ) -> Result<Norm, ModelError> {
        // Factors begin as ones, so what is added to one begins as zeros.
        let kind = if form.adds_one { ParameterKind::Bias } else { ParameterKind::Scale };
        let weight = self.placed(path, "weight", [width], kind, placement)?;
        let bias = form.centres.then(|| self.placed(path, "bias", [width], ParameterKind::Bias, placement));
        Ok(Norm { weight, bias: bias.transpose()?, form, split: None })
    }
}

impl Norm {
    /// Returns the number of factors.
    pub(crate) fn width(&self) -> usize {
        self.weight.dims()[0]
    }

    /// Returns the normalised rows. Shapes: `[rows, width]` in and out.
    pub(crate) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        match &self.bias {
            Some(bias) => layer_norm(x, self.factors(), bias.val(), self.form.epsilon),
            None => rms_norm(x, self.factors(), self.form.epsilon),
        }
    }

    /// Returns this rank's elements of the normalised rows, which are split over the ranks of `tensor` if the
    /// norm was built so. Shapes: `[rows, width of the part]` in and out.
    pub(crate) fn forward_split(&self, x: Tensor<2>, tensor: &TensorParallel) -> Tensor<2> {
        let Some(SplitRows { width, copies }) = self.split else { return self.forward(x) };
        let (precision, x) = (x.dtype(), at_least_single(x));
        // Ranks with the same elements add a part of their squares each.
        let own = row_sums(x.clone().square()) / (width as f64 * f64::from(copies));
        // The elements of each rank depend on the mean square, so its gradient is the sum over the ranks.
        let mean = tensor.enter(tensor.sum(own));
        let factors = at_least_single(self.factors()).unsqueeze();
        (scale_rows(x, inverse_root(mean + self.form.epsilon)) * factors).cast(precision)
    }

    fn factors(&self) -> Tensor<1> {
        let weight = self.weight.val();
        // Half precision has no numbers next to 1 for small differences.
        if self.form.adds_one { at_least_single(weight) + 1.0 } else { weight }
    }
}

/// Returns `(x - mean) / sqrt(variance + epsilon) * factors + bias`, with the mean and the variance of a row.
fn layer_norm(x: Tensor<2>, factors: Tensor<1>, bias: Tensor<1>, epsilon: f64) -> Tensor<2> {
    let (precision, x) = (x.dtype(), at_least_single(x));
    let [factors, bias] = [factors, bias].map(|row| at_least_single(row).unsqueeze());
    let (width, centred) = (x.dims()[1], centre_rows(x));
    let variance = row_sums(centred.clone().square()) / width as f64;
    (scale_rows(centred, inverse_root(variance + epsilon)) * factors + bias).cast(precision)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device, TensorData};

    use super::*;

    #[test]
    fn small_differences_from_one_count_in_half_precision() {
        let device = Device::flex();
        let form = NormForm { epsilon: 0.0, adds_one: true, centres: false };
        let weight = Tensor::<1>::from_data(TensorData::from([-0.0015f32; 4]), &device).cast(DType::BF16);
        let norm = Norm { weight: Param::from_tensor(weight), bias: None, form, split: None };
        let x = Tensor::<2>::from_data(TensorData::from([[1.0f32, 1.0, 1.0, 3.0]]), &device);
        let y = norm.forward(x.cast(DType::BF16));
        assert_eq!(y.dtype(), DType::BF16);
        // 1.7320508 * 0.9985 is nearest to 221 / 128, and 1.7320508 itself to 222 / 128.
        assert_eq!(y.cast(DType::F32).into_data().iter::<f32>().last(), Some(221.0 / 128.0));
    }
}
