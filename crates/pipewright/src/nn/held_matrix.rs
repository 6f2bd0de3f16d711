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

use super::linear::{Linear, linear, linear_of};
use super::parallel::TensorParallel;
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

/// A linear layer whose matrix may be quantised. A layer whose matrix is not has the record paths of a [`Linear`].
#[derive(Module, Debug)]
pub struct HeldLinear {
    /// Shape `[inputs, outputs]`; `None` if the matrix is quantised.
    pub weight: Option<Param<Tensor<2>>>,
    /// Shape `[outputs]`.
    pub bias: Option<Param<Tensor<1>>>,
    #[module(skip)]
    frozen: Option<FrozenMatrix>,
}

impl From<Linear> for HeldLinear {
    fn from(Linear { weight, bias }: Linear) -> Self {
        Self { weight: Some(weight), bias, frozen: None }
    }
}

impl HeldLinear {
    /// Returns the layer with this matrix.
    pub fn new(matrix: HeldMatrix, bias: Option<Param<Tensor<1>>>) -> Self {
        Self { weight: matrix.parameter, bias, frozen: matrix.frozen }
    }

    pub(super) fn form(&self) -> HeldForm<'_> {
        HeldForm::of(self.weight.as_ref(), self.frozen.as_ref())
    }

    /// Returns `x w + b`, like [`Linear::forward`].
    ///
    /// # Panics
    /// As [`Linear::forward`].
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        // One rank holds all inputs.
        self.forward_split_inputs(x, &TensorParallel::default())
    }

    /// Like [`Linear::forward_split_inputs`].
    ///
    /// # Panics
    /// As [`Linear::forward_split_inputs`].
    pub fn forward_split_inputs<const D: usize>(&self, x: Tensor<D>, tensor: &TensorParallel) -> Tensor<D> {
        self.form().linear(x, self.bias.as_ref(), &Region::of_whole(tensor))
    }
}

/// The form of a matrix.
pub(super) enum HeldForm<'a> {
    Parameter(&'a Param<Tensor<2>>),
    Frozen(&'a FrozenMatrix),
}

impl<'a> HeldForm<'a> {
    fn of(parameter: Option<&'a Param<Tensor<2>>>, frozen: Option<&'a FrozenMatrix>) -> Self {
        match (parameter, frozen) {
            (Some(parameter), _) => Self::Parameter(parameter),
            (None, Some(held)) => Self::Frozen(held),
            (None, None) => unreachable!("a matrix has one of two forms"),
        }
    }

    /// Returns the numbers of inputs and outputs.
    pub(super) fn dims(&self) -> [usize; 2] {
        match self {
            Self::Parameter(parameter) => parameter.val().dims(),
            Self::Frozen(held) => held.dims(),
        }
    }

    /// Returns `x w + b`.
    pub(super) fn linear<const D: usize>(
        &self,
        x: Tensor<D>,
        bias: Option<&Param<Tensor<1>>>,
        region: &Region<'_>,
    ) -> Tensor<D> {
        match self {
            Self::Parameter(parameter) => linear(x, parameter, bias, region),
            Self::Frozen(held) => linear_of(x, self.dims(), bias, region, |x| multiply_quantised(x, held)),
        }
    }
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
    /// Returns a quantised matrix, whose rows are the outputs. If it is a table of embeddings, its products as a tied head have the
    /// same bits as a [`TiedHead`](super::TiedHead) with the decoded table.
    pub fn quantised(matrix: Arc<QuantisedMatrix>) -> Self {
        FrozenMatrix::Resident(matrix).into()
    }

    pub(super) fn form(&self) -> HeldForm<'_> {
        HeldForm::of(self.parameter.as_ref(), self.frozen.as_ref())
    }

    /// Returns the parameter, unless the matrix is quantised.
    pub fn parameter(&self) -> Option<&Param<Tensor<2>>> {
        self.parameter.as_ref()
    }

    /// Returns the matrix in memory. A matrix that is read whenever it is used is read once.
    pub fn loaded(&self) -> Self {
        match &self.frozen {
            Some(held) => {
                let matrix = FrozenMatrix::Resident(held.get());
                Self { parameter: None, frozen: Some(matrix) }
            }
            None => self.clone(),
        }
    }

    /// Returns the number of elements that are quantised.
    pub fn quantised_elements(&self) -> usize {
        self.frozen.as_ref().map_or(0, |held| held.dims().iter().product())
    }

    /// Returns the numbers of inputs and outputs.
    pub fn dims(&self) -> [usize; 2] {
        self.form().dims()
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
    weight.form().linear(x, bias, region)
}
