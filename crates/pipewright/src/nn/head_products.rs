//! Products of the heads of each token with matrices that are columns of one matrix.

use std::ops::Range;

use burn::tensor::{Tensor, bf16};
use pipewright_kernel::element::Element;
use pipewright_kernel::product::Matrix;
use rayon::iter::{IndexedParallelIterator, ParallelIterator};
use rayon::slice::ParallelSliceMut;

use super::operation::{CpuTensor, cpu, cpu_tensor, elements, from_cpu, in_bf16, with_dtype};

/// Products of one token with fewer multiplications stay on one thread, as in Burn's CPU back end.
const PARALLEL_FROM: usize = 128 * 128 * 128;

/// The matrices of heads in one matrix `[rows, heads * width]`: of the columns of each head, these of `width`.
#[derive(Clone, Debug)]
pub struct HeadMatrices {
    /// The matrix of all heads.
    pub all: Tensor<2>,
    /// The columns that each head has.
    pub width: usize,
    /// The columns of a head's matrix, among those that the head has.
    pub columns: Range<usize>,
    /// Whether heads are multiplied by the transposes of their matrices.
    pub is_transposed: bool,
}

/// Multiplies the heads of each token by their matrices, without gradients. Shapes: `x [tokens, heads, inner]`, result
/// `[tokens, heads, outer]`.
///
/// On the processor, the products have the bits of [`Linear`](super::Linear)'s kernels.
///
/// # Panics
/// When the shapes do not fit.
pub fn head_products(x: Tensor<3>, matrices: HeadMatrices) -> Tensor<3> {
    match (cpu(x.clone()), cpu(matrices.all.clone())) {
        (Some(x), Some(all)) => from_cpu(multiplied(&x, &all, &matrices)),
        _ => composed(x, matrices),
    }
}

fn multiplied(x: &CpuTensor, all: &CpuTensor, matrices: &HeadMatrices) -> CpuTensor {
    let [tokens, heads, inner] = x.layout().shape().dims();
    let outer = if matrices.is_transposed { matrices.all.dims()[0] } else { matrices.columns.len() };
    let sizes = [tokens, heads, inner, outer];
    let products = match in_bf16([x, all]) {
        Some([x, all]) => products::<bf16>(x, all, matrices, sizes),
        None => products::<f32>(&elements(x), &elements(all), matrices, sizes),
    };
    with_dtype(cpu_tensor(products, [tokens, heads, outer]), burn::backend::TensorMetadata::dtype(x))
}

fn products<T: Element + Sync>(
    x: &[T],
    all: &[T],
    HeadMatrices { all: whole, width, columns, is_transposed }: &HeadMatrices,
    [tokens, heads, inner, outer]: [usize; 4],
) -> Vec<f32> {
    let [rows, stride] = whole.dims();
    assert_eq!(stride, heads * width, "each head has its columns");
    assert!(columns.end <= *width, "a head has {width} columns, and its matrix ends at {}", columns.end);
    let mut products = vec![0f32; tokens * heads * outer];
    if tokens == 0 {
        // The later heads of no token have no place in `x`.
        return products;
    }
    let multiply = |head: usize, products: &mut [f32]| {
        let of_tokens = Matrix::strided(&x[head * inner..], tokens, inner, heads * inner);
        let matrix = Matrix::strided(&all[head * width + columns.start..], rows, columns.len(), stride);
        let matrix = if *is_transposed { matrix.transposed() } else { matrix };
        T::product_into(products, heads * outer, of_tokens, matrix);
    };
    if tokens == 1 && heads * inner * outer >= PARALLEL_FROM {
        let of_heads = products.par_chunks_exact_mut(outer).enumerate();
        of_heads.for_each(|(head, products)| multiply(head, products));
    } else {
        (0..heads).for_each(|head| multiply(head, &mut products[head * outer..]));
    }
    products
}

/// The products for tensors that are not in the processor's memory.
fn composed(x: Tensor<3>, matrices: HeadMatrices) -> Tensor<3> {
    let HeadMatrices { all, width, columns, is_transposed } = matrices;
    let [rows, all_columns] = all.dims();
    let of_heads = all.reshape([rows, all_columns / width, width]).swap_dims(0, 1);
    let of_heads = of_heads.narrow(2, columns.start, columns.len());
    let of_heads = if is_transposed { of_heads.swap_dims(1, 2) } else { of_heads };
    x.swap_dims(0, 1).matmul(of_heads).swap_dims(0, 1)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Tolerance};

    use super::super::check::numbers;
    use super::*;

    fn check(dtype: DType, tolerance: f32) {
        for (is_transposed, inner) in [(true, 3), (false, 6)] {
            let x = numbers([2, 4, inner], 1.0).cast(dtype);
            let all = numbers([6, 4 * 5], 1.0).cast(dtype);
            let matrices = HeadMatrices { all, width: 5, columns: 1..4, is_transposed };
            let found = head_products(x.clone(), matrices.clone());
            let expected = composed(
                x.cast(DType::F32),
                HeadMatrices { all: matrices.all.clone().cast(DType::F32), ..matrices },
            );
            assert_eq!(found.dtype(), dtype);
            let found = found.cast(DType::F32).into_data();
            found.assert_approx_eq(&expected.into_data(), Tolerance::<f32>::rel_abs(tolerance, tolerance));
        }
    }

    #[test]
    fn each_head_has_its_matrix() {
        check(DType::F32, 1e-6);
        check(DType::BF16, 1e-2);
    }

    #[test]
    fn threads_share_the_heads_of_one_token_with_the_same_bits() {
        let [heads, size] = [64, 192];
        const { assert!(64 * 192 * 192 >= PARALLEL_FROM) };
        for (dtype, is_transposed) in [(DType::F32, true), (DType::F32, false), (DType::BF16, true)] {
            let all = numbers([size, heads * size], 1.0).cast(dtype);
            let matrices = HeadMatrices { all, width: size, columns: 0..size, is_transposed };
            let two = numbers([2, heads, size], 1.0).cast(dtype);
            let products = |x: Tensor<3>| head_products(x, matrices.clone()).narrow(0, 0, 1).into_data();
            assert_eq!(products(two.clone().narrow(0, 0, 1)), products(two));
        }
    }

    #[test]
    #[should_panic(expected = "a head has 5 columns, and its matrix ends at 6")]
    fn a_matrix_ends_with_its_head() {
        let matrices =
            HeadMatrices { all: numbers([6, 4 * 5], 1.0), width: 5, columns: 2..6, is_transposed: false };
        let _ = head_products(numbers([2, 4, 6], 1.0), matrices);
    }

    #[test]
    fn there_may_be_no_tokens() {
        let all = numbers([6, 4 * 5], 1.0);
        let matrices = HeadMatrices { all, width: 5, columns: 1..4, is_transposed: true };
        assert_eq!(head_products(numbers([0, 4, 3], 1.0), matrices).dims(), [0, 4, 6]);
    }
}
