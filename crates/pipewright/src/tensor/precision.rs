//! The precision of a pipeline: the element type in which stages compute and which crosses their boundaries.

use std::fmt;

use burn::tensor::{DType, Device};
use serde::{Deserialize, Serialize};

use super::value::{Value, ValueKind};

/// The element type in which stages compute.
///
/// With half precision, a stage computes with a copy of its parameters that is rounded once a step (for
/// sharded parameters, whenever they are gathered). Products, activations, their gradients, and the tensors
/// between stages have half precision. Parameters, sums of gradients, their norm, the optimizer's state,
/// checkpoints and losses have single precision, and so have the statistics of norms, softmax and cross
/// entropy inside the layers of [`nn`](crate::nn).
///
/// Only tensors of single precision are rounded: integers and booleans stay, and double precision within a
/// stage. Side inputs stay too, so that a loss sees them as they were given; a layer casts a float side input
/// to the type of its hidden states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Precision {
    /// Single precision: nothing is rounded.
    #[default]
    #[serde(rename = "f32")]
    F32,
    /// The range of single precision, with 8 bits of mantissa.
    #[serde(rename = "bf16")]
    Bf16,
    /// Numbers up to 65504, with 11 bits of mantissa. Losses are scaled
    /// ([`LossScaling`](crate::loss_scale::LossScaling)), because small gradients would be rounded to zero.
    #[serde(rename = "f16")]
    F16,
}

impl Precision {
    /// All precisions with their names in configurations.
    pub const NAMED: [(&'static str, Self); 3] =
        [("f32", Self::F32), ("bf16", Self::Bf16), ("f16", Self::F16)];

    /// Returns the element type of half precision; `None` if nothing is rounded.
    pub fn half(self) -> Option<DType> {
        match self {
            Self::F32 => None,
            Self::Bf16 => Some(DType::BF16),
            Self::F16 => Some(DType::F16),
        }
    }

    /// Returns the bytes of an element of an activation.
    pub fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// Returns whether a device computes in this precision.
    pub fn is_computed_on(self, device: &Device) -> bool {
        self.half().is_none_or(|half| device.supports_dtype(half))
    }

    /// Returns a tensor as stages compute with it: single precision is rounded. The cast is recorded if the
    /// tensor is on a tape.
    pub(crate) fn rounded(self, value: Value) -> Value {
        match self.half() {
            Some(half) if value.dtype() == DType::F32 => value.cast(half),
            _ => value,
        }
    }

    /// Returns a tensor as losses see it: half precision becomes single precision, unless the pipeline itself
    /// has single precision.
    pub(crate) fn widened(self, value: Value) -> Value {
        match self.half() {
            Some(half) if value.kind() == ValueKind::Float && value.dtype() == half => value.cast(DType::F32),
            _ => value,
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = Self::NAMED.iter().find(|(_, precision)| precision == self);
        f.write_str(named.map_or("", |(name, _)| name))
    }
}
