//! Products and selections with deferred weight gradients, composed of Burn operations for devices that have
//! no operation of their own in [`pipewright_kernel`].
//!
//! On the tape, Burn computes the gradients of both factors of a product in one go. These operations compute
//! the gradient of the weight in `W`.

use std::sync::Arc;

use burn::module::ParamId;
use burn::tensor::{DType, IndexingUpdateOp, Int, Tensor};

use super::deferred::{Deferred, KeptWeight, RowIds, WeightTask};
use super::layout::Layout;
use super::remade::Remade;
use crate::autodiff::{Rule, inner_of, record};

/// Returns `x w` or `x wᵀ`, on the tape of both.
pub(super) fn product(
    x: Tensor<2>,
    weight: Tensor<2>,
    layout: Layout,
    id: ParamId,
    deferred: Option<Deferred>,
    remade: Option<Arc<Remade>>,
) -> Tensor<2> {
    let factor = |weight: Tensor<2>| match layout {
        Layout::Plain => weight,
        Layout::Transposed => weight.transpose(),
    };
    let Some(deferred) = deferred else { return x.matmul(factor(weight)) };
    let (x_value, weight_value) = (inner_of(x.clone()), inner_of(weight.clone()));
    let y = x_value.clone().matmul(factor(weight_value.clone()));
    let kept = KeptWeight::new(weight_value, id, Some(&deferred));
    let recorded = deferred.recorded(weight);
    let x_kept = match remade {
        Some(remade) => KeptInput::Remade(remade),
        None => KeptInput::Whole(Box::new(x_value)),
    };
    let rule = ProductRule { x: x_kept, weight: kept, layout, id, deferred };
    record([x, recorded], y, Arc::new(rule))
}

/// Returns rows `ids` of `table`, on its tape.
pub(super) fn select(
    table: Tensor<2>,
    ids: Tensor<1, Int>,
    id: ParamId,
    deferred: Option<Deferred>,
) -> Tensor<2> {
    let Some(deferred) = deferred else { return table.select(0, ids) };
    let rows = inner_of(table.clone()).select(0, ids.clone());
    let recorded = deferred.recorded(table);
    let rule = SelectRule { ids, id, deferred };
    record([recorded.clone(), recorded], rows, Arc::new(rule))
}

/// Returns a tensor in half precision in single precision, and any other tensor as it is: statistics, softmax
/// and losses of half precision are computed in single precision.
pub fn at_least_single<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    if is_half(tensor.dtype()) { tensor.cast(DType::F32) } else { tensor }
}

fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}

/// Adds the gradient of a product's weight to `sum`. The sum has at least single precision.
pub(crate) fn add_product(sum: Option<Tensor<2>>, x: Tensor<2>, gradient: Tensor<2>) -> Tensor<2> {
    let product = at_least_single(x.transpose().matmul(gradient));
    match sum {
        Some(sum) => sum + product,
        None => product,
    }
}

/// Adds row `i` of `gradient` to row `ids[i]` of `sum`, a table of `shape`. The sum has at least single
/// precision.
pub(crate) fn add_rows(
    sum: Option<Tensor<2>>,
    ids: Tensor<1, Int>,
    gradient: Tensor<2>,
    shape: [usize; 2],
) -> Tensor<2> {
    let gradient = at_least_single(gradient);
    let sum = sum.unwrap_or_else(|| Tensor::zeros(shape, (&gradient.device(), gradient.dtype())));
    sum.select_assign(0, ids, gradient, IndexingUpdateOp::Add)
}

/// The input of a product, for the gradient of the weight.
#[derive(Debug)]
enum KeptInput {
    Whole(Box<Tensor<2>>),
    Remade(Arc<Remade>),
}

impl KeptInput {
    fn get(&self) -> Tensor<2> {
        match self {
            Self::Whole(x) => Tensor::clone(x),
            Self::Remade(remade) => remade.get(),
        }
    }
}

#[derive(Debug)]
struct ProductRule {
    x: KeptInput,
    weight: KeptWeight,
    layout: Layout,
    id: ParamId,
    deferred: Deferred,
}

impl Rule for ProductRule {
    fn backward(&self, gradient: Tensor<2>, [for_x, for_weight]: [bool; 2]) -> [Option<Tensor<2>>; 2] {
        let Self { x, weight, layout, id, deferred } = self;
        let d_x = for_x.then(|| {
            let weight = weight.get();
            gradient.clone().matmul(match layout {
                Layout::Plain => weight.transpose(),
                Layout::Transposed => weight,
            })
        });
        if for_weight {
            let (weight, (x, gradient)) = (*id, layout.gradient_factors(x.get(), gradient));
            deferred.push(WeightTask::Product { weight, source: 0, x: Box::new(x), gradient });
        }
        [d_x, None]
    }
}

