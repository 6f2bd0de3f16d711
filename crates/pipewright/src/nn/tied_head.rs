//! `y = x Eᵀ`: the head of a model whose output weight is its embedding's table, with a weight gradient that can be deferred.
//!
//! The head does not share the table's storage: it holds its own copy. The stages declare both copies as
//! [shared](crate::stage::StageModule::shared_parameters); the pipeline sums their gradients and so keeps them equal.

use burn::module::{Module, Param, ParamId};
use burn::tensor::Tensor;

use super::composed::{self, Layout};
use super::deferred::{Deferred, KeptWeight, WeightTask, recorded_on};
use super::operation::{CpuTensor, Operation, cpu_tensor, elements, from_cpu, on_cpu};
use pipewright_kernel::product::{Matrix, product};

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
    /// Shapes: hidden states `[.., width]` in, logits `[.., vocabulary]` out.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let table = self.weight.val();
        let [vocabulary, width] = table.dims();
        let mut shape = x.dims();
        let rows = shape[..D - 1].iter().product::<usize>();
        shape[D - 1] = vocabulary;
        multiply(x.reshape([rows, width]), table, self.weight.id).reshape(shape)
    }
}

/// `x Eᵀ`; shapes `[rows, width]`, `[vocabulary, width]`, result `[rows, vocabulary]`.
fn multiply(x: Tensor<2>, table: Tensor<2>, id: ParamId) -> Tensor<2> {
    let (rows, [vocabulary, width]) = (x.dims()[0], table.dims());
    let deferred = Deferred::current(&table, id);
    let operands = [x.clone().into_dispatch(), table.clone().into_dispatch()];
    let Some(([x, table], tape)) = on_cpu(operands) else {
        return composed::product(x, table, Layout::Transposed, id, deferred);
    };
    let y = {
        let table = Matrix::new(elements(&table), vocabulary, width);
        product(Matrix::new(elements(&x), rows, width), table.transposed())
    };
    let dims = [rows, vocabulary, width];
    let table = KeptWeight::new(from_cpu(table), id, deferred.as_ref());
    let tape = recorded_on(tape, 1, deferred.as_ref());
    tape.record(y, [rows, vocabulary], |_| HeadBackward { x, table, id, dims, deferred })
}

#[derive(Clone, Debug)]
struct HeadBackward {
    x: CpuTensor,
    table: KeptWeight,
    id: ParamId,
    /// Rows, vocabulary, width.
    dims: [usize; 3],
    deferred: Option<Deferred>,
}

impl Operation<2> for HeadBackward {
    fn backward(self, gradient: CpuTensor, [for_x, for_table]: [bool; 2]) -> [Option<CpuTensor>; 2] {
        let Self { x, table, id, dims: [rows, vocabulary, width], deferred } = self;
        let g = Matrix::new(elements(&gradient), rows, vocabulary);
        let d_x = for_x.then(|| {
            let table = table.get_on_cpu();
            let table = Matrix::new(elements(&table), vocabulary, width);
            cpu_tensor(product(g, table), [rows, width])
        });
        let d_table = match deferred {
            Some(deferred) => {
                if for_table {
                    // The table's gradient is `gradientᵀ x`: a linear layer's task with its two factors swapped.
                    let (x, gradient) = (Box::new(from_cpu(gradient)), from_cpu(x));
                    deferred.push(WeightTask::Product { weight: id, x, gradient });
                }
                None
            }
            None => for_table.then(|| {
                let x = Matrix::new(elements(&x), rows, width);
                cpu_tensor(product(g.transposed(), x), [vocabulary, width])
            }),
        };
        [d_x, d_table]
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Tolerance;

    use super::super::check::{check, numbers};
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
                multiply(x, table, ParamId::new())
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
        let expected = table.grad(&backward(multiply(x.clone(), table.clone(), ParamId::new())));
        let expected = expected.expect("it does not wait outside a collector").into_data();

        let id = ParamId::new();
        let deferred = Deferred::new(std::sync::Arc::new([id].into()));
        let y = deferred.collect(|| multiply(x.clone(), table.clone(), id));
        let gradients = backward(y);
        assert!(x.grad(&gradients).is_some());
        assert!(table.grad(&gradients).is_none());
        let tasks = deferred.take();
        let [WeightTask::Product { weight, x, gradient }] = tasks.as_slice() else { panic!("{tasks:?}") };
        assert_eq!(*weight, id);
        // As the task is defined: `xᵀ gradient`, in the shape of the parameter.
        let found = x.as_ref().clone().transpose().matmul(gradient.clone());
        found.into_data().assert_approx_eq::<f32>(&expected, Tolerance::rel_abs(1e-6, 1e-6));
    }
}
