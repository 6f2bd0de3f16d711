//! Products with a frozen quantised weight. The backward computes the gradient of the input and keeps the weight
//! alone.

use std::sync::Arc;

use burn::tensor::{DType, Tensor, TensorData};
use pipewright_kernel::narrow_product::{self, AnyMatrix};
use pipewright_kernel::product::Matrix;
use pipewright_kernel::quantised::{QuantisedMatrix, QuantisedOperand, Rounding, row_product};
use pipewright_kernel::quantised_product::{half_product, half_product_with_update, product};

use super::operation::{CpuTensor, Operation, cpu_tensor, elements, in_bf16, on_cpu, tensor_of};
use crate::memory::FrozenMatrix;

/// A quantised weight in an operation, whose elements are rounded to the element type of the input.
#[derive(Clone, Debug)]
pub(super) struct QuantisedWeight {
    /// A tape keeps no elements of a matrix that is read when it is needed.
    matrix: FrozenMatrix,
    rounding: Rounding,
    /// Whether the product of a single row may have another order of its sums.
    is_without_tape: bool,
}

impl QuantisedWeight {
    pub(super) fn new(matrix: FrozenMatrix, input: DType) -> Self {
        let rounding = match input {
            DType::BF16 => Rounding::Bf16,
            DType::F16 => Rounding::F16,
            _ => Rounding::None,
        };
        Self { matrix, rounding, is_without_tape: false }
    }

    /// Returns the weight in an operation without a backward.
    pub(super) fn without_tape(self, is_without_tape: bool) -> Self {
        Self { is_without_tape, ..self }
    }

    /// Returns the product of a row in single precision, as generation has it for each token, and a forward of one row without a tape.
    fn row_product(&self, matrix: &QuantisedMatrix, left: &[f32], is_turned: bool) -> Option<Vec<f32>> {
        let is_row = self.is_without_tape && !is_turned && left.len() == matrix.columns();
        (is_row && self.rounding == Rounding::None).then(|| row_product(matrix, left))
    }

    /// Returns the matrix.
    pub(super) fn matrix(&self) -> Arc<QuantisedMatrix> {
        self.matrix.get()
    }

    /// Returns how products round its elements.
    pub(super) fn rounding(&self) -> Rounding {
        self.rounding
    }

    /// Returns the weight, or its transpose if `is_turned`, as the right operand of a product.
    fn operand(matrix: &QuantisedMatrix, is_turned: bool) -> QuantisedOperand<'_> {
        if is_turned { QuantisedOperand::plain(matrix) } else { QuantisedOperand::transposed(matrix) }
    }

    /// Returns the product of a row-major `left` with the weight `[inputs, outputs]`, or with its transpose if
    /// `is_turned`.
    pub(super) fn product(&self, left: &CpuTensor, is_turned: bool) -> CpuTensor {
        let matrix = self.matrix.get();
        let right = Self::operand(&matrix, is_turned);
        let [rows, columns] = [rows_of(left, right), right.columns()];
        if let Some([left]) = in_bf16([left]) {
            return tensor_of(half_product(Matrix::new(left, rows, right.inner()), right), [rows, columns]);
        }
        let left = elements(left);
        if let Some(out) = self.row_product(&matrix, &left, is_turned) {
            return cpu_tensor(out, [rows, columns]);
        }
        cpu_tensor(product(Matrix::new(&left, rows, right.inner()), right, self.rounding), [rows, columns])
    }

    /// Like [`QuantisedWeight::product`], and adds `[rows, rank]` times `[rank, columns]`.
    pub(super) fn updated_product(
        &self,
        left: &CpuTensor,
        is_turned: bool,
        [low, matrix]: [&[f32]; 2],
        rank: usize,
    ) -> CpuTensor {
        let weight = self.matrix.get();
        let right = Self::operand(&weight, is_turned);
        let [rows, columns] = [rows_of(left, right), right.columns()];
        if let Some([left]) = in_bf16([left]) {
            let left = Matrix::new(left, rows, right.inner());
            return tensor_of(half_product_with_update(left, right, [low, matrix], rank), [rows, columns]);
        }
        let left = elements(left);
        let mut out = self
            .row_product(&weight, &left, is_turned)
            .unwrap_or_else(|| product(Matrix::new(&left, rows, right.inner()), right, self.rounding));
        let [low, matrix] = [Matrix::new(low, rows, rank), Matrix::new(matrix, rank, columns)];
        narrow_product::add_product(&mut out, columns, AnyMatrix::Single(low), AnyMatrix::Single(matrix));
        cpu_tensor(out, [rows, columns])
    }
}

fn rows_of(left: &CpuTensor, right: QuantisedOperand<'_>) -> usize {
    left.layout().num_elements() / right.inner().max(1)
}

/// Returns `x w`. Shapes: `x [rows, inputs]`, result `[rows, outputs]`. Away from the CPU back end, the weight is
/// decoded whole.
pub(super) fn multiply_quantised(x: Tensor<2>, matrix: &FrozenMatrix) -> Tensor<2> {
    let Some(([x], tape)) = on_cpu([x.clone().into_dispatch()]) else {
        let matrix = matrix.get();
        let decoded = TensorData::new(matrix.decoded(), [matrix.rows(), matrix.columns()]);
        let weight = Tensor::<2>::from_data(decoded, (&x.device(), x.dtype()));
        return x.matmul(weight.transpose());
    };
    let weight = QuantisedWeight::new(matrix.clone(), x.dtype()).without_tape(!tape.is_recorded());
    let y = tape.rounded(weight.product(&x, false));
    tape.record_tensor(y, |_| QuantisedBackward(weight))
}

#[derive(Clone, Debug)]
struct QuantisedBackward(QuantisedWeight);

impl Operation<1> for QuantisedBackward {
    fn backward(self, gradient: CpuTensor, [for_x]: [bool; 1]) -> [Option<CpuTensor>; 1] {
        [for_x.then(|| self.0.product(&gradient, true))]
    }
}
