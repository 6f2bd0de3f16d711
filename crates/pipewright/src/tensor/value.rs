//! [`Value`]: a tensor whose number of dimensions and kind are known at run time.
//!
//! Stages are written with ordinary `Tensor<D, K>` arguments, which [`super::boundary`] converts. Everything
//! between two stages (executor, transports, splitting into microbatches) moves [`Values`] and never reads
//! their elements.

use std::sync::Arc;

use burn::backend::ops::{BoolTensorOps, FloatTensorOps, IntTensorOps};
use burn::backend::{Dispatch, DispatchTensor, Flex, TensorMetadata};
use burn::tensor::{Bool, DType, Device, Int, Shape, Tensor, TensorData, kind::Basic};

use super::layout::Layout;
use super::placement::{Placement, TensorRank};
use super::transfer::queueing;
use crate::device::computes_behind;

/// A float, integer or boolean tensor with any number of dimensions. Cloning shares the storage.
#[derive(Clone, Debug)]
pub struct Value {
    tensor: DispatchTensor,
    /// Whether no stage before this one needs the tensor's gradient.
    constant: bool,
    /// Present in a message that may have a part of a tensor.
    layout: Option<Box<Layout>>,
}

/// The memory of a tensor's elements.
pub(crate) struct Storage {
    pub(crate) address: usize,
    /// Whether other tensors use it too.
    pub(crate) is_shared: bool,
}

/// The tensors of one boundary, in the order in which the stage returns or takes them.
pub type Values = Vec<Value>;

/// A tensor that may be absent: the gradient of an integer tensor, or of one that requires none.
pub type OptionalTensor = Option<Value>;

/// Tensors in the order of their boundary or of a stage's parameters; some may be absent.
pub type OptionalTensors = Vec<OptionalTensor>;

