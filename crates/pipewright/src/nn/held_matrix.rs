//! The matrix of a linear layer in the form in which its stage holds it: a parameter, or quantised.
//!
//! A quantised matrix is frozen, belongs to the processor's memory, and is not a parameter of its module: the
//! norm, the optimizer and checkpoints do not know it. It is never decoded whole, except where a function
//! says so. A matrix that is in memory only while its stage computes is held in the same way, also if its elements
//! are floats.

use std::sync::Arc;

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor, TensorData};
use pipewright_kernel::quantised::QuantisedMatrix;

use super::linear::{linear, linear_of};
use super::quantised_product::multiply_quantised;
use super::region::Region;
use crate::memory::FrozenMatrix;

/// The matrix `[inputs, outputs]` of a linear layer.
#[derive(Module, Debug)]
pub struct HeldMatrix {
    /// `None` if its bytes are decoded in panels.
    parameter: Option<Param<Tensor<2>>>,
    #[module(skip)]
    frozen: Option<FrozenMatrix>,
}

/// The form of a matrix.
pub(super) enum HeldForm<'a> {
    Parameter(&'a Param<Tensor<2>>),
    Frozen(&'a FrozenMatrix),
}

impl From<Param<Tensor<2>>> for HeldMatrix {
    fn from(parameter: Param<Tensor<2>>) -> Self {
        Self { parameter: Some(parameter), frozen: None }
    }
}

impl From<FrozenMatrix> for HeldMatrix {
    fn from(matrix: FrozenMatrix) -> Self {
        Self { parameter: None, frozen: Some(matrix) }
    }
}

impl HeldMatrix {
    /// Returns a quantised matrix, whose rows are the outputs.
    pub fn quantised(matrix: Arc<QuantisedMatrix>) -> Self {
        FrozenMatrix::Resident(matrix).into()
    }

    pub(super) fn form(&self) -> HeldForm<'_> {
        match (&self.parameter, &self.frozen) {
            (Some(parameter), _) => HeldForm::Parameter(parameter),
            (None, Some(matrix)) => HeldForm::Frozen(matrix),
            (None, None) => unreachable!("a matrix has one of two forms"),
        }
    }

    /// Returns the parameter, unless the matrix is quantised.
    pub fn parameter(&self) -> Option<&Param<Tensor<2>>> {
        self.parameter.as_ref()
    }

    /// Returns the number of elements that are quantised.
    pub fn quantised_elements(&self) -> usize {
        self.frozen.as_ref().map_or(0, |matrix| matrix.dims().iter().product())
    }

    /// Returns the numbers of inputs and outputs.
    pub fn dims(&self) -> [usize; 2] {
        match self.form() {
            HeldForm::Parameter(parameter) => parameter.val().dims(),
            HeldForm::Frozen(matrix) => matrix.dims(),
        }
    }

    /// Returns the columns of some outputs, `[inputs, outputs]`, without gradients and as they are held: elements
    /// of a quantised matrix are decoded into single precision.
    pub fn columns(&self, first: usize, count: usize) -> Tensor<2> {
        match self.form() {
            HeldForm::Parameter(parameter) => parameter.val().detach().narrow(1, first, count),
            HeldForm::Frozen(matrix) => {
                let matrix = matrix.get();
                let inputs = matrix.columns();
                let mut elements = vec![0.0; count * inputs];
                for (row, out) in elements.chunks_exact_mut(inputs.max(1)).enumerate() {
                    matrix.decode_row(first + row, 0..inputs, out);
                }
                let data = TensorData::new(elements, [count, inputs]);
                Tensor::<2>::from_data(data, &Device::flex()).transpose()
            }
        }
    }

    /// Returns the whole matrix. A quantised one is decoded into single precision.
    pub fn whole(&self) -> Tensor<2> {
        match self.form() {
            HeldForm::Parameter(parameter) => parameter.val(),
            HeldForm::Frozen(_) => self.columns(0, self.dims()[1]),
        }
    }
}

/// Returns `x w + b` like [`linear`], for a matrix of any form. Shapes: `x [.., inputs]`, result `[.., outputs]`.
///
/// # Panics
/// As [`linear`].
pub fn held_linear<const D: usize>(
    x: Tensor<D>,
    weight: &HeldMatrix,
    bias: Option<&Param<Tensor<1>>>,
    region: &Region<'_>,
) -> Tensor<D> {
    let matrix = match weight.form() {
        HeldForm::Parameter(parameter) => return linear(x, parameter, bias, region),
        HeldForm::Frozen(matrix) => matrix,
    };
    linear_of(x, weight.dims(), bias, region, |x| multiply_quantised(x, matrix))
}
