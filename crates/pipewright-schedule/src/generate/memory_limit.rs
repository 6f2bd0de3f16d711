//! The limit on the activations that a schedule may hold: one for all stages, or one for each.

use crate::generate::error::GenerateErrorKind;
use crate::generate::settings::Setting;
use crate::ids::StageIndex;

/// One value for all stages, or one for each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PerStage<T> {
    /// The same value for all stages.
    Same(T),
    /// The values of the stages, in order.
    Each(Vec<T>),
}

/// Refuses a list of another length than the number of stages, and a limit of 0.
pub(super) fn check_memory_limits(limit: &PerStage<u32>, stages: u32) -> Result<(), GenerateErrorKind> {
    let zero = match limit {
        PerStage::Same(value) => (*value == 0).then_some(0),
        PerStage::Each(values) if values.len() == stages as usize => {
            values.iter().position(|value| *value == 0)
        }
        PerStage::Each(values) => {
            let (setting, found) = (Setting::MemoryLimit, values.len());
            return Err(GenerateErrorKind::EntryCount { setting, found, stages });
        }
    };
    match zero {
        Some(stage) => Err(GenerateErrorKind::NoMemory { stage: StageIndex::new(stage as u32) }),
        None => Ok(()),
    }
}

/// Returns the limits of `stages` stages in order, which were checked.
pub(super) fn memory_limits(limit: &PerStage<u32>, stages: u32) -> Vec<u32> {
    match limit {
        PerStage::Same(value) => vec![*value; stages as usize],
        PerStage::Each(values) => values.clone(),
    }
}
