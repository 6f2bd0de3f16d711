//! Root-mean-square normalisation (Zhang and Sennrich, 2019).

use burn::module::{Module, Param};
use burn::tensor::Tensor;

/// `x / sqrt(mean(x²) + epsilon) * weight` over the last dimension.
///
/// Burn has this layer too; this one names its parameter `weight`, as checkpoints do, and multiplies by a reciprocal
/// instead of dividing.
#[derive(Module, Debug)]
pub(crate) struct RmsNorm {
    pub(crate) weight: Param<Tensor<1>>,
    #[module(skip)]
    pub(crate) epsilon: f64,
}

impl RmsNorm {
    /// Shapes: `[rows, width]` in and out.
    pub(crate) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let mean_square = (x.clone() * x.clone()).mean_dim(1);
        let scale = (mean_square + self.epsilon).sqrt().recip();
        x * scale * self.weight.val().unsqueeze()
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{check, numbers};
    use super::*;

    #[test]
    fn equals_its_definition() {
        let norm = RmsNorm { weight: Param::from_tensor(numbers([24], 1.0, 5)), epsilon: 1e-5 };
        let weight = norm.weight.val();
        check(
            [7, 24],
            3.0,
            |x| norm.forward(x),
            |x| {
                let root = (x.clone().powi_scalar(2).mean_dim(1) + 1e-5).sqrt();
                x / root * weight.clone().unsqueeze()
            },
        );
    }
}
