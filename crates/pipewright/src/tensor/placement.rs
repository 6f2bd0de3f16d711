//! Where the elements of a parameter are if several ranks compute each stage together.
//!
//! The ranks of a tensor group run the same stage on the same microbatch. Each of them holds some parameters whole, and a
//! slice of every other parameter. A [`Placement`] says so for one parameter, and is the same on all ranks of the group;
//! the rank's place in the group ([`TensorRank`]) then says which [`Slice`] it holds.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::shard::RowShard;

/// A rank's place among the ranks that compute a stage together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TensorRank {
    /// The place, from 0.
    pub index: u32,
    /// The number of ranks.
    pub of: u32,
}

/// How the ranks of a tensor group hold a parameter.
///
/// The parameter is cut into slices along one dimension. If there are fewer slices than ranks, neighbouring ranks hold
/// copies of the same slice. Or one rank holds the whole parameter, and the modules of the others do not have it. Or the
/// slices belong to different layers, each of which one rank computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Placement {
    /// The dimension along which the parameter is cut.
    pub dimension: usize,
    /// The number of slices, which divides the number of ranks unless they belong to different layers; 1 if every rank
    /// holds the whole parameter.
    pub slices: u32,
    /// Whether ranks with the same slice compute equal gradients, or parts of one.
    pub gradient: CopyGradient,
    /// Whether one rank holds the whole parameter, and the others nothing of it. Then there is one slice.
    pub on_one_rank: bool,
    /// The slice that the layer has, if other layers have the others.
    pub of_layer: Option<u32>,
}

/// The gradients of a slice that several ranks hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum CopyGradient {
    /// Every rank computes the same gradient, to the bit.
    Equal,
    /// Every rank computes a part of the gradient. The sum over the ranks is the gradient.
    Partial,
}

impl Placement {
    /// Every rank holds the whole parameter and computes its whole gradient.
    pub const REPLICATED: Self =
        Self { dimension: 0, slices: 1, gradient: CopyGradient::Equal, on_one_rank: false, of_layer: None };

    /// Every rank holds the whole parameter and computes a part of its gradient.
    pub const REPLICATED_PARTIAL: Self = Self { gradient: CopyGradient::Partial, ..Self::REPLICATED };

    /// One rank holds the whole parameter, such as an expert of a mixture, and the others nothing of it.
    pub const ON_ONE_RANK: Self = Self { on_one_rank: true, ..Self::REPLICATED };

    /// Returns the placement of a parameter that is cut into `slices` along `dimension`. Ranks with the same slice compute
    /// parts of its gradient.
    pub const fn split(dimension: usize, slices: u32) -> Self {
        Self { dimension, slices, ..Self::REPLICATED_PARTIAL }
    }

    /// Returns the placement of the slice `index` of a parameter that is cut into `slices` along `dimension`, if other layers
    /// have the other slices. All of them give the parameter the same path, on the same stage or on others. One rank computes
    /// each of their stages.
    pub const fn of_layer(dimension: usize, index: u32, slices: u32) -> Self {
        Self { dimension, slices, of_layer: Some(index), ..Self::REPLICATED }
    }

    /// Returns the number of ranks, of all ranks of a group, that hold the same slice.
    pub(crate) fn copies(self, ranks: u32) -> u32 {
        if self.on_one_rank { 1 } else { (ranks / self.slices.max(1)).max(1) }
    }

    /// Returns the slice of the parameter that `rank` holds, if it holds one.
    pub fn slice_of(self, rank: TensorRank) -> Slice {
        if self.on_one_rank {
            return Slice::WHOLE;
        }
        if let Some(index) = self.of_layer {
            let part = RowShard { index, of: self.slices };
            return Slice { dimension: self.dimension, part, copy: 0, copies: 1 };
        }
        let copies = self.copies(rank.of);
        let (index, copy) = (rank.index / copies, rank.index % copies);
        Slice { dimension: self.dimension, part: RowShard { index, of: self.slices }, copy, copies }
    }
}

