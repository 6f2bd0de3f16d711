//! Where the elements of a parameter are if several ranks compute each stage together.
//!
//! The ranks of a tensor group run the same stage on the same microbatch. Each of them holds some parameters
//! whole, and a shard of every other parameter. A [`Placement`] says so for one parameter, and is the same on
//! all ranks of the group; the rank's place in the group ([`TensorRank`]) then says which [`TensorShard`] it
//! holds.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// A rank's place among the ranks that compute a stage together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TensorRank {
    /// The place, from 0.
    pub index: u32,
    /// The number of ranks.
    pub of: u32,
}

/// A replica's place among the replicas that hold the experts of each mixture together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ExpertRank {
    /// The place, from 0.
    pub index: u32,
    /// The number of replicas.
    pub of: u32,
}

/// How the ranks of a tensor group hold a parameter, and whether every replica holds it.
///
/// The parameter is cut into shards along one dimension. If there are fewer shards than ranks, neighbouring
/// ranks hold copies of the same shard. Or one rank holds the whole parameter, and the modules of the others
/// do not have it. Or the shards belong to different layers, and one rank computes each of these layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Placement {
    /// The dimension along which the parameter is cut.
    pub dimension: usize,
    /// The number of shards, which divides the number of ranks unless they belong to different layers; 1 if
    /// every rank holds the whole parameter.
    pub shards: u32,
    /// Whether ranks with the same shard compute equal gradients, or parts of one.
    pub gradient: CopyGradient,
    /// Whether one rank holds the whole parameter, and the others nothing of it. Then there is one shard.
    pub on_one_rank: bool,
    /// Whether one replica of each expert group holds the parameter, and the modules of the others do not have
    /// it.
    pub on_one_replica: bool,
    /// The shard that the layer has, if other layers have the others.
    pub of_layer: Option<u32>,
}

/// The gradients of a shard that several ranks hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum CopyGradient {
    /// Every rank computes the same gradient, to the bit.
    Equal,
    /// Every rank computes a part of the gradient. The sum over the ranks is the gradient.
    Partial,
}

impl Placement {
    /// Every rank holds the whole parameter and computes its whole gradient.
    pub const REPLICATED: Self = Self {
        dimension: 0,
        shards: 1,
        gradient: CopyGradient::Equal,
        on_one_rank: false,
        on_one_replica: false,
        of_layer: None,
    };

    /// Every rank holds the whole parameter and computes a part of its gradient.
    pub const REPLICATED_PARTIAL: Self = Self { gradient: CopyGradient::Partial, ..Self::REPLICATED };

    /// One rank holds the whole parameter, such as an expert of a mixture, and the others nothing of it.
    pub const ON_ONE_RANK: Self = Self { on_one_rank: true, ..Self::REPLICATED };

    /// One replica of each expert group holds the parameter, such as an expert of a mixture.
    pub const ON_ONE_REPLICA: Self = Self { on_one_replica: true, ..Self::REPLICATED };

    /// Returns the placement of a parameter that is cut into `shards` along `dimension`. Ranks with the same
    /// shard compute parts of its gradient.
    pub const fn split(dimension: usize, shards: u32) -> Self {
        Self { dimension, shards, ..Self::REPLICATED_PARTIAL }
    }

    /// Returns the same placement on one replica of each expert group, as for a shard of an expert.
    #[must_use]
    pub const fn on_one_replica(self) -> Self {
        Self { on_one_replica: true, ..self }
    }

    /// Returns the placement of the shard `index` of a parameter that is cut into `shards` along `dimension`,
    /// if other layers have the other shards. All of them give the parameter the same path, on the same stage
    /// or on others. One rank computes each of their stages.
    pub const fn of_layer(dimension: usize, index: u32, shards: u32) -> Self {
        Self { dimension, shards, of_layer: Some(index), ..Self::REPLICATED }
    }

    /// Returns the number of ranks, of all ranks of a group, that hold the same shard.
    pub(crate) fn copies(self, ranks: u32) -> u32 {
        if self.on_one_rank { 1 } else { (ranks / self.shards.max(1)).max(1) }
    }

