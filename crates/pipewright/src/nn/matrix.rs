//! Products of matrices of the CPU back end. Two operands of bfloat16 are multiplied as they are; other
//! operands are read in single precision.

use burn::tensor::bf16;
use pipewright_kernel::product::Matrix;
use pipewright_kernel::{bf16_product, product as single};

use super::operation::{CpuTensor, cpu_tensor, elements, in_bf16, tensor_of};

/// A matrix with the elements of a row-major tensor.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a> {
    tensor: &'a CpuTensor,
    /// Rows and columns of the tensor.
    shape: [usize; 2],
    is_transposed: bool,
}

impl<'a> Operand<'a> {
    pub(crate) fn new(tensor: &'a CpuTensor, shape: [usize; 2]) -> Self {
        Self { tensor, shape, is_transposed: false }
    }

    /// Swaps rows and columns without moving elements.
    pub(crate) fn transposed(self) -> Self {
        Self { is_transposed: !self.is_transposed, ..self }
    }

    fn matrix<T>(self, elements: &[T]) -> Matrix<'_, T> {
        let [rows, columns] = self.shape;
        let matrix = Matrix::new(elements, rows, columns);
        if self.is_transposed { matrix.transposed() } else { matrix }
    }

    fn rows(self) -> usize {
        self.shape[usize::from(self.is_transposed)]
    }

    fn columns(self) -> usize {
        self.shape[usize::from(!self.is_transposed)]
    }
}

/// Returns both matrices if their elements are bfloat16.
fn both_in_bf16<'a>(a: Operand<'a>, b: Operand<'a>) -> Option<[Matrix<'a, bf16>; 2]> {
    let [left, right] = in_bf16([a.tensor, b.tensor])?;
    Some([a.matrix(left), b.matrix(right)])
}

/// Returns `a b`: in bfloat16 if both operands are, and otherwise in single precision.
pub(crate) fn product(a: Operand<'_>, b: Operand<'_>) -> CpuTensor {
    match both_in_bf16(a, b) {
        Some([left, right]) => tensor_of(bf16_product::product(left, right), [a.rows(), b.columns()]),
        None => widened_product(a, b),
    }
}

/// Returns `a b` in single precision.
pub(crate) fn product_in_single(a: Operand<'_>, b: Operand<'_>) -> CpuTensor {
    match both_in_bf16(a, b) {
        Some([left, right]) => {
            cpu_tensor(bf16_product::product_in_single(left, right), [a.rows(), b.columns()])
        }
        None => widened_product(a, b),
    }
}

/// Returns `a b` in single precision, from operands that are read in single precision.
fn widened_product(a: Operand<'_>, b: Operand<'_>) -> CpuTensor {
    let (left, right) = (elements(a.tensor), elements(b.tensor));
    cpu_tensor(single::product(a.matrix(&left), b.matrix(&right)), [a.rows(), b.columns()])
}

/// Adds `a b` to a sum in single precision, which has the whole of its storage.
pub(crate) fn add_product(sum: &mut CpuTensor, a: Operand<'_>, b: Operand<'_>) {
    let (columns, sum) = (b.columns(), sum.storage_mut());
    match both_in_bf16(a, b) {
        Some([left, right]) => bf16_product::add_product(sum, columns, left, right),
        None => {
            let (left, right) = (elements(a.tensor), elements(b.tensor));
            single::add_product(sum, columns, a.matrix(&left), b.matrix(&right));
        }
    }
}