/// The slice of a parameter that a rank holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// The dimension along which the parameter is cut.
    pub dimension: usize,
    /// The slice among all slices.
    pub(crate) part: RowShard,
    /// The rank's place among those that hold the same slice.
    pub copy: u32,
    /// The number of ranks that hold the same slice.
    pub copies: u32,
}

impl Slice {
    /// The whole parameter, on one rank.
    pub(crate) const WHOLE: Self = Self { dimension: 0, part: RowShard::WHOLE, copy: 0, copies: 1 };

    /// Returns the range of a dimension of this size that the slice has.
    pub fn range(self, size: usize) -> Range<usize> {
        self.part.rows(size)
    }

    /// Returns whether the slice is the whole parameter.
    pub fn is_whole(self) -> bool {
        self.part.of == 1
    }

    /// Returns the shape of the slice of a parameter of `whole` shape.
    pub fn shape(self, whole: &[usize]) -> Vec<usize> {
        let mut shape = whole.to_vec();
        if let Some(size) = shape.get_mut(self.dimension).filter(|_| !self.is_whole()) {
            *size = self.range(*size).len();
        }
        shape
    }

    /// Returns the elements of the slice from those of the whole parameter, which has this shape. Both are in row-major
    /// order.
    pub fn cut(self, elements: Vec<f32>, whole: &[usize]) -> Vec<f32> {
        if self.is_whole() {
            return elements;
        }
        let size = whole[self.dimension];
        let inner: usize = whole[self.dimension + 1..].iter().product();
        let Range { start, end } = self.range(size);
        let block = (size * inner).max(1);
        elements.chunks(block).flat_map(|block| &block[start * inner..end * inner]).copied().collect()
    }

    /// Returns whether this rank's copy counts for the gradient norm and for checkpoints.
    pub(crate) fn counts(self) -> bool {
        self.copy == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slices(placement: Placement, of: u32, elements: &[f32], whole: &[usize]) -> Vec<Vec<f32>> {
        let cut = |index| placement.slice_of(TensorRank { index, of }).cut(elements.to_vec(), whole);
        (0..of).map(cut).collect()
    }

    #[test]
    fn slices_cover_a_matrix_along_either_dimension() {
        let matrix = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        assert_eq!(slices(Placement::split(0, 2), 2, &matrix, &[2, 3]), [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]);
        let columns = slices(Placement::split(1, 3), 3, &matrix, &[2, 3]);
        assert_eq!(columns, [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]);
        assert_eq!(
            slices(Placement::split(1, 2), 2, &matrix, &[2, 3]),
            [vec![1.0, 2.0, 4.0, 5.0], vec![3.0, 6.0]]
        );
    }

    #[test]
    fn neighbours_hold_the_same_slice_if_there_are_fewer_slices() {
        let slice = |index| Placement::split(1, 2).slice_of(TensorRank { index, of: 4 });
        assert_eq!([0, 1, 2, 3].map(|rank| slice(rank).range(4)), [0..2, 0..2, 2..4, 2..4]);
        assert_eq!([0, 1, 2, 3].map(|rank| slice(rank).counts()), [true, false, true, false]);
        assert_eq!(slice(3).shape(&[5, 4]), [5, 2]);
        let whole = Placement::REPLICATED.slice_of(TensorRank { index: 3, of: 4 });
        assert!(whole.is_whole() && !whole.counts());
        let alone = Placement::ON_ONE_RANK.slice_of(TensorRank { index: 3, of: 4 });
        assert_eq!(alone, Slice::WHOLE);
        let of_layer = Placement::of_layer(1, 2, 3).slice_of(TensorRank { index: 0, of: 1 });
        assert_eq!((of_layer.range(7), of_layer.shape(&[5, 7])), (6..7, vec![5, 1]));
    }
}
