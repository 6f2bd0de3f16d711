//! `y = x w + b`, with a weight gradient that can be deferred.

use burn::module::{Module, Param, ParamId};
use burn::tensor::Tensor;

use super::composed::{self, Layout};
use super::deferred::{Deferred, KeptWeight, WeightTask, recorded_on};
use super::operation::{CpuTensor, Operation, cpu_tensor, elements, from_cpu, on_cpu};
use pipewright_kernel::product::{Matrix, product};

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
    /// Shapes: `[.., inputs]` in, `[.., outputs]` out.
    ///
    /// # Panics
    /// When the last dimension of `x` is not the weight's inputs.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let weight = self.weight.val();
        let [inputs, outputs] = weight.dims();
        let mut shape = x.dims();
        let rows = shape[..D - 1].iter().product::<usize>();
        shape[D - 1] = outputs;
        let mut y = multiply(x.reshape([rows, inputs]), weight, self.weight.id);
        if let Some(bias) = &self.bias {
            y = y + bias.val().unsqueeze();
        }
        y.reshape(shape)
    }
}

/// `x w`; shapes `[rows, inputs]`, `[inputs, outputs]`, result `[rows, outputs]`.
fn multiply(x: Tensor<2>, weight: Tensor<2>, id: ParamId) -> Tensor<2> {
    let (rows, [inputs, outputs]) = (x.dims()[0], weight.dims());
    let deferred = Deferred::current(&weight, id);
    let operands = [x.clone().into_dispatch(), weight.clone().into_dispatch()];
    let Some(([x, weight], tape)) = on_cpu(operands) else {
        return composed::product(x, weight, Layout::Plain, id, deferred);
    };
    let y = product(Matrix::new(elements(&x), rows, inputs), Matrix::new(elements(&weight), inputs, outputs));
    let dims = [rows, inputs, outputs];
    let weight = KeptWeight::new(from_cpu(weight), id, deferred.as_ref());
    let tape = recorded_on(tape, 1, deferred.as_ref());
    tape.record(y, [rows, outputs], |_| LinearBackward { x, weight, id, dims, deferred })
}

#[derive(Clone, Debug)]
struct LinearBackward {
    x: CpuTensor,
    weight: KeptWeight,
    id: ParamId,
    /// Rows, inputs, outputs.
    dims: [usize; 3],
    deferred: Option<Deferred>,
}

impl Operation<2> for LinearBackward {
    fn backward(self, gradient: CpuTensor, [for_x, for_weight]: [bool; 2]) -> [Option<CpuTensor>; 2] {
        let Self { x, weight, id, dims: [rows, inputs, outputs], deferred } = self;
        let g = Matrix::new(elements(&gradient), rows, outputs);
        let d_x = for_x.then(|| {
            let weight = weight.get_on_cpu();
            let weight = Matrix::new(elements(&weight), inputs, outputs);
            cpu_tensor(product(g, weight.transposed()), [rows, inputs])
        });
        let d_weight = match deferred {
            Some(deferred) => {
                if for_weight {
                    let (x, gradient) = (Box::new(from_cpu(x)), from_cpu(gradient));
                    deferred.push(WeightTask::Product { weight: id, x, gradient });
                }
                None
            }
            None => for_weight.then(|| {
                let x = Matrix::new(elements(&x), rows, inputs);
                cpu_tensor(product(x.transposed(), g), [inputs, outputs])
            }),
        };
        [d_x, d_weight]
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::check::{check, numbers};
    use super::*;

    #[test]
    fn equals_a_product() {
        let two = |[x, w]: [Tensor<1>; 2]| (x.reshape([5, 7]), w.reshape([7, 3]));
        check(
            [numbers([35], 1.0), numbers([21], 2.0)],
            |inputs| {
                let (x, w) = two(inputs);
                multiply(x, w, ParamId::new())
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
        let y = deferred.collect(|| multiply(x.clone(), w.clone(), id));
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
        let y = deferred.collect(|| multiply(numbers([5, 7], 1.0).autodiff(), base.clone() * 2.0, id));
        let gradients = y.sum().backward();
        assert!(base.grad(&gradients).is_some());
        assert!(deferred.take().is_empty());
    }
}
