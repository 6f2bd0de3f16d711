//! A product with a weight, whose weight gradient can be deferred.

use std::sync::Arc;

use burn::module::ParamId;
use burn::tensor::Tensor;

use super::composed;
use super::deferred::{Deferred, KeptWeight, WeightTask, recorded_on};
use super::layout::Layout;
use super::matrix::{Operand, product};
use super::operation::{CpuTensor, Operation, cpu, from_cpu, on_cpu};
use super::remade::{Remade, remade};

/// Returns `x` as rows. Rows stay as they are: a reshape would be another node of the tape, which nothing has
/// noted ([`remade`]).
pub(super) fn as_rows<const D: usize>(x: Tensor<D>, shape: [usize; 2]) -> Tensor<2> {
    if D == 2 { Tensor::from_dispatch(x.into_dispatch()) } else { x.reshape(shape) }
}

/// Returns `a b`, without deferred gradients. On the processor, the product has the bits of [`Linear`](super::Linear)'s, which do not
/// depend on the instructions and caches of the processor, as the bits of Burn's product do.
pub fn matrix_product(a: Tensor<2>, b: Tensor<2>) -> Tensor<2> {
    multiply(a, b, Layout::Plain, ParamId::new())
}

/// Returns `a bᵀ`. See [`matrix_product`].
pub fn matrix_product_transposed(a: Tensor<2>, b: Tensor<2>) -> Tensor<2> {
    multiply(a, b, Layout::Transposed, ParamId::new())
}

/// Returns `x w` or `x wᵀ`. Shapes: `x [rows, inputs]`, result `[rows, outputs]`.
pub(super) fn multiply(x: Tensor<2>, weight: Tensor<2>, layout: Layout, id: ParamId) -> Tensor<2> {
    let ([rows, inputs], shape) = (x.dims(), weight.dims());
    let (deferred, remade) = (Deferred::current(&weight, id), remade(&x));
    // The gradient of a frozen weight is not computed.
    let is_trained = deferred.is_some() || weight.is_tracked();
    let operands = [x.clone().into_dispatch(), weight.clone().into_dispatch()];
    let Some(([x, weight], tape)) = on_cpu(operands) else {
        return composed::product(x, weight, layout, id, deferred, remade);
    };
    let outputs = layout.outputs(shape);
    let y = tape.rounded(product(Operand::new(&x, [rows, inputs]), layout.factor(&weight, shape)));
    let weight = KeptWeight::new(from_cpu(weight), id, deferred.as_ref());
    let tape = recorded_on(tape, 1, deferred.as_ref());
    let sizes = Sizes { rows, inputs, outputs, shape };
    tape.record_tensor(y, |_| {
        let x = is_trained.then(|| remade.map_or(KeptInput::Whole(x), KeptInput::Remade));
        ProductBackward { x, weight, layout, id, sizes, deferred }
    })
}

#[derive(Clone, Copy, Debug)]
struct Sizes {
    rows: usize,
    inputs: usize,
    outputs: usize,
    /// The shape of the weight.
    shape: [usize; 2],
}

/// The input of a product, for the gradient of the weight.
#[derive(Clone, Debug)]
pub(super) enum KeptInput {
    Whole(CpuTensor),
    Remade(Arc<Remade>),
}

impl KeptInput {
    pub(super) fn get(self) -> CpuTensor {
        match self {
            Self::Whole(x) => x,
            Self::Remade(remade) => cpu(remade.get()).expect("it is computed where it was"),
        }
    }
}

#[derive(Clone, Debug)]
struct ProductBackward {
    /// `None` if the weight is frozen.
    x: Option<KeptInput>,
    weight: KeptWeight,
    layout: Layout,
    id: ParamId,
    sizes: Sizes,
    deferred: Option<Deferred>,
}

impl Operation<2> for ProductBackward {
    fn backward(self, gradient: CpuTensor, [for_x, for_weight]: [bool; 2]) -> [Option<CpuTensor>; 2] {
        let Self { x, weight, layout, id, sizes, deferred } = self;
        let Sizes { rows, inputs, outputs, shape } = sizes;
        let d_x = for_x.then(|| {
            let weight = weight.get_on_cpu();
            let factor = layout.factor(&weight, shape);
            product(Operand::new(&gradient, [rows, outputs]), factor.transposed())
        });
        let x = x.filter(|_| for_weight).map(KeptInput::get);
        let d_weight = x.and_then(|x| match deferred {
            Some(deferred) => {
                let (x, gradient) = layout.gradient_factors(from_cpu(x), from_cpu(gradient));
                deferred.push(WeightTask::Product { weight: id, source: 0, x: Box::new(x), gradient });
                None
            }
            None => {
                let (x, g) = (Operand::new(&x, [rows, inputs]), Operand::new(&gradient, [rows, outputs]));
                let (a, b) = layout.gradient_factors(x, g);
                Some(product(a.transposed(), b))
            }
        });
        [d_x, d_weight]
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::numbers;
    use super::*;
    use crate::tensor::Value;

    #[test]
    fn the_tape_keeps_the_input_of_a_trained_weight_alone() {
        let is_kept = |is_trained| {
            let x = numbers::<2>([3, 4], 1.0).autodiff().require_grad() * 2.0;
            let weight = numbers::<2>([4, 5], 1.0).autodiff().set_require_grad(is_trained);
            let y = matrix_product(x.clone(), weight);
            let is_shared = Value::of(x.inner()).storage().expect("in memory").is_shared;
            y.sum().backward();
            is_shared
        };
        assert_eq!([is_kept(true), is_kept(false)], [true, false]);
    }
}
