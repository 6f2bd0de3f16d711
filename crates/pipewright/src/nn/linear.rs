//! `y = x w + b`, with gradients of the weight and the bias that can be deferred.

use burn::module::{Module, Param};
use burn::tensor::Tensor;

use super::bias::add_bias;
use super::layout::Layout;
use super::operation::takes_features;
use super::parallel::TensorParallel;
use super::product::{as_rows, multiply};
use super::region::Region;

/// Burn's linear layer, with the same parameters and record paths. Convert one that Burn initialised.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
/// use pipewright::nn::Linear;
///
/// let device = Device::flex();
/// let linear = Linear::from(LinearConfig::new(8, 4).init(&device));
/// assert_eq!(linear.forward(Tensor::<3>::ones([2, 3, 8], &device)).dims(), [2, 3, 4]);
/// ```
#[derive(Module, Debug)]
pub struct Linear {
    /// Shape `[inputs, outputs]`.
    pub weight: Param<Tensor<2>>,
    /// Shape `[outputs]`.
    pub bias: Option<Param<Tensor<1>>>,
}

impl From<burn::nn::Linear> for Linear {
    fn from(linear: burn::nn::Linear) -> Self {
        Self { weight: linear.weight, bias: linear.bias }
    }
}

impl Linear {
    /// Returns `x w + b`. Shapes: `x [.., inputs]`, result `[.., outputs]`.
    ///
    /// # Panics
    /// When the last dimension of `x` is not the weight's inputs.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        // One rank holds all inputs.
        self.forward_split_inputs(x, &TensorParallel::default())
    }

    /// Returns `x w + b` for a layer whose inputs are split over the ranks of `tensor`: each rank has its
    /// part of the inputs and the rows of the weight for them, and all have the whole bias. The result is
    /// equal on all ranks.
    ///
    /// # Panics
    /// As [`Linear::forward`], and when a rank of the group fails.
    pub fn forward_split_inputs<const D: usize>(&self, x: Tensor<D>, tensor: &TensorParallel) -> Tensor<D> {
        self.forward_region(x, &Region::of_whole(tensor))
    }

    /// Like [`Linear::forward_split_inputs`], for the last layer of a region, which the result leaves. If the ranks
    /// have shares of the tokens outside of it, the result is the rank's share, and the gradient of the bias is a
    /// part of it. Shapes: `x [.., tokens inside, inputs]`, result `[.., tokens outside, outputs]`.
    ///
    /// # Panics
    /// As [`Region::leave`].
    pub fn forward_region<const D: usize>(&self, x: Tensor<D>, region: &Region<'_>) -> Tensor<D> {
        linear(x, &self.weight, self.bias.as_ref(), region)
    }
}

/// Returns what [`Linear::forward_region`] returns for a layer of these parameters, for a module that has them
/// among others.
///
/// # Panics
/// As [`Linear::forward_region`].
pub fn linear<const D: usize>(
    x: Tensor<D>,
    weight: &Param<Tensor<2>>,
    bias: Option<&Param<Tensor<1>>>,
    region: &Region<'_>,
) -> Tensor<D> {
    let (id, weight) = (weight.id, weight.val());
    let sizes = weight.dims();
    linear_of(x, sizes, bias, region, |x| multiply(x, weight, Layout::Plain, id))
}

/// Returns the result of a linear layer of `inputs` and `outputs` whose product `multiply` computes from rows.
pub(super) fn linear_of<const D: usize>(
    x: Tensor<D>,
    [inputs, outputs]: [usize; 2],
    bias: Option<&Param<Tensor<1>>>,
    region: &Region<'_>,
    multiply: impl FnOnce(Tensor<2>) -> Tensor<2>,
) -> Tensor<D> {
    let mut shape = x.dims();
    takes_features("Linear", inputs, &shape);
    let rows = shape[..D - 1].iter().product::<usize>();
    shape[D - 1] = outputs;
    let mut y = region.leave(multiply(as_rows(x, [rows, inputs])));
    if let Some(bias) = bias {
        y = add_bias(y, bias);
    }
    // The rank may have a share of the tokens.
    if rows > 0
        && let Some(tokens) = D.checked_sub(2).and_then(|dimension| shape.get_mut(dimension))
    {
        *tokens = *tokens * y.dims()[0] / rows;
    }
    y.reshape(shape)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use burn::module::ParamId;

    use super::super::check::{check, numbers};
    use super::super::deferred::Deferred;
    use super::*;

    #[test]
    fn equals_a_product() {
        let two = |[x, w]: [Tensor<1>; 2]| (x.reshape([5, 7]), w.reshape([7, 3]));
        check(
            [numbers([35], 1.0), numbers([21], 2.0)],
            |inputs| {
                let (x, w) = two(inputs);
                multiply(x, w, Layout::Plain, ParamId::new())
            },
            |inputs| {
                let (x, w) = two(inputs);
                x.matmul(w)
            },
        );
    }

    #[test]
    fn inside_a_collector_the_weight_gradient_waits() {
        let x = numbers([5, 7], 1.0).autodiff().require_grad();
        let w = numbers([7, 3], 1.0).autodiff().require_grad();
        let id = ParamId::new();
        let deferred = Deferred::new(Arc::new([id].into()));
        let y = deferred.collect(|| multiply(x.clone(), w.clone(), Layout::Plain, id));
        assert!(deferred.take().is_empty());
        let gradients = y.sum().backward();
        assert!(x.grad(&gradients).is_some());
        assert!(w.grad(&gradients).is_none());
        assert_eq!(deferred.take().len(), 1);
    }

    #[test]
    fn a_weight_that_is_computed_gets_its_gradient_on_the_tape() {
        let id = ParamId::new();
        let base = numbers([7, 3], 1.0).autodiff().require_grad();
        let deferred = Deferred::new(Arc::new([id].into()));
        let y = deferred
            .collect(|| multiply(numbers([5, 7], 1.0).autodiff(), base.clone() * 2.0, Layout::Plain, id));
        let gradients = y.sum().backward();
        assert!(base.grad(&gradients).is_some());
        assert!(deferred.take().is_empty());
    }
}
