//! A product with a frozen weight and its low-rank adapter, as one operation: `y = x w + scale * x a b`.
//!
//! If products were composed, an adapter's output and its part of the gradient of `x` would be whole tensors,
//! written, read and added. Here the adapter's part is added to the sums of the product before they are rounded:
//!
//! ```text
//! forward   low = scale * x a        y   = x w  + low b
//! backward  back = scale * g bᵀ      d x = g wᵀ + back aᵀ
//!           d a = xᵀ back            d b = lowᵀ g
//! ```
//!
//! `low` and `back` have as many columns as the adapter's rank, and single precision, as have `a` and `b`. In
//! bfloat16, `x`, `w` and `g` are read as they are.

use std::borrow::Cow;

use burn::module::{Param, ParamId};
use burn::tensor::{DType, Device, Tensor, bf16};
use pipewright_kernel::bf16_product::product_with_update;
use pipewright_kernel::narrow_product::{self, AnyMatrix};
use pipewright_kernel::product::{self, Matrix};

use super::deferred::{Deferred, KeptWeight, LowRankTask, WeightTask, recorded_on};
use super::held_matrix::{HeldForm, HeldMatrix};
use super::operation::{
    CpuTensor, Operation, cpu_tensor, elements, from_cpu, in_bf16, on_cpu, takes_features, tensor_of,
};
use super::product::KeptInput;
use super::quantised_product::QuantisedWeight;
use super::remade::remade;

/// An adapter of a product.
#[derive(Clone, Copy, Debug)]
pub struct LowRank<'a> {
    /// The first matrix, `[inputs, rank]`.
    pub first: &'a Param<Tensor<2>>,
    /// The second matrix, `[rank, outputs]`.
    pub second: &'a Param<Tensor<2>>,
    /// The factor of the adapter's output.
    pub scale: f64,
}

/// Returns `x w + scale * x a b` as a single operation, for `x [rows, inputs]` and a frozen weight `[inputs,
/// outputs]`. Returns `None` if it must be composed: on devices other than the CPU back end, on a tape with
/// gradient checkpointing, and for a weight that is trained.
///
/// # Panics
/// When the shapes do not fit together.
pub fn adapted_product(x: &Tensor<2>, weight: &HeldMatrix, adapter: LowRank<'_>) -> Option<Tensor<2>> {
    adapted_product_in(x, weight.form(), adapter)
}

/// Like [`adapted_product`], for a weight in this form.
pub(super) fn adapted_product_in(
    x: &Tensor<2>,
    weight: HeldForm<'_>,
    adapter: LowRank<'_>,
) -> Option<Tensor<2>> {
    let ids = [adapter.first.id, adapter.second.id];
    let [a, b] = [adapter.first, adapter.second].map(Param::val);
    let [inputs, outputs] = weight.dims();
    let sizes = Sizes { rows: x.dims()[0], inputs, outputs, rank: a.dims()[1] };
    let Sizes { rows, inputs, outputs, rank } = sizes;
    takes_features("adapted_product", inputs, &x.dims());
    let shapes = [a.dims(), b.dims()];
    let expected = [[inputs, rank], [rank, outputs]];
    assert!(shapes == expected, "adapted_product takes matrices of the shapes {expected:?}, got {shapes:?}");
    if [&a, &b].iter().any(|matrix| matrix.dtype() != DType::F32) {
        return None;
    }
    let (w, quantised) = match weight {
        HeldForm::Parameter(parameter) => {
            let w = parameter.val();
            let is_trained = w.is_tracked() || Deferred::current(&w, parameter.id).is_some();
            if is_trained || w.dtype() != x.dtype() {
                return None;
            }
            (w, None)
        }
        // The operation has as many inputs as for a parameter.
        HeldForm::Frozen(held) => (Tensor::zeros([0, 0], (&Device::flex(), x.dtype())), Some(held.clone())),
    };
    let deferred = [Deferred::current(&a, ids[0]), Deferred::current(&b, ids[1])];
    let remade = remade(x);
    let ([x, w, a, b], tape) = on_cpu([x.clone(), w, a, b].map(Tensor::into_dispatch))?;
    let scale = adapter.scale as f32;
    let w = match quantised {
        Some(held) => {
            Weight::Quantised(QuantisedWeight::new(held, x.dtype()).without_tape(!tape.is_recorded()))
        }
        None => Weight::Held(w),
    };
    let low = scaled_product(&x, &elements(&a), [rows, inputs, rank], scale);
    let operands = Operands { left: &x, weight: &w, sizes, is_turned: false };
    let y = tape.rounded(updated_product(operands, [&low, &elements(&b)]));
    let tape = recorded_on(tape, 2, deferred[0].as_ref());
    let tape = recorded_on(tape, 3, deferred[1].as_ref());
    Some(tape.record_tensor(y, |_| {
        let x = remade.map_or(KeptInput::Whole(x), KeptInput::Remade);
        let [first, second] = [(a, 0), (b, 1)]
            .map(|(matrix, index)| KeptWeight::new(from_cpu(matrix), ids[index], deferred[index].as_ref()));
        let low = cpu_tensor(low, [rows, rank]);
        AdaptedBackward { x, weight: w, low, first, second, ids, scale, sizes, deferred }
    }))
}

