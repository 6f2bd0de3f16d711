//! `y = x w + b`, with a weight gradient that can be deferred.
//!
//! `y = x Eᵀ`: the head of a model whose output weight is its embedding's table, with a weight gradient that
//! can be deferred.
//!
//! The head has a parameter of its own. The stages declare it and the table as
//! [shared](crate::stage::StageModule::shared_parameters): the pipeline sums their gradients and so keeps
//! them equal, and on one rank it lets them use one storage.

use burn::module::{Module, Param};
use burn::tensor::Tensor;

use super::matrix::Layout;
use super::operation::takes_features;
use super::parallel::TensorParallel;
use super::product::{as_rows, multiply};

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
        linear(x, &self.weight, self.bias.as_ref(), tensor)
    }
}

/// Returns what [`Linear::forward_split_inputs`] returns for a layer of these parameters, for a module that
/// has them among others.
///
/// # Panics
/// As [`Linear::forward_split_inputs`].
pub fn linear<const D: usize>(
    x: Tensor<D>,
    weight: &Param<Tensor<2>>,
    bias: Option<&Param<Tensor<1>>>,
    tensor: &TensorParallel,
) -> Tensor<D> {
    let (id, weight) = (weight.id, weight.val());
    let [inputs, outputs] = weight.dims();
    let mut shape = x.dims();
    takes_features("Linear", inputs, &shape);
    let rows = shape[..D - 1].iter().product::<usize>();
    shape[D - 1] = outputs;
    let mut y = tensor.sum(multiply(as_rows(x, [rows, inputs]), weight, Layout::Plain, id));
    if let Some(bias) = bias {
        y = y + bias.val().unsqueeze();
    }
    y.reshape(shape)
}

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
    use std::sync::Arc;

    use burn::module::ParamId;
    use burn::tensor::Tolerance;

    use super::super::check::{check, numbers};
    use super::super::deferred::{Deferred, WeightTask};
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
        let deferred = Deferred::new(Arc::new([id].into()));
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