#[derive(Debug)]
struct SelectRule {
    ids: Tensor<1, Int>,
    id: ParamId,
    deferred: Deferred,
}

impl Rule for SelectRule {
    fn backward(&self, gradient: Tensor<2>, _wanted: [bool; 2]) -> [Option<Tensor<2>>; 2] {
        let ids = RowIds::Device(Box::new(self.ids.clone()));
        self.deferred.push(WeightTask::Rows { weight: self.id, ids, gradient });
        [None, None]
    }
}

/// Double precision takes this path on the processor too.
#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device, Gradients, TensorData, Tolerance};

    use super::super::check::numbers;
    use super::*;

    fn leaf(shape: [usize; 2], scale: f32) -> Tensor<2> {
        numbers(shape, scale).cast(DType::F64).autodiff().require_grad()
    }

    fn equal(found: Tensor<2>, expected: Tensor<2>) {
        found.into_data().assert_approx_eq::<f64>(&expected.into_data(), Tolerance::rel_abs(1e-12, 1e-12));
    }

    /// Runs `layer` with and without a collector. The results and the gradients of `x` must agree, and what
    /// waits in the collector must be the gradient of `weight`.
    fn check(
        x: Option<&Tensor<2>>,
        weight: &Tensor<2>,
        layer: impl Fn(Option<Deferred>, ParamId) -> Tensor<2>,
        finish: impl Fn(WeightTask) -> Tensor<2>,
    ) {
        let id = ParamId::new();
        let deferred = Deferred::new(Arc::new([id].into()));
        let (now, later) = (layer(None, id), layer(Some(deferred.clone()), id));
        equal(later.clone().inner(), now.clone().inner());
        let upstream = numbers(now.dims(), 1.0).cast(DType::F64).autodiff();
        let [expected, found] = [now, later].map(|y| (y * upstream.clone()).sum().backward());
        if let Some(x) = x {
            let gradient = |gradients: &Gradients| x.grad(gradients).expect("its gradient does not wait");
            equal(gradient(&found), gradient(&expected));
        }
        assert!(weight.grad(&found).is_none(), "it waits");
        let [task] = <[WeightTask; 1]>::try_from(deferred.take()).expect("one task");
        equal(finish(task), weight.grad(&expected).expect("it did not wait"));
    }

    fn finish_product(task: WeightTask) -> Tensor<2> {
        let WeightTask::Product { x, gradient, .. } = task else { panic!("{task:?}") };
        add_product(None, *x, gradient)
    }

    #[test]
    fn products_defer_the_weight() {
        let (x, w) = (leaf([5, 7], 1.0), leaf([7, 3], 2.0));
        let layer = |layout, w: Tensor<2>| {
            let x = x.clone();
            move |deferred, id| product(x.clone(), w.clone(), layout, id, deferred, None)
        };
        check(Some(&x), &w, layer(Layout::Plain, w.clone()), finish_product);
        let table = leaf([4, 7], 2.0);
        check(Some(&x), &table, layer(Layout::Transposed, table.clone()), finish_product);
        // The first layer of a model has an input without a gradient.
        let data = numbers([5, 7], 1.0).cast(DType::F64);
        let first =
            |deferred, id| product(data.clone().autodiff(), w.clone(), Layout::Plain, id, deferred, None);
        check(None, &w, first, finish_product);
    }

    #[test]
    fn a_selection_defers_the_table() {
        let table = leaf([4, 5], 1.0);
        let ids = || Tensor::<1, Int>::from_data(TensorData::new(vec![3i64, 0, 3], [3]), &Device::flex());
        check(
            None,
            &table,
            |deferred, id| select(table.clone(), ids(), id, deferred),
            |task| {
                let WeightTask::Rows { ids: RowIds::Device(ids), gradient, .. } = task else {
                    panic!("{task:?}")
                };
                add_rows(None, *ids, gradient, [4, 5])
            },
        );
    }

    #[test]
    fn gradients_are_added_to_the_sum() {
        let (x, gradient) = (numbers([2, 3], 1.0), numbers([2, 4], 1.0));
        let once = add_product(None, x.clone(), gradient.clone());
        let twice = add_product(Some(once.clone()), x, gradient);
        twice.into_data().assert_approx_eq::<f32>(&(once * 2.0).into_data(), Tolerance::rel_abs(1e-6, 1e-6));
    }
}