#[derive(Clone, Copy, Debug)]
struct Sizes {
    rows: usize,
    inputs: usize,
    outputs: usize,
    rank: usize,
}

#[derive(Clone, Debug)]
struct AdaptedBackward {
    x: KeptInput,
    weight: Weight,
    /// `scale * x a`.
    low: CpuTensor,
    first: KeptWeight,
    second: KeptWeight,
    /// The adapter's matrices.
    ids: [ParamId; 2],
    scale: f32,
    sizes: Sizes,
    deferred: [Option<Deferred>; 2],
}

impl Operation<4> for AdaptedBackward {
    fn backward(
        self,
        gradient: CpuTensor,
        [for_x, _, for_first, for_second]: [bool; 4],
    ) -> [Option<CpuTensor>; 4] {
        let Sizes { rows, inputs, outputs, rank } = self.sizes;
        let back = (for_x || for_first).then(|| {
            let second = self.second.get_on_cpu();
            let second = turned(&elements(&second), [rank, outputs]);
            scaled_product(&gradient, &second, [rows, outputs, rank], self.scale)
        });
        let d_x = back.as_ref().filter(|_| for_x).map(|back| {
            let first = self.first.get_on_cpu();
            let first = turned(&elements(&first), [inputs, rank]);
            let (weight, sizes) = (&self.weight, self.sizes);
            let operands = Operands { left: &gradient, weight, sizes, is_turned: true };
            updated_product(operands, [back, &first])
        });
        let [of_first, of_second] = self.deferred;
        let gradient_of = |task: LowRankTask, shape: [usize; 2], deferred: Option<Deferred>| {
            let Some(deferred) = deferred else {
                let mut sum = vec![0.0; shape[0] * shape[1]];
                task.add_to(&mut sum, shape);
                return Some(cpu_tensor(sum, shape));
            };
            deferred.push(WeightTask::LowRank(task));
            None
        };
        let d_second = for_second.then(|| {
            let task = LowRankTask { weight: self.ids[1], x: self.low, gradient };
            gradient_of(task, [rank, outputs], of_second)
        });
        let d_first = back.filter(|_| for_first).map(|back| {
            let gradient = cpu_tensor(back, [rows, rank]);
            let task = LowRankTask { weight: self.ids[0], x: self.x.get(), gradient };
            gradient_of(task, [inputs, rank], of_first)
        });
        [d_x, None, d_first.flatten(), d_second.flatten()]
    }
}

