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
        let x = remade.map_or(KeptInput::Whole(x), KeptInput::Remade);
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
    x: KeptInput,
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
        let d_weight = match deferred {
            Some(deferred) => {
                if for_weight {
                    let (x, gradient) = layout.gradient_factors(from_cpu(x.get()), from_cpu(gradient));
                    deferred.push(WeightTask::Product { weight: id, source: 0, x: Box::new(x), gradient });
                }
                None
            }
            None => for_weight.then(|| {
                let x = x.get();
                let (x, g) = (Operand::new(&x, [rows, inputs]), Operand::new(&gradient, [rows, outputs]));
                let (a, b) = layout.gradient_factors(x, g);
                product(a.transposed(), b)
            }),
        };
        [d_x, d_weight]
    }
}