/// The kind of a tensor's elements. Only floats have gradients.
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
        Self { tensor, constant: false, layout: None }
    }

    pub(crate) fn into_dispatch(self) -> DispatchTensor {
        self.tensor
    }

    /// Returns the tensor's shape.
    pub fn shape(&self) -> Shape {
        self.tensor.shape()
    }

    /// Returns the tensor's element type.
    pub fn dtype(&self) -> DType {
        self.tensor.dtype()
    }

    /// Returns the kind of the tensor's elements.
    pub fn kind(&self) -> ValueKind {
        match self.dtype() {
            dtype if dtype.is_bool() => ValueKind::Bool,
            dtype if dtype.is_int() || dtype.is_uint() => ValueKind::Int,
            _ => ValueKind::Float,
        }
    }

    /// Returns the tensor marked as one that requires no gradient.
    pub(crate) fn constant(self) -> Self {
        Self { constant: true, ..self }
    }

    /// Returns the tensor marked as one whose gradient a stage before needs.
    pub(crate) fn requiring_grad(self) -> Self {
        Self { constant: false, ..self }
    }

    /// Returns the tensor with the gradient setting of another one.
    pub(crate) fn with_settings_of(self, other: &Self) -> Self {
        Self { constant: other.constant, ..self }
    }

    /// Returns the tensor as the part of another one.
    pub(crate) fn with_layout(self, layout: Layout) -> Self {
        Self { layout: Some(Box::new(layout)), ..self }
    }

    /// Returns the layout of the part of the tensor that `rank` sends. A float tensor is cut along the first
    /// dimension in which every rank gets a part.
    pub(crate) fn layout_for(&self, rank: TensorRank) -> Layout {
        let shape = self.shape().to_vec();
        let last = TensorRank { index: rank.of.saturating_sub(1), ..rank };
        let has_part = |size: &usize| !Placement::split(0, rank.of).shard_of(last).range(*size).is_empty();
        let dimension = shape.iter().position(has_part).filter(|_| self.kind() == ValueKind::Float);
        Layout { rank, dimension, shape }
    }

    /// Returns the part of the tensor that `rank` sends, with its layout.
    pub(crate) fn part_for(self, rank: TensorRank) -> Self {
        let layout = self.layout_for(rank);
        if layout.dimension.is_none() {
            return self.with_layout(layout);
        }
        self.part(&layout).copied().with_settings_of(&self).with_layout(layout)
    }

    /// Returns the part of the tensor that a layout has. The tensor has the whole of the dimension of the cut.
    pub(crate) fn part(&self, layout: &Layout) -> Self {
        match layout.range() {
            Some((dimension, range)) => self.narrow(dimension, range.start, range.end),
            None => self.clone(),
        }
    }

    /// Returns the tensor outside a message.
    pub(crate) fn without_layout(self) -> Self {
        Self { layout: None, ..self }
    }

    /// Returns which part of a tensor this one is, if it is in a message that may have a part.
    pub(crate) fn layout(&self) -> Option<&Layout> {
        self.layout.as_deref()
    }

    /// Returns the shape of the whole tensor, of which this one may be a part.
    pub(crate) fn whole_shape(&self) -> Vec<usize> {
        self.layout().map_or_else(|| self.shape().to_vec(), |layout| layout.shape.clone())
    }

    /// Returns whether a stage before this one needs the tensor's gradient.
    pub(crate) fn requires_grad(&self) -> bool {
        !self.constant && self.kind() == ValueKind::Float
    }

    /// Returns whether the tensor is on a tape that leads to a tensor that requires a gradient.
    pub(crate) fn is_tracked(&self) -> bool {
        // The number of dimensions does not matter here; 1 is arbitrary.
        self.kind() == ValueKind::Float && Tensor::<1>::from_dispatch(self.tensor.clone()).is_tracked()
    }

    /// Returns the size of the elements in bytes.
    pub fn bytes(&self) -> usize {
        self.shape().num_elements() * self.dtype().size()
    }

    /// Returns where the elements are, if they are in the host's memory and the tensor is not on a tape.
    pub(crate) fn storage(&self) -> Option<Storage> {
        let tensor = self.tensor.clone();
        // The number of dimensions does not matter here; 1 is arbitrary.
        let storage = match self.kind() {
            ValueKind::Float => Tensor::<1>::from_dispatch(tensor).try_into_primitive::<Flex>(),
            ValueKind::Int => Tensor::<1, Int>::from_dispatch(tensor).try_into_primitive::<Flex>(),
            ValueKind::Bool => Tensor::<1, Bool>::from_dispatch(tensor).try_into_primitive::<Flex>(),
        };
        let bytes = storage.ok()?.data_arc();
        // This tensor and `bytes` are two users.
        Some(Storage { address: bytes.as_ptr().addr(), is_shared: Arc::strong_count(&bytes) > 2 })
    }

    /// Returns whether two tensors of floats have the same shape, element type and bits. Tensors that are on a
    /// tape, not in the host's memory, or a part of a larger storage are not compared.
    pub(crate) fn has_bits_of(&self, other: &Self) -> bool {
        let whole = |value: &Self| {
            // The number of dimensions does not matter here; 1 is arbitrary.
            let tensor =
                Tensor::<1>::from_dispatch(value.tensor.clone()).try_into_primitive::<Flex>().ok()?;
            let size = value.shape().num_elements() * value.dtype().size();
            Some(tensor.data_arc()).filter(|bytes| tensor.is_contiguous() && bytes.len() == size)
        };
        [self, other].iter().all(|value| value.kind() == ValueKind::Float)
            && (self.shape(), self.dtype()) == (other.shape(), other.dtype())
            && matches!((whole(self), whole(other)), (Some(a), Some(b)) if a[..] == b[..])
    }

    /// Returns the device that holds the elements.
    pub fn device(&self) -> Device {
        Device::new(self.tensor.device())
    }

    /// Moves the tensor to `device`. A tensor that is already there shares its storage.
    pub fn to_device(self, device: &Device) -> Self {
        let from = self.device();
        if from == *device {
            return self;
        }
        let _queueing = queueing(&from, device);
        let user = self.user_on_device();
        let (constant, layout) = (self.constant, self.layout.clone());
        // The number of dimensions does not matter here; 1 is arbitrary.
        let moved = match self.kind() {
            ValueKind::Float => Self::of(Tensor::<1>::from_dispatch(self.tensor).to_device(device)),
            ValueKind::Int => Self::of(Tensor::<1, Int>::from_dispatch(self.tensor).to_device(device)),
            ValueKind::Bool => {
                // Back ends store booleans in different types, and Burn's copy between back ends does not
                // convert them.
                let stored = DType::from(device.settings().bool_dtype);
                if stored == self.dtype() {
                    Self::of(Tensor::<1, Bool>::from_dispatch(self.tensor).to_device(device))
                } else {
                    Self::from_data(self.into_data().convert_dtype(stored), device)
                }
            }
        };
        if user.is_some() {
            // Reads the elements if they are now the processor's.
            moved.storage();
        }
        Self { constant, layout, ..moved }
    }

    /// Returns the range `start..end` of a dimension. Shares the storage if the back end can.
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

    /// Returns a float tensor with elements of another float type, on its tape.
    pub(crate) fn cast(self, dtype: DType) -> Self {
        let constant = self.constant;
        // The number of dimensions does not matter here; 1 is arbitrary.
        Self { constant, ..Self::of(Tensor::<1>::from_dispatch(self.tensor).cast(dtype)) }
    }

    /// Returns another user of the storage, to be kept until the elements are copied from a device. Burn
    /// copies them when they are first read, maybe on another thread. Until then the copy does not count as a
    /// user, and an operation of the rank's thread that seems to be the only user writes its result there.
    fn user_on_device(&self) -> Option<DispatchTensor> {
        computes_behind(&self.device()).then(|| self.tensor.clone())
    }

    /// Copies the elements from the device.
    pub(crate) fn into_data(self) -> TensorData {
        let user = self.user_on_device();
        // The number of dimensions does not matter here; 1 is arbitrary.
        let data = match self.kind() {
            ValueKind::Float => Tensor::<1>::from_dispatch(self.tensor).into_data(),
            ValueKind::Int => Tensor::<1, Int>::from_dispatch(self.tensor).into_data(),
            ValueKind::Bool => Tensor::<1, Bool>::from_dispatch(self.tensor).into_data(),
        };
        if user.is_some() {
            data.as_bytes();
        }
        data
    }

    /// Returns a tensor with these elements.
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

    /// Joins tensors of one kind, at least one, along a dimension.
    pub(crate) fn joined(mut parts: Vec<Self>, dimension: usize) -> Self {
        if parts.len() == 1 {
            return parts.swap_remove(0);
        }
        let kind = parts[0].kind();
        let parts = parts.into_iter().map(Self::into_dispatch).collect();
        Self::from_dispatch(match kind {
            ValueKind::Float => Dispatch::float_cat(parts, dimension),
            ValueKind::Int => Dispatch::int_cat(parts, dimension),
            ValueKind::Bool => Dispatch::bool_cat(parts, dimension),
        })
    }

    /// Returns zeros of this shape, with the float type and on the device of this tensor.
    pub(crate) fn zeros(&self, shape: &[usize]) -> Self {
        let count: usize = shape.iter().product();
        Self::of(Tensor::<1>::zeros([count], (&self.device(), self.dtype()))).reshaped(shape)
    }

    /// Returns a float tensor times `factor`, in its own storage.
    pub(crate) fn scaled(self, factor: f64) -> Self {
        Self::of(Tensor::<1>::from_dispatch(self.tensor).mul_scalar(factor))
    }

    /// Copies a float tensor into its own storage, so that it can be sent without the tensor that it is a
    /// part of.
    pub(crate) fn copied(self) -> Self {
        let constant = self.constant;
        Self { constant, ..self.scaled(1.0) }
    }

    /// Returns the same elements in another shape.
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