impl LowRankTask {
    /// Adds the gradient to `sum`, of the shape `[inputs, outputs]` of the matrix.
    pub(crate) fn add_to(&self, sum: &mut [f32], [inputs, outputs]: [usize; 2]) {
        let rows = self.gradient.layout().num_elements() / outputs.max(1);
        let (x, gradient) = (Elements::of(&self.x), Elements::of(&self.gradient));
        let left = x.matrix([rows, inputs]).transposed();
        narrow_product::add_product(sum, outputs, left, gradient.matrix([rows, outputs]));
    }
}

/// The frozen weight.
#[derive(Clone, Debug)]
enum Weight {
    Held(CpuTensor),
    Quantised(QuantisedWeight),
}

/// The operands of a product with the weight, or with its transpose.
struct Operands<'a> {
    left: &'a CpuTensor,
    weight: &'a Weight,
    sizes: Sizes,
    is_turned: bool,
}

/// Returns the product, to which `[rows, rank]` times `[rank, columns]` is added.
fn updated_product(operands: Operands<'_>, [low, matrix]: [&[f32]; 2]) -> CpuTensor {
    let Operands { left, weight, sizes: Sizes { rows, inputs, outputs, rank }, is_turned } = operands;
    let [inner, columns] = if is_turned { [outputs, inputs] } else { [inputs, outputs] };
    let weight = match weight {
        Weight::Held(weight) => weight,
        Weight::Quantised(weight) => return weight.updated_product(left, is_turned, [low, matrix], rank),
    };
    if let Some([left, weight]) = in_bf16([left, weight]) {
        let weight = Matrix::new(weight, inputs, outputs);
        let weight = if is_turned { weight.transposed() } else { weight };
        let left = Matrix::new(left, rows, inner);
        return tensor_of(product_with_update(left, weight, [low, matrix], rank), [rows, columns]);
    }
    let (left, weight) = (elements(left), elements(weight));
    let weight = Matrix::new(&weight, inputs, outputs);
    let weight = if is_turned { weight.transposed() } else { weight };
    let mut out = product::product(Matrix::new(&left, rows, inner), weight);
    let [low, matrix] = [Matrix::new(low, rows, rank), Matrix::new(matrix, rank, columns)];
    narrow_product::add_product(&mut out, columns, AnyMatrix::Single(low), AnyMatrix::Single(matrix));
    cpu_tensor(out, [rows, columns])
}

/// Returns `scale * x m`, for `x [rows, inner]` and `m [inner, rank]`, in row-major order.
fn scaled_product(x: &CpuTensor, m: &[f32], [rows, inner, rank]: [usize; 3], scale: f32) -> Vec<f32> {
    let m = AnyMatrix::Single(Matrix::new(m, inner, rank));
    let mut low = narrow_product::product(Elements::of(x).matrix([rows, inner]), m);
    low.iter_mut().for_each(|element| *element *= scale);
    low
}

/// Returns the transpose of a matrix of `rows` and `columns`.
fn turned(elements: &[f32], [rows, columns]: [usize; 2]) -> Vec<f32> {
    let mut turned = Vec::with_capacity(elements.len());
    for column in 0..columns {
        turned.extend((0..rows).map(|row| elements[row * columns + column]));
    }
    turned
}

