//! Which part of a boundary's tensor a message has, if several ranks compute each stage together.
//!
//! Each rank of a tensor group sends a part of a boundary's tensor to the rank of the next stage that has its place
//! in the group: the part that it has ([`Spread`](super::Spread)), or a part of the tensor that all have. The receivers
//! put the parts together if they need the whole. So the ranks send the bytes of one tensor and not of one tensor each.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::placement::{Placement, TensorRank};

/// The part of a tensor that a message has. It is sent with the tensor and checked by the receiver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Layout {
    /// The sender's place in its tensor group.
    pub rank: TensorRank,
    /// The dimension along which the tensor is cut; `None` if the message has the whole tensor.
    pub dimension: Option<usize>,
    /// The shape of the whole tensor.
    pub shape: Vec<usize>,
}

impl Layout {
    /// Returns the shape of the part.
    pub(crate) fn part(&self) -> Vec<usize> {
        match self.dimension {
            Some(dimension) => {
                Placement::split(dimension, self.rank.of).shard_of(self.rank).shape(&self.shape)
            }
            None => self.shape.clone(),
        }
    }

    /// Returns the dimension of the cut, and the part's range of it; `None` if the part is the whole.
    pub(crate) fn range(&self) -> Option<(usize, Range<usize>)> {
        let dimension = self.dimension?;
        let part = Placement::split(dimension, self.rank.of).shard_of(self.rank);
        Some((dimension, part.range(*self.shape.get(dimension)?)))
    }

    /// Returns the same layout for another rank of the group.
    pub(crate) fn for_rank(&self, index: u32) -> Self {
        Self { rank: TensorRank { index, ..self.rank }, ..self.clone() }
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank: TensorRank { index, of }, dimension, shape } = self;
        match dimension {
            Some(dimension) => write!(f, "part {index} of {of} along dimension {dimension} of {shape:?}"),
            None => write!(f, "the whole of {shape:?} on rank {index} of {of}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Tensor};

    use super::*;
    use crate::tensor::Value;

    #[test]
    fn a_boundary_is_cut_along_the_first_dimension_that_has_a_part_for_every_rank() {
        let rank = TensorRank { index: 1, of: 2 };
        let cut = |shape: [usize; 3]| {
            let whole = Value::of(Tensor::<3>::ones(shape, &Device::flex()));
            let layout = whole.layout_for(rank);
            let part = whole.constant().part_for(rank);
            assert_eq!(part.shape().to_vec(), layout.part());
            assert!(!part.requires_grad(), "it stays a constant");
            (layout.dimension, layout.part())
        };
        assert_eq!(cut([1, 6, 4]), (Some(1), vec![1, 3, 4]));
        assert_eq!(cut([3, 6, 4]), (Some(0), vec![1, 6, 4]));
        assert_eq!(cut([1, 1, 1]), (None, vec![1, 1, 1]));
    }
}
