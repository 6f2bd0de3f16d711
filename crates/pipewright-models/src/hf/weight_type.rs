//! The element types of weights in files.

use burn::tensor::{bf16, f16};
use safetensors::Dtype;
use serde::{Deserialize, Serialize};

/// The element type of a tensor in a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightType {
    /// 32 bits.
    #[default]
    Float32,
    /// 16 bits, with the range of 32 bits.
    Bfloat16,
    /// 16 bits, up to 65504.
    Float16,
}

impl WeightType {
    /// All types.
    pub const ALL: [Self; 3] = [Self::Float32, Self::Bfloat16, Self::Float16];

    /// Returns the name in `config.json`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Float32 => "float32",
            Self::Bfloat16 => "bfloat16",
            Self::Float16 => "float16",
        }
    }

    /// Returns the number of bytes of an element.
    pub(super) fn bytes(self) -> usize {
        match self {
            Self::Float32 => 4,
            Self::Bfloat16 | Self::Float16 => 2,
        }
    }

    pub(super) fn dtype(self) -> Dtype {
        match self {
            Self::Float32 => Dtype::F32,
            Self::Bfloat16 => Dtype::BF16,
            Self::Float16 => Dtype::F16,
        }
    }

    pub(super) fn of_dtype(dtype: Dtype) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.dtype() == dtype)
    }

    /// Returns elements as a file of the type has them.
    pub(super) fn rounded(self, values: Vec<f32>) -> Vec<f32> {
        let round = |value: f32| match self {
            Self::Float32 => value,
            Self::Bfloat16 => bf16::from_f32(value).to_f32(),
            Self::Float16 => f16::from_f32(value).to_f32(),
        };
        values.into_iter().map(round).collect()
    }

    /// Returns the bytes of elements, rounded to the type; `None` if a finite element is too large for it.
    pub(super) fn encode(self, values: &[f32]) -> Option<Vec<u8>> {
        fn halves(values: &[f32], round: fn(f32) -> (u16, bool)) -> Option<Vec<u8>> {
            let mut bytes = Vec::with_capacity(2 * values.len());
            for value in values {
                let (bits, is_finite) = round(*value);
                if value.is_finite() && !is_finite {
                    return None;
                }
                bytes.extend_from_slice(&bits.to_le_bytes());
            }
            Some(bytes)
        }
        match self {
            Self::Float32 => Some(values.iter().copied().flat_map(f32::to_le_bytes).collect()),
            Self::Bfloat16 => halves(values, |value| {
                let half = bf16::from_f32(value);
                (half.to_bits(), half.is_finite())
            }),
            Self::Float16 => halves(values, |value| {
                let half = f16::from_f32(value);
                (half.to_bits(), half.is_finite())
            }),
        }
    }
}
