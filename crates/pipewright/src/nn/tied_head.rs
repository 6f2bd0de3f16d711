//! `y = x Eᵀ`: the head of a model whose output weight is its embedding's table, with a weight gradient that
//! can be deferred.
//!
//! The head has a parameter of its own. The stages declare it and the table as
//! [shared](crate::stage::StageModule::shared_parameters): the pipeline sums their gradients and so keeps
//! them equal, and on one rank it lets them use one storage.

use burn::module::{Module, Param};
use burn::tensor::Tensor;

use super::layout::Layout;
use super::operation::takes_features;
use super::product::{as_rows, multiply};

/// A linear layer without bias whose weight has the layout of an [`Embedding`](super::Embedding)'s table.
///
/// ```
/// use burn::module::Param;
/// use burn::tensor::{Device, Tensor};
/// use pipewright::nn::TiedHead;
///
/// let device = Device::flex();
/// let head = TiedHead { weight: Param::from_tensor(Tensor::ones([256, 8], &device)) };
/// assert_eq!(head.forward(Tensor::<3>::ones([2, 3, 8], &device)).dims(), [2, 3, 256]);
/// ```
#[derive(Module, Debug)]
pub struct TiedHead {
    /// Shape `[vocabulary, width]`.
    pub weight: Param<Tensor<2>>,
}

impl TiedHead {
    /// Returns the logits `x Eᵀ`. Shapes: hidden states `x [.., width]`, result `[.., vocabulary]`.
    ///
    /// # Panics
    /// When the last dimension of `x` is not the width.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let table = self.weight.val();
        let [vocabulary, width] = table.dims();
        let mut shape = x.dims();
        takes_features("TiedHead", width, &shape);
        let rows = shape[..D - 1].iter().product::<usize>();
        shape[D - 1] = vocabulary;
        multiply(as_rows(x, [rows, width]), table, Layout::Transposed, self.weight.id).reshape(shape)
    }
}

#[cfg(test)]
mod tests {
    use burn::module::ParamId;
    use burn::tensor::Tolerance;

    use super::super::check::{check, numbers};
    use super::super::deferred::{Deferred, WeightTask};
    use super::*;

    const ROWS: usize = 5;
    const VOCABULARY: usize = 7;
    const WIDTH: usize = 3;

    #[test]
    fn equals_a_product_with_the_transposed_table() {
        let two = |[x, table]: [Tensor<1>; 2]| (x.reshape([ROWS, WIDTH]), table.reshape([VOCABULARY, WIDTH]));
        check(
            [numbers([ROWS * WIDTH], 1.0), numbers([VOCABULARY * WIDTH], 2.0)],
            |inputs| {
                let (x, table) = two(inputs);
                multiply(x, table, Layout::Transposed, ParamId::new())
            },
            |inputs| {
                let (x, table) = two(inputs);
                x.matmul(table.transpose())
            },
        );
    }

    #[test]
    fn the_gradient_that_waits_is_the_one_that_does_not() {
        let x = numbers([ROWS, WIDTH], 1.0).autodiff().require_grad();
        let table = numbers([VOCABULARY, WIDTH], 2.0).autodiff().require_grad();
        let upstream = numbers([ROWS, VOCABULARY], 1.0);
        let backward = |y: Tensor<2>| (y * upstream.clone().autodiff()).sum().backward();
        let expected =
            table.grad(&backward(multiply(x.clone(), table.clone(), Layout::Transposed, ParamId::new())));
        let expected = expected.expect("it does not wait outside a collector").into_data();

        let id = ParamId::new();
        let deferred = Deferred::new(std::sync::Arc::new([id].into()));
        let y = deferred.collect(|| multiply(x.clone(), table.clone(), Layout::Transposed, id));
        let gradients = backward(y);
        assert!(x.grad(&gradients).is_some());
        assert!(table.grad(&gradients).is_none());
        let tasks = deferred.take();
        let [WeightTask::Product { weight, x, gradient, .. }] = tasks.as_slice() else { panic!("{tasks:?}") };
        assert_eq!(*weight, id);
        // As the task is defined: `xᵀ gradient`, in the shape of the parameter.
        let found = x.as_ref().clone().transpose().matmul(gradient.clone());
        found.into_data().assert_approx_eq::<f32>(&expected, Tolerance::rel_abs(1e-6, 1e-6));
    }
}
