//! The stages with parameters that are trained, and what the backward of each stage computes.
//!
//! A stage whose parameters are all frozen has no weight gradients, so it has no `W`. If the stages before it
//! are frozen too, nothing needs the gradient of its inputs either: it runs forward only, and no gradient is
//! sent to it. A model with adapters on its upper layers has such stages.

use crate::ids::StageIndex;

/// The stages with parameters that are trained.
///
/// ```
/// use pipewright_schedule::StageIndex;
/// use pipewright_schedule::trained::{StageBackward, TrainedStages};
/// let trained = TrainedStages::of(&[false, true, false]);
/// let backwards = [0, 1, 2].map(|stage| trained.backward_of(StageIndex::new(stage)));
/// assert_eq!(backwards, [StageBackward::None, StageBackward::Whole, StageBackward::Inputs]);
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct TrainedStages {
    /// Whether each stage is trained; empty if all are.
    trained: Vec<bool>,
    /// The number of stages before the first one that is trained.
    below: u32,
}

/// What the backward of a stage computes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum StageBackward {
    /// Nothing: the stage runs forward only.
    None,
    /// The gradients of the inputs: the stage has `I` alone.
    Inputs,
    /// The gradients of inputs and weights: the stage has `B`, or `I` and `W`.
    #[default]
    Whole,
}

impl TrainedStages {
    /// All stages are trained.
    pub const ALL: Self = Self { trained: Vec::new(), below: 0 };

    /// Makes the set from a flag for each stage, which says whether it has parameters that are trained. If no
    /// stage has any, the result is [`TrainedStages::ALL`], because a program without backwards does not
    /// train.
    pub fn of(trained: &[bool]) -> Self {
        match trained.iter().position(|&is_trained| is_trained) {
            Some(first) if trained.contains(&false) => {
                Self { trained: trained.to_vec(), below: u32::try_from(first).unwrap_or(u32::MAX) }
            }
            _ => Self::ALL,
        }
    }

    /// Returns whether all stages are trained.
    pub fn are_all(&self) -> bool {
        self.trained.is_empty()
    }

    /// Returns what the backward of `stage` computes.
    #[inline]
    pub fn backward_of(&self, stage: StageIndex) -> StageBackward {
        if self.trained.get(stage.index()).copied().unwrap_or(true) {
            StageBackward::Whole
        } else if stage.get() < self.below {
            StageBackward::None
        } else {
            StageBackward::Inputs
        }
    }

    /// Returns whether `stage` runs backward.
    #[inline]
    pub fn runs_backward(&self, stage: StageIndex) -> bool {
        self.backward_of(stage) != StageBackward::None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_without_frozen_or_without_trained_stages_is_of_all() {
        assert_eq!(TrainedStages::of(&[true, true]), TrainedStages::ALL);
        assert_eq!(TrainedStages::of(&[false, false]), TrainedStages::ALL);
        assert!(!TrainedStages::of(&[true, false]).are_all());
        assert_eq!(TrainedStages::ALL.backward_of(StageIndex::new(7)), StageBackward::Whole);
    }
}
