//! One stage in the making: a generator says which kind of action comes next, the cursor says of which
//! microbatch.
//!
//! For generators in which each kind of a stage's actions visits the microbatches in ascending order.

use crate::action::Action;
use crate::ids::{Microbatch, Rank, StageIndex};
use crate::overlap::Overlap;
use crate::placement::Placement;

/// A stage, and the microbatch of its next forward, input gradients and weight gradients.
#[derive(Debug, Clone)]
pub(super) struct StageCursor {
    stage: StageIndex,
    forwards: u32,
    inputs: u32,
    weights: u32,
}

impl StageCursor {
    /// The stage before its first action.
    pub(super) fn new(stage: StageIndex) -> Self {
        Self { stage, forwards: 0, inputs: 0, weights: 0 }
    }

    /// The cursors of a rank's stages, in the order of its chunks.
    pub(super) fn of_rank(placement: &Placement, rank: Rank) -> Vec<Self> {
        placement.stages_of(rank).iter().copied().map(Self::new).collect()
    }

    /// The next forward.
    pub(super) fn forward(&mut self) -> Action {
        Action::Forward { stage: self.stage, microbatch: next(&mut self.forwards) }
    }

    /// The next backward for the inputs alone.
    pub(super) fn input_backward(&mut self) -> Action {
        Action::InputBackward { stage: self.stage, microbatch: next(&mut self.inputs) }
    }

    /// The next backward for the weights alone.
    pub(super) fn weight_backward(&mut self) -> Action {
        Action::WeightBackward { stage: self.stage, microbatch: next(&mut self.weights) }
    }

    /// The next backward for both. No backward for the weights may be outstanding.
    pub(super) fn backward(&mut self) -> Action {
        self.weights += 1;
        Action::Backward { stage: self.stage, microbatch: next(&mut self.inputs) }
    }

    /// The next forward of this cursor together with the next backward of `other`.
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