    /// Returns the shard of the parameter that `rank` holds, if it holds one.
    pub fn shard_of(self, rank: TensorRank) -> TensorShard {
        if self.on_one_rank {
            return TensorShard::WHOLE;
        }
        if let Some(index) = self.of_layer {
            return TensorShard { dimension: self.dimension, index, of: self.shards, copy: 0, copies: 1 };
        }
        let copies = self.copies(rank.of);
        let (index, copy) = (rank.index / copies, rank.index % copies);
        TensorShard { dimension: self.dimension, index, of: self.shards, copy, copies }
    }
}

/// The shard of a parameter that a tensor rank holds. If parameters are sharded over replicas, each replica
/// holds some of its rows, which are a row shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorShard {
    /// The dimension along which the parameter is cut.
    pub dimension: usize,
    /// The shard's index among all shards of the parameter.
    pub(crate) index: u32,
    /// The number of shards.
    pub(crate) of: u32,
    /// The rank's index among the ranks that hold the same shard.
    pub copy: u32,
    /// The number of ranks that hold the same shard.
    pub copies: u32,
}

impl TensorShard {
    /// The whole parameter, on one rank.
    pub(crate) const WHOLE: Self = Self { dimension: 0, index: 0, of: 1, copy: 0, copies: 1 };

    /// Returns the range of a dimension of this size that the shard has.
    pub fn range(self, size: usize) -> Range<usize> {
        range_of_shard(self.index, self.of, size)
    }

    /// Returns whether the shard is the whole parameter.
    pub fn is_whole(self) -> bool {
        self.of == 1
    }

    /// Returns the shape of the shard of a parameter of `whole` shape.
    pub fn shape(self, whole: &[usize]) -> Vec<usize> {
        let mut shape = whole.to_vec();
        if let Some(size) = shape.get_mut(self.dimension).filter(|_| !self.is_whole()) {
            *size = self.range(*size).len();
        }
        shape
    }

    /// Returns the elements of the shard from the elements of the whole parameter, which has this shape. Both
    /// are in row-major order.
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

/// Returns the range of a dimension of this size that the shard `index` of `of` has. The last shards may be
/// empty.
pub(super) fn range_of_shard(index: u32, of: u32, size: usize) -> Range<usize> {
    let length = size.div_ceil(of as usize);
    let start = (length * index as usize).min(size);
    start..(start + length).min(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shards(placement: Placement, of: u32, elements: &[f32], whole: &[usize]) -> Vec<Vec<f32>> {
        let cut = |index| placement.shard_of(TensorRank { index, of }).cut(elements.to_vec(), whole);
        (0..of).map(cut).collect()
    }

    #[test]
    fn shards_cover_a_matrix_along_either_dimension() {
        let matrix = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        assert_eq!(shards(Placement::split(0, 2), 2, &matrix, &[2, 3]), [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]);
        let columns = shards(Placement::split(1, 3), 3, &matrix, &[2, 3]);
        assert_eq!(columns, [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]);
        assert_eq!(
            shards(Placement::split(1, 2), 2, &matrix, &[2, 3]),
            [vec![1.0, 2.0, 4.0, 5.0], vec![3.0, 6.0]]
        );
    }

    #[test]
    fn neighbours_hold_the_same_shard_if_there_are_fewer_shards() {
        let shard = |index| Placement::split(1, 2).shard_of(TensorRank { index, of: 4 });
        assert_eq!([0, 1, 2, 3].map(|rank| shard(rank).range(4)), [0..2, 0..2, 2..4, 2..4]);
        assert_eq!([0, 1, 2, 3].map(|rank| shard(rank).counts()), [true, false, true, false]);
        assert_eq!(shard(3).shape(&[5, 4]), [5, 2]);
        let whole = Placement::REPLICATED.shard_of(TensorRank { index: 3, of: 4 });
        assert!(whole.is_whole() && !whole.counts());
        let alone = Placement::ON_ONE_RANK.shard_of(TensorRank { index: 3, of: 4 });
        assert_eq!(alone, TensorShard::WHOLE);
        let of_layer = Placement::of_layer(1, 2, 3).shard_of(TensorRank { index: 0, of: 1 });
        assert_eq!((of_layer.range(7), of_layer.shape(&[5, 7])), (6..7, vec![5, 1]));
    }
}
