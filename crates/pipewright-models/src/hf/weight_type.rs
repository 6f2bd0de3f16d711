//! The element types of weights in files, which an exported model has from the model that it was trained from.

use std::collections::BTreeMap;
use std::path::Path;

use burn::tensor::{bf16, f16};
use safetensors::Dtype;
use serde::{Deserialize, Serialize};

use super::HfError;
use super::read::read_json;
use super::weights::{Weights, file_names_of};

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

/// The element types of a model's tensors.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WeightTypes {
    /// The type of most tensors, which `config.json` names.
    pub default: WeightType,
    /// The tensors with another type, under the names that the files have. Models with half precision may keep some of them in single precision.
    pub others: BTreeMap<String, WeightType>,
}

/// The file in a run's folder that says which types the original model has.
const FILE: &str = "weight_types.json";

impl WeightTypes {
    /// Returns one type for all tensors.
    pub fn all(default: WeightType) -> Self {
        Self { default, others: BTreeMap::new() }
    }

    /// Returns the type of a parameter, whatever name the original files have for it.
    pub(super) fn of(&self, parameter: &str) -> WeightType {
        let other = file_names_of(parameter).find_map(|name| self.others.get(&*name).copied());
        other.unwrap_or(self.default)
    }

    /// Returns the types of the tensors in a model directory. Those of other types count as single precision.
    pub(super) fn of_directory(dir: &Path) -> Result<Self, HfError> {
        let types: BTreeMap<String, WeightType> = Weights::open(dir)?.types()?;
        let count = |kind: &WeightType| types.values().filter(|other| *other == kind).count();
        let default = WeightType::ALL.into_iter().max_by_key(count).unwrap_or_default();
        Ok(Self { default, others: types.into_iter().filter(|(_, kind)| *kind != default).collect() })
    }

    /// Reads the types that [`WeightTypes::write`] wrote; single precision if there is no such file.
    pub(super) fn read(folder: &Path) -> Result<Self, HfError> {
        let path = folder.join(FILE);
        if path.is_file() { read_json(&path) } else { Ok(Self::default()) }
    }

    pub(super) fn write(&self, folder: &Path) -> Result<(), HfError> {
        let path = folder.join(FILE);
        let text = serde_json::json!(self).to_string();
        std::fs::write(&path, text).map_err(HfError::io("write", &path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_type_is_found_under_every_name_of_files() {
        let check = |stored: &str, parameter: &str| {
            let others = BTreeMap::from([(stored.to_owned(), WeightType::Float32)]);
            let types = WeightTypes { default: WeightType::Bfloat16, others };
            assert_eq!(types.of(parameter), WeightType::Float32, "{stored}");
            assert_eq!(types.of("model.other.weight"), WeightType::Bfloat16);
        };
        check("model.norm.weight", "model.norm.weight");
        check("norm.weight", "model.norm.weight");
        check("backbone.layers.0.mixer.A_log", "backbone.layers.0.mixer.A_log");
        check("model.layers.0.mixer.A_log", "backbone.layers.0.mixer.A_log");
        check("layers.0.mixer.A_log", "backbone.layers.0.mixer.A_log");
    }
}
