//! A cursor in the actions of a stage: the generator chooses the kind of the next action, and the cursor adds
//! the microbatch.
//!
//! It serves generators in which each kind of action of a stage visits the microbatches in ascending order.

use crate::action::Action;
use crate::ids::{Microbatch, Rank, StageIndex};
use crate::overlap::Overlap;
use crate::placement::Placement;

/// A stage, and the microbatch of its next forward, input backward and weight backward.
#[derive(Debug, Clone)]
pub(super) struct StageCursor {
    stage: StageIndex,
    forwards: u32,
    inputs: u32,
    weights: u32,
}

impl StageCursor {
    /// Makes a cursor before the first action of `stage`.
    pub(super) fn new(stage: StageIndex) -> Self {
        Self { stage, forwards: 0, inputs: 0, weights: 0 }
    }

    /// Makes the cursors of a rank's stages, in the order of its chunks.
    pub(super) fn of_rank(placement: &Placement, rank: Rank) -> Vec<Self> {
        placement.stages_of(rank).iter().copied().map(Self::new).collect()
    }

    /// Returns the next forward.
    pub(super) fn forward(&mut self) -> Action {
        Action::Forward { stage: self.stage, microbatch: next(&mut self.forwards) }
    }

    /// Returns the next backward for the inputs.
    pub(super) fn input_backward(&mut self) -> Action {
        Action::InputBackward { stage: self.stage, microbatch: next(&mut self.inputs) }
    }

    /// Returns the next backward for the weights.
    pub(super) fn weight_backward(&mut self) -> Action {
        Action::WeightBackward { stage: self.stage, microbatch: next(&mut self.weights) }
    }

    /// Returns the next full backward. No backward for the weights may be pending.
    pub(super) fn backward(&mut self) -> Action {
        self.weights += 1;
        Action::Backward { stage: self.stage, microbatch: next(&mut self.inputs) }
    }

    /// Returns the overlap of the next forward of this stage and the next full backward of `other`.
    pub(super) fn overlap(&mut self, other: &mut Self) -> Action {
        other.weights += 1;
        let forward = (self.stage, next(&mut self.forwards));
        let overlap = Overlap::new(forward, (other.stage, next(&mut other.inputs)));
        Action::Overlap(overlap.expect("the generator keeps to the microbatches that an overlap holds"))
    }
}

fn next(counter: &mut u32) -> Microbatch {
    *counter += 1;
    Microbatch::new(*counter - 1)
}
