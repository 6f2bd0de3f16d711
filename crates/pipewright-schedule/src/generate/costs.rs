//! What a schedule that is made to measure is measured with: times of actions, and limits, of each stage.
//!
//! Times are whole numbers of any one unit, such as nanoseconds, so that a schedule is the same on every
//! machine.

use crate::generate::error::GenerateError;
use crate::generate::settings::Setting;
use crate::ids::StageIndex;

/// The largest cost: a billion nanoseconds times a thousand, far more than any action takes, and small enough
/// that the times of the largest schedule cannot overflow.
pub const MAX_COST: u64 = 1_000_000_000_000;

/// One value for every stage, or one for each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PerStage<T> {
    /// The same value for every stage.
    Same(T),
    /// The values of the stages, in order.
    Each(Vec<T>),
}

/// What the actions of one stage take, for one microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StageCost {
    /// The time of `F`.
    pub forward: u64,
    /// The time of `I`.
    pub input_backward: u64,
    /// The time of `W`.
    pub weight_backward: u64,
}

/// What the actions of every stage take, and the way between two ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Costs {
    /// The times of the actions.
    pub stages: PerStage<StageCost>,
    /// The time from the end of an action until its result is on the neighbouring rank.
    pub hop: u64,
}

impl<T: Copy> PerStage<T> {
    /// The values of `stages` stages, in order.
    pub(super) fn expand(&self, setting: Setting, stages: u32) -> Result<Vec<T>, GenerateError> {
        match self {
            Self::Same(value) => Ok(vec![*value; stages as usize]),
            Self::Each(values) if values.len() == stages as usize => Ok(values.clone()),
            Self::Each(values) => Err(GenerateError::EntryCount { setting, found: values.len(), stages }),
        }
    }
}

impl Costs {
    /// `F`, `I` and `W` of one unit each on every stage, and no time between ranks: what the formulas of the
    /// papers assume.
    pub const UNIT: Self = Self {
        stages: PerStage::Same(StageCost { forward: 1, input_backward: 1, weight_backward: 1 }),
        hop: 0,
    };

    /// The costs of `stages` stages, in order, none above [`MAX_COST`].
    pub(super) fn expand(&self, stages: u32) -> Result<Vec<StageCost>, GenerateError> {
        let expanded = self.stages.expand(Setting::Costs, stages)?;
        let times =
            expanded.iter().flat_map(|stage| [stage.forward, stage.input_backward, stage.weight_backward]);
        match times.chain([self.hop]).find(|&cost| cost > MAX_COST) {
            Some(cost) => Err(GenerateError::CostTooLarge { cost }),
            None => Ok(expanded),
        }
    }
}

/// The limits of `stages` stages, in order, none of them 0.
pub(super) fn memory_limits(limit: &PerStage<u32>, stages: u32) -> Result<Vec<u32>, GenerateError> {
    let limits = limit.expand(Setting::MemoryLimit, stages)?;
    match (0..).map(StageIndex::new).zip(&limits).find(|(_, limit)| **limit == 0) {
        Some((stage, _)) => Err(GenerateError::NoMemory { stage }),
        None => Ok(limits),
    }
}
