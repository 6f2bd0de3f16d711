//! The limit on the activations that a schedule may hold: one for all stages, or one for each.

use crate::generate::error::GenerateError;
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

/// Returns the limits of `stages` stages in order, and checks that none of them is 0.
pub(super) fn memory_limits(limit: &PerStage<u32>, stages: u32) -> Result<Vec<u32>, GenerateError> {
    let limits = match limit {
        PerStage::Same(value) => vec![*value; stages as usize],
        PerStage::Each(values) if values.len() == stages as usize => values.clone(),
        PerStage::Each(values) => {
            let (setting, found) = (Setting::MemoryLimit, values.len());
            return Err(GenerateError::EntryCount { setting, found, stages });
        }
    };
    match (0..).map(StageIndex::new).zip(&limits).find(|(_, limit)| **limit == 0) {
        Some((stage, _)) => Err(GenerateError::NoMemory { stage }),
        None => Ok(limits),
    }
}
