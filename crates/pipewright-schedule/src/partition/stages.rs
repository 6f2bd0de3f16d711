//! The result of a partition: the layers of each stage.

use std::ops::Range;

use crate::ids::StageIndex;

/// Contiguous ranges of layers, one for each stage, that cover a model without gaps or overlaps. No range is
/// empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partition {
    /// The first layer of each stage, ascending, followed by the number of layers.
    starts: Vec<usize>,
}

impl Partition {
    /// Cuts into the same number of layers for each stage; the first stages take the remainder. There are at
    /// least as many layers as stages.
    pub(super) fn even(layers: usize, stages: usize) -> Self {
        let (base, larger) = (layers / stages, layers % stages);
        Self::from_starts((0..stages).map(|stage| stage * base + stage.min(larger)).collect(), layers)
    }

    /// Makes a partition from the first layer of each stage and the number of layers. The first layers must
    /// begin with 0 and ascend.
    pub(crate) fn from_starts(mut starts: Vec<usize>, layers: usize) -> Self {
        starts.push(layers);
        debug_assert!(
            starts[0] == 0 && starts.is_sorted_by(|a, b| a < b),
            "stages are neither empty nor reversed"
        );
        Self { starts }
    }

    /// The number of stages.
    pub fn stages(&self) -> u32 {
        self.starts.len() as u32 - 1
    }

    /// The number of layers of all stages together.
    pub fn layers(&self) -> usize {
        self.starts[self.starts.len() - 1]
    }

    /// The layers of `stage`; an empty range at the end of the model if there is no such stage.
    pub fn range(&self, stage: StageIndex) -> Range<usize> {
        match self.starts.get(stage.index()..stage.index().saturating_add(2)) {
            Some(&[start, end]) => start..end,
            _ => self.layers()..self.layers(),
        }
    }

    /// The layers of every stage, in stage order.
    pub fn ranges(&self) -> impl Iterator<Item = Range<usize>> {
        self.starts.windows(2).map(|pair| pair[0]..pair[1])
    }

    /// Returns the sum of `weights`, which has one entry for each layer, over each stage. Missing entries
    /// count as 0.
    pub fn weights(&self, weights: &[u64]) -> Vec<u128> {
        let weight = |layer| weights.get(layer).map_or(0, |&weight| u128::from(weight));
        self.ranges().map(|range| range.map(weight).sum()).collect()
    }
}
