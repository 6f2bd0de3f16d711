//! The mistakes in a profile that its own checks do not find: units, and figures of another run.

use pipewright::tensor::Precision;
use thiserror::Error;

/// A profile that has another unit, or is not of the run.
#[derive(Debug, Error)]
pub enum ProfileMismatch {
    /// A key of a profile has another unit.
    #[error("`{key}` has a unit that profiles do not use; times are in seconds and sizes in bytes")]
    Unit { key: String, meant: &'static str },
    /// A profile has another number of layers than the model.
    #[error("the profile has {found} layers, and the model of the configuration has {expected}")]
    OtherLayers { found: u64, expected: usize },
    /// A layer has another size in the profile than in the model.
    #[error("`{key}` is {found}, and layer {layer} of the model ({kind}) has {expected}")]
    OtherLayer { key: &'static str, layer: usize, kind: String, found: u64, expected: u64 },
    /// A profile was measured on another device.
    #[error("the profile is of the device {found}, and the configuration computes on {expected}")]
    OtherDevice { found: String, expected: String },
    /// A profile was measured with another value of a setting on which its figures depend.
    #[error("`{key}` of the profile is {found}, and `{setting}` of the configuration is {expected}")]
    OtherSetting { key: &'static str, found: u32, setting: &'static str, expected: u32 },
    /// A profile was measured in another precision.
    #[error("the profile is of the precision {found}, and the configuration computes in {expected}")]
    OtherPrecision { found: String, expected: Precision },
}

impl ProfileMismatch {
    /// Returns what to do about it.
    pub(super) fn advice(&self) -> String {
        match self {
            Self::Unit { meant, .. } => format!("write `{meant}`, and convert the value"),
            Self::OtherPrecision { expected, .. } => format!(
                "`pipewright profile` with this configuration measures one; in a profile that is written by hand, write \
                 `precision = \"{expected}\"` below `[device]`"
            ),
            Self::OtherLayers { .. }
            | Self::OtherLayer { .. }
            | Self::OtherDevice { .. }
            | Self::OtherSetting { .. } => {
                "use the profile of this run: `pipewright profile` with its configuration measures one".into()
            }
        }
    }
}