/// The elements of a tensor as products read them.
enum Elements<'a> {
    Single(Cow<'a, [f32]>),
    Half(&'a [bf16]),
}

impl<'a> Elements<'a> {
    fn of(tensor: &'a CpuTensor) -> Self {
        match in_bf16([tensor]) {
            Some([elements]) => Self::Half(elements),
            None => Self::Single(elements(tensor)),
        }
    }

    fn matrix(&self, [rows, columns]: [usize; 2]) -> AnyMatrix<'_> {
        match self {
            Self::Single(elements) => AnyMatrix::Single(Matrix::new(elements, rows, columns)),
            Self::Half(elements) => AnyMatrix::Half(Matrix::new(elements, rows, columns)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use burn::tensor::TensorData;
    use pipewright_kernel::bf16_product::testing::run_without_instruction;
    use pipewright_kernel::quantised::{Codebook, Form, QuantisedMatrix, Scales};
    use pipewright_schedule::recompute::{LayerPart, LayerParts};

    use super::super::check::numbers;
    use super::super::held_matrix::held_linear;
    use super::super::operation::rounded_to;
    use super::super::parallel::TensorParallel;
    use super::super::region::Region;
    use super::super::remade::{note, with_parts};
    use super::*;

    /// The result of a product, and the gradients of `x` and of both matrices.
    type Outcome = [Vec<f32>; 4];

    /// Runs the operation, or the composition in single precision. The sizes are rows, inputs, outputs and the
    /// rank.
    fn run(dtype: DType, [rows, inputs, outputs, rank]: [usize; 4], is_composed: bool) -> Outcome {
        let rounded = |shape, scale| numbers::<2>(shape, scale).cast(dtype);
        let leaf = |tensor: Tensor<2>| tensor.autodiff().require_grad();
        let (x, w) = (rounded([rows, inputs], 1.0), rounded([inputs, outputs], 0.3));
        let (a, b) = (leaf(numbers([inputs, rank], 1.0)), leaf(numbers([rank, outputs], 0.7)));
        let single = |tensor: Tensor<2>| tensor.cast(DType::F32);
        let (x, y) = if is_composed {
            let x = leaf(single(x));
            let adapted = x.clone().matmul(a.clone()).matmul(b.clone()) * 0.5;
            (x.clone(), x.matmul(single(w).autodiff()) + adapted)
        } else {
            let x = leaf(x);
            let [first, second] = [&a, &b].map(|matrix| parameter(matrix.clone()));
            let adapter = LowRank { first: &first, second: &second, scale: 0.5 };
            let y = adapted_product(&x, &held(w.autodiff()), adapter).expect("the CPU back end");
            assert_eq!(y.dtype(), dtype);
            (x, single(y))
        };
        let upstream = single(rounded([rows, outputs], 1.0)).autodiff();
        let gradients = (y.clone() * upstream).sum().backward();
        let of = |leaf: &Tensor<2>| vec_of(leaf.grad(&gradients).expect("a leaf"));
        [vec_of(y.inner()), of(&x), of(&a), of(&b)]
    }

    fn parameter(tensor: Tensor<2>) -> Param<Tensor<2>> {
        Param::initialized(ParamId::new(), tensor)
    }

    fn held(tensor: Tensor<2>) -> HeldMatrix {
        HeldMatrix::from(parameter(tensor))
    }

    fn vec_of(tensor: Tensor<2>) -> Vec<f32> {
        tensor.into_data().convert_dtype(DType::F32).iter().collect()
    }

    /// Checks that the error is small compared with the largest element.
    fn check(dtype: DType, sizes: [usize; 4], tolerance: f32) {
        for (found, expected) in run(dtype, sizes, false).iter().zip(&run(dtype, sizes, true)) {
            let largest = expected.iter().fold(0f32, |largest, x| largest.max(x.abs()));
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.iter().zip(expected) {
                let is_near = (found - expected).abs() <= tolerance * largest;
                assert!(is_near, "{dtype:?} {sizes:?}: {found} {expected}");
            }
        }
    }

    #[test]
    fn equals_the_sum_of_its_products() {
        for sizes in [[37, 40, 50, 5], [1, 3, 1, 1], [40, 33, 65, 130]] {
            check(DType::F32, sizes, 2e-6);
            check(DType::BF16, sizes, 4e-3);
            check(DType::F16, sizes, 1e-3);
        }
    }

    /// Runs the operation, and a product without an adapter, with a quantised weight or its decoded elements.
    fn with_quantised(dtype: DType, is_quantised: bool) -> Vec<Vec<f32>> {
        let [rows, inputs, outputs, rank] = [37, 48, 50, 5];
        let matrix = sample([outputs, inputs]);
        let decoded = TensorData::new(matrix.decoded(), [outputs, inputs]);
        let decoded = Tensor::<2>::from_data(decoded, &Device::flex()).transpose();
        let weight = if is_quantised {
            HeldMatrix::quantised(Arc::new(matrix))
        } else {
            HeldMatrix::from(parameter(rounded_to(decoded, dtype).autodiff()).set_require_grad(false))
        };
        let leaf = |tensor: Tensor<2>| tensor.autodiff().require_grad();
        let (a, b) = (leaf(numbers([inputs, rank], 1.0)), leaf(numbers([rank, outputs], 0.7)));
        let x = leaf(numbers::<2>([rows, inputs], 1.0).cast(dtype));
        let [first, second] = [&a, &b].map(|matrix| parameter(matrix.clone()));
        let adapter = LowRank { first: &first, second: &second, scale: 0.5 };
        let adapted = adapted_product(&x, &weight, adapter).expect("the CPU back end");
        let tensor = TensorParallel::default();
        let plain = held_linear(x.clone(), &weight, None, &Region::of_whole(&tensor));
        let upstream = numbers::<2>([rows, outputs], 1.0).cast(dtype).autodiff();
        let gradients = ((adapted.clone() + plain.clone() * 0.5) * upstream).sum().backward();
        let of = |leaf: &Tensor<2>| vec_of(leaf.grad(&gradients).expect("a leaf"));
        vec![vec_of(adapted.inner()), vec_of(plain.inner()), of(&x), of(&a), of(&b)]
    }

    /// Returns a matrix of four bits in blocks of 16.
    fn sample([rows, columns]: [usize; 2]) -> QuantisedMatrix {
        let codes = (0..rows * columns / 2).map(|index| (index * 37 % 251) as u8).collect();
        let table = std::array::from_fn(|index| index as f32 / 7.3 - 1.0);
        let scales = (0..rows * columns / 16).map(|index| (index % 13) as f32 / 9.7).collect();
        let codebook = Codebook::new([rows, columns], codes, table, Scales::Single(scales), 16);
        QuantisedMatrix::new(rows, Form::Codebook(codebook.expect("a matrix")))
    }

    #[test]
    fn quantised_weights_have_the_bits_of_their_decoded_elements() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            assert_eq!(with_quantised(dtype, true), with_quantised(dtype, false), "{dtype:?}");
        }
    }

    #[test]
    fn without_rows_the_gradients_of_both_matrices_are_zero() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let expected = [vec![], vec![], vec![0.0; 4 * 2], vec![0.0; 2 * 5]];
            assert_eq!(run(dtype, [0, 4, 5, 2], false), expected, "{dtype:?}");
        }
    }

    /// On a processor that has the instructions of both kinds of products.
    #[test]
    fn all_without_the_instruction() {
        run_without_instruction("nn::adapted_product");
    }

    #[test]
    fn products_that_share_an_input_compute_it_again_once() {
        let calls = Arc::new(AtomicUsize::new(0));
        let [a, b] = [numbers([6, 3], 1.0), numbers([3, 8], 1.0)].map(|x| x.autodiff().require_grad());
        let [first, second] = [&a, &b].map(|matrix| parameter(matrix.clone()));
        let weight = held(numbers([6, 8], 1.0).cast(DType::BF16).autodiff());
        let adapter = LowRank { first: &first, second: &second, scale: 2.0 };
        let gradients = |parts| {
            let x = numbers([5, 6], 1.0).cast(DType::BF16).autodiff().require_grad() * 2.0;
            let y = with_parts(parts, || {
                note(LayerPart::Norms, &x, || {
                    let (calls, kept) = (calls.clone(), x.clone().inner());
                    move || {
                        calls.fetch_add(1, Ordering::Relaxed);
                        kept.clone()
                    }
                });
                let product = || adapted_product(&x, &weight, adapter).expect("the CPU back end");
                product() + product()
            });
            let gradients = y.sum().backward();
            [&a, &b].map(|matrix| vec_of(matrix.grad(&gradients).expect("a leaf")))
        };
        let expected = gradients(LayerParts::NONE);
        assert_eq!(calls.load(Ordering::Relaxed), 0);
        assert_eq!(gradients(LayerPart::Norms.into()), expected);
        assert_eq!(calls.load(Ordering::Relaxed), 1);
    }

    #[test]
    #[should_panic = "adapted_product takes 6 features, got 7"]
    fn an_input_that_does_not_fit_is_refused() {
        multiply([5, 7], [3, 8]);
    }

    #[test]
    #[should_panic = "takes matrices of the shapes [[6, 3], [3, 8]], got [[6, 3], [2, 8]]"]
    fn a_matrix_that_does_not_fit_is_refused() {
        multiply([5, 6], [2, 8]);
    }

    /// Multiplies an input and a second matrix of these shapes.
    fn multiply(x: [usize; 2], second: [usize; 2]) {
        let [first, second] = [[6, 3], second].map(|shape| parameter(numbers(shape, 1.0)));
        let adapter = LowRank { first: &first, second: &second, scale: 2.0 };
        adapted_product(&numbers(x, 1.0), &held(numbers([6, 8], 1.0)), adapter);
    }

    #[test]
    fn both_gradients_wait_and_have_the_bits_of_gradients_that_do_not() {
        let (a, b) = (numbers([6, 3], 1.0), numbers([3, 8], 1.0));
        let gradients = |waits: bool| {
            let [a, b] = [&a, &b].map(|matrix| matrix.clone().autodiff().require_grad());
            let [first, second] = [&a, &b].map(|matrix| parameter(matrix.clone()));
            let ids = [first.id, second.id];
            let x = numbers::<2>([5, 6], 1.0).autodiff();
            let weight = held(numbers([6, 8], 1.0).autodiff());
            let product = || {
                let adapter = LowRank { first: &first, second: &second, scale: 2.0 };
                adapted_product(&x, &weight, adapter).expect("the CPU back end")
            };
            if !waits {
                let gradients = product().sum().backward();
                return [a, b].map(|matrix| vec_of(matrix.grad(&gradients).expect("a leaf")));
            }
            let deferred = Deferred::new(Arc::new(ids.into()));
            let gradients = deferred.collect(product).sum().backward();
            assert!(a.grad(&gradients).is_none() && b.grad(&gradients).is_none());
            let mut found = [vec![0.0; 18], vec![0.0; 24]];
            for task in deferred.take() {
                let WeightTask::LowRank(task) = task else { panic!("{task:?}") };
                let index = usize::from(task.weight == ids[1]);
                task.add_to(&mut found[index], [[6, 3], [3, 8]][index]);
            }
            found
        };
        assert_eq!(gradients(true), gradients(false));
    }

    #[test]
    fn a_trained_weight_and_other_tapes_are_left_to_the_caller() {
        let [first, second] = [[6, 3], [3, 8]].map(|shape| parameter(numbers(shape, 1.0)));
        let adapter = LowRank { first: &first, second: &second, scale: 2.0 };
        let is_single = |x: Tensor<2>, weight| adapted_product(&x, &held(weight), adapter).is_some();
        let (x, weight) = (numbers::<2>([5, 6], 1.0), numbers::<2>([6, 8], 1.0));
        assert!(is_single(x.clone(), weight.clone()));
        assert!(!is_single(x.clone().autodiff(), weight.clone().autodiff().require_grad()));
        let device = Device::flex().autodiff().gradient_checkpointing();
        let other = Tensor::<2>::from_data(x.into_data(), &device).require_grad();
        assert!(!is_single(other, weight));
    }
}
