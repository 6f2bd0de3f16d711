//! The types that a stage may take and return: one tensor, or any nesting of tuples of tensors.
//!
//! A stage names ordinary tensors as its input and output. [`Boundary`] converts them to and from the
//! [`Values`] that the runtime moves, so the runtime needs to know nothing about the stage.
//!
//! ```
//! use burn::tensor::{Device, Int, Tensor};
//! use pipewright::tensor::{Boundary, pack, unpack};
//!
//! let device = Device::flex();
//! let hidden = Tensor::<3>::zeros([2, 4, 8], &device);
//! let ids = Tensor::<2, Int>::zeros([2, 4], &device);
//! let values = pack((hidden, ids));
//! assert_eq!(values.len(), 2);
//! let (hidden, ids): (Tensor<3>, Tensor<2, Int>) = unpack(values)?;
//! assert_eq!((hidden.dims(), ids.dims()), ([2, 4, 8], [2, 4]));
//! # Ok::<(), pipewright::tensor::BoundaryError>(())
//! ```

use burn::tensor::{Bool, Int, Tensor, kind::Basic};
use pipewright_schedule::words::counted;

use super::value::{Value, ValueKind, Values};

/// Types that a stage may take and return.
pub trait Boundary: Sized {
    /// Appends the tensors of `self`, first to last.
    fn pack(self, into: &mut Values);

    /// Takes as many tensors as [`Boundary::pack`] appended, in the same order.
    ///
    /// # Errors
    /// When a tensor is missing, or its number of dimensions or its kind differs.
    fn unpack(from: &mut Unpack) -> Result<Self, BoundaryError>;
}

/// The tensors of one boundary, which are taken one by one in order.
#[derive(Debug)]
pub struct Unpack {
    values: std::vec::IntoIter<Value>,
    taken: usize,
}

impl Unpack {
    /// Returns the next tensor without taking it, for types that depend on the tensor.
    pub fn peek(&self) -> Option<&Value> {
        self.values.as_slice().first()
    }

    /// Takes the next tensor.
    ///
    /// # Errors
    /// When no tensor is left.
    pub fn take(&mut self) -> Result<Value, BoundaryError> {
        let value = self.values.next().ok_or(BoundaryError::Missing { index: self.taken })?;
        self.taken += 1;
        Ok(value)
    }
}

/// Converts a boundary into the list of tensors that the runtime moves.
pub fn pack<T: Boundary>(boundary: T) -> Values {
    let mut values = Values::new();
    boundary.pack(&mut values);
    values
}

/// Converts a list of tensors into the boundary type `T`.
///
/// # Errors
/// When a tensor is missing or left over, or its number of dimensions or its kind is not the one that `T`
/// names.
pub fn unpack<T: Boundary>(values: Values) -> Result<T, BoundaryError> {
    let mut from = Unpack { values: values.into_iter(), taken: 0 };
    let boundary = T::unpack(&mut from)?;
    match from.values.len() {
        0 => Ok(boundary),
        left => Err(BoundaryError::LeftOver { taken: from.taken, left }),
    }
}

/// Why a stage cannot take the tensors that arrived.
#[derive(Clone, PartialEq, thiserror::Error)]
pub enum BoundaryError {
    /// Fewer tensors arrived than the stage takes.
    #[error("tensor {index} is missing: the stage before returns fewer tensors than this one takes")]
    Missing {
        /// Index of the missing tensor.
        index: usize,
    },
    /// More tensors arrived than the stage takes.
    #[error(
        "{} left over after {taken}: the stage before returns more tensors than this one takes",
        counted(*.left, "tensor")
    )]
    LeftOver {
        /// Tensors the stage took.
        taken: usize,
        /// Tensors that are left over.
        left: usize,
    },
    /// A tensor with another number of dimensions or of another kind arrived.
    #[error(
        "expected a {expected_kind} tensor of rank {expected_rank}, found a {found_kind} tensor of shape {found_shape:?}"
    )]
    Mismatch {
        /// Rank the stage names.
        expected_rank: usize,
        /// Kind the stage names.
        expected_kind: ValueKind,
        /// Kind that arrived.
        found_kind: ValueKind,
        /// Shape that arrived.
        found_shape: Vec<usize>,
    },
}

pipewright_schedule::message_as_debug!(BoundaryError);

impl Boundary for () {
    fn pack(self, _into: &mut Values) {}

    fn unpack(_from: &mut Unpack) -> Result<Self, BoundaryError> {
        Ok(())
    }
}

/// The list of tensors itself, for stages that handle any shapes.
impl Boundary for Values {
    fn pack(self, into: &mut Values) {
        into.extend(self);
    }

    fn unpack(from: &mut Unpack) -> Result<Self, BoundaryError> {
        from.taken += from.values.len();
        Ok(from.values.by_ref().collect())
    }
}

impl Value {
    /// Returns the typed tensor if the number of dimensions and the kind match.
    fn tensor<const D: usize, K: Basic>(self, kind: ValueKind) -> Result<Tensor<D, K>, BoundaryError> {
        let rank = self.shape().num_dims();
        if rank != D || self.kind() != kind {
            return Err(BoundaryError::Mismatch {
                expected_rank: D,
                expected_kind: kind,
                found_kind: self.kind(),
                found_shape: self.shape().to_vec(),
            });
        }
        Ok(Tensor::from_dispatch(self.into_dispatch()))
    }
}

macro_rules! tensor_boundary {
    ($($kind:ty => $value_kind:expr),*) => {$(
        impl<const D: usize> Boundary for Tensor<D, $kind> {
            fn pack(self, into: &mut Values) {
                into.push(Value::of(self));
            }

            fn unpack(from: &mut Unpack) -> Result<Self, BoundaryError> {
                from.take()?.tensor($value_kind)
            }
        }
    )*};
}

tensor_boundary!(burn::tensor::Float => ValueKind::Float, Int => ValueKind::Int, Bool => ValueKind::Bool);

macro_rules! tuple_boundary {
    ($($name:ident),+) => {
        impl<$($name: Boundary),+> Boundary for ($($name,)+) {
            fn pack(self, into: &mut Values) {
                #[expect(non_snake_case, reason = "the type parameters name the tuple's fields")]
                let ($($name,)+) = self;
                $($name.pack(into);)+
            }

            fn unpack(from: &mut Unpack) -> Result<Self, BoundaryError> {
                Ok(($($name::unpack(from)?,)+))
            }
        }
    };
}

tuple_boundary!(A);
tuple_boundary!(A, B);
tuple_boundary!(A, B, C);
tuple_boundary!(A, B, C, D);
tuple_boundary!(A, B, C, D, E);
tuple_boundary!(A, B, C, D, E, F);
