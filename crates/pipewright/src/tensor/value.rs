//! Tensors without their rank and kind in the type: what crosses a stage boundary.
//!
//! Stages are written with ordinary `Tensor<D, K>` arguments ([`crate::boundary`] converts); everything between two
//! stages (executor, transports, splitting into microbatches) moves [`Values`] and never looks inside them.

use burn::backend::ops::{BoolTensorOps, FloatTensorOps, IntTensorOps};
use burn::backend::{Dispatch, DispatchTensor, Flex, TensorMetadata};
use burn::tensor::{Bool, DType, Device, Int, Shape, Tensor, TensorData, kind::Basic};

/// One tensor of any rank, float, integer or boolean. Cloning shares the storage.
#[derive(Clone, Debug)]
pub struct Value {
    tensor: DispatchTensor,
    /// Nobody upstream asks for its gradient.
    constant: bool,
}

/// The tensors of one boundary, in the order in which the stage returns or takes them.
pub type Values = Vec<Value>;

/// A tensor that may be absent: the gradient of an integer tensor, or of one that requires none.
pub type OptionalTensor = Option<Value>;

/// Tensors in the order of their boundary or of a stage's parameters; some may be absent.
pub type OptionalTensors = Vec<OptionalTensor>;

/// Kind of element, as far as a boundary cares: gradients flow through floats alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueKind {
    /// Floating point of any width.
    Float,
    /// Signed or unsigned integer of any width.
    Int,
    /// Boolean.
    Bool,
}

impl std::fmt::Display for ValueKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Float => "float",
            Self::Int => "int",
            Self::Bool => "bool",
        })
    }
}

impl Value {
    pub(crate) fn from_dispatch(tensor: DispatchTensor) -> Self {
        Self { tensor, constant: false }
    }

    pub(crate) fn into_dispatch(self) -> DispatchTensor {
        self.tensor
    }

    /// The tensor's shape.
    pub fn shape(&self) -> Shape {
        self.tensor.shape()
    }

    /// The tensor's element type.
    pub fn dtype(&self) -> DType {
        self.tensor.dtype()
    }

    /// The tensor's kind of element.
    pub fn kind(&self) -> ValueKind {
        match self.dtype() {
            dtype if dtype.is_bool() => ValueKind::Bool,
            dtype if dtype.is_int() || dtype.is_uint() => ValueKind::Int,
            _ => ValueKind::Float,
        }
    }

    /// The same tensor, for whose gradient nobody upstream asks.
    pub(crate) fn constant(self) -> Self {
        Self { constant: true, ..self }
    }

    /// Whether somebody upstream asks for the tensor's gradient.
    pub(crate) fn requires_grad(&self) -> bool {
        !self.constant && self.kind() == ValueKind::Float
    }

    /// Bytes that the elements take.
    pub fn bytes(&self) -> usize {
        self.shape().num_elements() * self.dtype().size()
    }

    /// Where the storage begins, if it lies in the host's memory and belongs to no tape.
    pub(crate) fn address(&self) -> Option<usize> {
        let tensor = self.tensor.clone();
        // The rank does not matter here; 1 is arbitrary.
        let storage = match self.kind() {
            ValueKind::Float => Tensor::<1>::from_dispatch(tensor).try_into_primitive::<Flex>(),
            ValueKind::Int => Tensor::<1, Int>::from_dispatch(tensor).try_into_primitive::<Flex>(),
            ValueKind::Bool => Tensor::<1, Bool>::from_dispatch(tensor).try_into_primitive::<Flex>(),
        };
        Some(storage.ok()?.bytes().as_ptr().addr())
    }

    /// The device that holds the elements.
    pub fn device(&self) -> Device {
        Device::new(self.tensor.device())
    }

    /// The same tensor on `device`; the storage is moved, or shared when it is there already.
    pub fn to_device(self, device: &Device) -> Self {
        let constant = self.constant;
        // Rank plays no part in a move between devices, so any rank may stand in the type.
        let moved = match self.kind() {
            ValueKind::Float => Self::of(Tensor::<1>::from_dispatch(self.tensor).to_device(device)),
            ValueKind::Int => Self::of(Tensor::<1, Int>::from_dispatch(self.tensor).to_device(device)),
            ValueKind::Bool => Self::of(Tensor::<1, Bool>::from_dispatch(self.tensor).to_device(device)),
        };
        Self { constant, ..moved }
    }

    /// What lies at `start..end` of a dimension, sharing the storage where the back end can.
    pub(crate) fn narrow(&self, dimension: usize, start: usize, end: usize) -> Self {
        let mut slices = vec![burn::tensor::Slice::full(); self.shape().num_dims()];
        slices[dimension] = burn::tensor::Slice::from(start..end);
        let tensor = self.tensor.clone();
        Self::from_dispatch(match self.kind() {
            ValueKind::Float => Dispatch::float_slice(tensor, &slices),
            ValueKind::Int => Dispatch::int_slice(tensor, &slices),
            ValueKind::Bool => Dispatch::bool_slice(tensor, &slices),
        })
    }

    /// The elements, off the device.
    pub(crate) fn into_data(self) -> TensorData {
        // Rank plays no part in reading, so any may stand in the type.
        match self.kind() {
            ValueKind::Float => Tensor::<1>::from_dispatch(self.tensor).into_data(),
            ValueKind::Int => Tensor::<1, Int>::from_dispatch(self.tensor).into_data(),
            ValueKind::Bool => Tensor::<1, Bool>::from_dispatch(self.tensor).into_data(),
        }
    }

    /// A tensor with these elements.
    pub(crate) fn from_data(data: TensorData, device: &Device) -> Self {
        let (dtype, device) = (data.dtype(), device.as_dispatch());
        Self::from_dispatch(if dtype.is_bool() {
            Dispatch::bool_from_data(data, device)
        } else if dtype.is_int() || dtype.is_uint() {
            Dispatch::int_from_data(data, device)
        } else {
            Dispatch::float_from_data(data, device)
        })
    }

    /// A float tensor in storage of its own, so that it may leave this rank without what it is a part of.
    pub(crate) fn copied(self) -> Self {
        Self::of(Tensor::<1>::from_dispatch(self.tensor).mul_scalar(1.0))
    }

    /// The same elements in another shape.
    pub(crate) fn reshaped(self, shape: &[usize]) -> Self {
        let shape = Shape::from(shape.to_vec());
        Self::from_dispatch(match self.kind() {
            ValueKind::Float => Dispatch::float_reshape(self.tensor, shape),
            ValueKind::Int => Dispatch::int_reshape(self.tensor, shape),
            ValueKind::Bool => Dispatch::bool_reshape(self.tensor, shape),
        })
    }

    pub(crate) fn of<const D: usize, K: Basic>(tensor: Tensor<D, K>) -> Self {
        Self::from_dispatch(tensor.into_dispatch())
    }
}
