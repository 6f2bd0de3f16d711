//! The mesh of all ranks: pipelines, their replicas, tensor groups, and the ranks that divide sequences and
//! experts. It also says which part of the training state each replica holds.
//!
//! A mesh has `data` replicas of a pipeline of `pipeline` ranks; each replica gets its part of the batch. At
//! each rank of a pipeline, `tensor` ranks compute the stages together: each holds its shards of the
//! parameters. They are consecutive, because they exchange the most data.
//!
//! `shards` consecutive replicas form a shard group: together they hold the parameters once, each replica a
//! shard. Each shard group holds all parameters.
//!
//! `experts` consecutive replicas form an expert group: together they hold the experts of each mixture once,
//! each replica some of them. The other parameters are on every replica, or sharded.

use serde::{Deserialize, Serialize};

use crate::divisor::greatest_common_divisor;

/// The sizes of a mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mesh {
    /// Ranks of one pipeline.
    pub pipeline: u32,
    /// Replicas of the pipeline.
    pub data: u32,
    /// The number of replicas in a shard group, a divisor of `data`; 1 if every replica holds all parameters.
    pub shards: u32,
    /// The number of replicas in an expert group, a divisor of `data`; 1 if every replica holds all experts.
    /// In plans for clusters, these are groups of any ranks of a stage, not of replicas alone.
    pub experts: u32,
    /// Ranks that compute the stages of one rank of a pipeline together.
    pub tensor: u32,
    /// Ranks that divide each sequence.
    pub context: u32,
    /// The numbering of the ranks.
    pub order: MeshOrder,
}

/// The numbering of ranks after the tensor-parallel ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum MeshOrder {
    /// The replicas of a stage have consecutive numbers.
    Replicas,
    /// The ranks of a pipeline have consecutive numbers, as the runtime numbers them.
    #[default]
    Pipeline,
}

/// Which part of the training state each replica holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DataParallelMode {
    /// Every replica holds all parameters, gradients and optimizer state of its stages.
    #[default]
    Replicated,
    /// Every replica holds a shard of each. Whole parameters are gathered from all replicas before their
    /// stage computes, as the program says (`UNSHARD`, `RESHARD`), and gradients are reduced to shards.
    Sharded,
    /// The replicas form groups of `shards` consecutive ones. Within a group, each replica holds a shard, as
    /// in [`DataParallelMode::Sharded`]; parameters are gathered from the group alone. Gradients are reduced
    /// to shards in each group, and then summed over the groups.
    Hybrid {
        /// The replicas of a group. The number of all replicas is a multiple of it.
        shards: u32,
    },
}

/// The tensors that replicas shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ShardedState {
    /// Nothing.
    Nothing,
    /// The state of the optimizer.
    Optimizer,
    /// Gradients and the state of the optimizer.
    Gradients,
    /// Parameters, gradients and the state of the optimizer.
    Parameters,
}

impl ShardedState {
    /// Returns its name in files and options.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nothing => "none",
            Self::Optimizer => "optimizer",
            Self::Gradients => "gradients",
            Self::Parameters => "parameters",
        }
    }

    /// Returns how many of `replicas` replicas hold one copy of the parameters of a stage together.
    pub fn shards(self, replicas: u32) -> u32 {
        match self {
            Self::Nothing | Self::Optimizer => 1,
            Self::Gradients | Self::Parameters => replicas,
        }
    }
}

impl DataParallelMode {
    /// Returns the number of replicas, out of `replicas`, that hold the parameters together, each a shard; 1
    /// if every replica holds all parameters.
    pub fn shards(self, replicas: u32) -> u32 {
        match self {
            Self::Replicated => 1,
            Self::Sharded => replicas.max(1),
            Self::Hybrid { shards } => shards,
        }
    }

    /// Returns the same for any number of replicas: all of them hold the parameters together if the groups do
    /// not divide them.
    pub fn shards_that_divide(self, replicas: u32) -> u32 {
        match self {
            Self::Hybrid { shards } if shards == 0 || !replicas.is_multiple_of(shards) => replicas.max(1),
            mode => mode.shards(replicas),
        }
    }
}

/// Divides `rows`, which are one microbatch of every replica together, by the shares of the replicas. Returns the rows
/// of a microbatch of each replica; `None` if one of them would not be a whole number from 1.
pub fn rows_of_shares(rows: u64, shares: &[u32]) -> Option<Vec<u32>> {
    let all = sum_of(shares);
    let part = |&share: &u32| {
        let parts = u128::from(rows) * u128::from(share);
        let own = parts.checked_div(all).filter(|own| *own > 0 && own * all == parts)?;
        u32::try_from(own).ok()
    };
    shares.iter().map(part).collect()
}

/// Returns the fewest rows that [`rows_of_shares`] divides, if no share is 0. It divides the multiples of this number
/// and no others.
pub fn least_rows_of_shares(shares: &[u32]) -> u64 {
    let common = shares.iter().fold(0, |common, &share| greatest_common_divisor(common, share.into()));
    u64::try_from(sum_of(shares) / u128::from(common.max(1))).unwrap_or(u64::MAX).max(1)
}

fn sum_of(shares: &[u32]) -> u128 {
    shares.iter().map(|&share| u128::from(share)).sum()
}

impl Default for Mesh {
    /// One rank.
    fn default() -> Self {
        Self {
            pipeline: 1,
            data: 1,
            shards: 1,
            experts: 1,
            tensor: 1,
            context: 1,
            order: MeshOrder::default(),
        }
    }
}

impl Mesh {
    /// Returns the number of ranks of all replicas; `None` if it exceeds `u32`.
    pub fn ranks(&self) -> Option<u32> {
        self.pipeline.checked_mul(self.data)?.checked_mul(self.tensor)
    }

    /// Returns the number of shard groups; each group holds all parameters. `None` if the replicas do not
    /// form groups of equal size.
    pub fn shard_groups(&self) -> Option<u32> {
        self.groups_of(self.shards)
    }

    /// Returns the number of expert groups; each group holds all experts. `None` if the replicas do not form
    /// groups of equal size, or the size is neither a power of two nor the number of all replicas. The sums
    /// of the replicas of a group are added before the sums of the groups, which for other sizes is another
    /// order than without groups.
    pub fn expert_groups(&self) -> Option<u32> {
        let has_order_of_all = self.experts.is_power_of_two() || self.experts == self.data;
        self.groups_of(self.experts).filter(|_| has_order_of_all)
    }

    /// Returns whether shard groups and expert groups fit each other: one of the sizes divides the other, and
    /// a sum over an expert group has the order of the sums in shard groups.
    pub fn groups_fit(&self) -> bool {
        let Self { data, shards, experts, .. } = *self;
        let divides = shards.is_multiple_of(experts) || experts.is_multiple_of(shards);
        divides && (experts.is_power_of_two() || shards.is_power_of_two() || shards == data)
    }

    /// Returns the sizes of expert groups that the replicas can form and that fit the shard groups.
    pub fn expert_sizes(&self) -> Vec<u32> {
        let powers = (0..u32::BITS).map(|exponent| 1 << exponent).take_while(|size| *size < self.data);
        let meshes = powers.chain([self.data]).map(|experts| Self { experts, ..*self });
        let fits = |mesh: &Self| mesh.expert_groups().is_some() && mesh.groups_fit();
        meshes.filter(fits).map(|mesh| mesh.experts).collect()
    }

    fn groups_of(&self, size: u32) -> Option<u32> {
        let is_even = size > 0 && self.data.is_multiple_of(size);
        is_even.then(|| self.data / size)
    }

    /// Returns the share of the batch that a replica gets in a repetition of a step: the share of the
    /// `rotation`-th next replica, or of the same replica of the `rotation`-th next expert group if replicas
    /// hold experts together. Each replica with an expert then gets the tokens that another replica with this
    /// expert had, in the same order.
    ///
    /// Sums over a group of replicas that holds the parameters together must add the same shares. So shares
    /// stay in such a group, unless the group is a part of an expert group and moves as a whole.
    pub fn share_of(&self, replica: u32, rotation: u32) -> u32 {
        let size = if self.shards > self.experts { self.shards } else { self.data };
        let first = replica - replica % size;
        let distance = rotation % (size / self.experts) * self.experts;
        first + (replica - first + distance) % size
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_that_do_not_divide_the_replicas_become_one() {
        let shards = |mode: DataParallelMode| [1, 4, 6, 8].map(|replicas| mode.shards_that_divide(replicas));
        assert_eq!(shards(DataParallelMode::Replicated), [1, 1, 1, 1]);
        assert_eq!(shards(DataParallelMode::Sharded), [1, 4, 6, 8]);
        assert_eq!(shards(DataParallelMode::Hybrid { shards: 4 }), [1, 4, 6, 4]);
    }

    #[test]
    fn shares_divide_multiples_of_their_least_rows() {
        assert_eq!(rows_of_shares(8, &[3, 1]), Some(vec![6, 2]));
        assert_eq!(rows_of_shares(8, &[6, 2]), Some(vec![6, 2]));
        assert_eq!(rows_of_shares(3, &[2, 1]), Some(vec![2, 1]));
        for (rows, shares) in [(7, [3, 1]), (0, [3, 1]), (8, [1, 0]), (0, [0, 0]), (1 << 33, [3, 1])] {
            assert_eq!(rows_of_shares(rows, &shares), None, "{rows}, {shares:?}");
        }
        let all = 2 * u64::from(u32::MAX);
        assert_eq!(rows_of_shares(all, &[u32::MAX, u32::MAX]), Some(vec![u32::MAX; 2]));
        assert_eq!(rows_of_shares(u64::MAX, &[u32::MAX, 1]), None);
        assert_eq!(rows_of_shares(6, &[]), Some(Vec::new()));
        for (shares, least) in [(&[3, 1][..], 4), (&[6, 2], 4), (&[5], 1), (&[], 1), (&[0, 0], 1)] {
            assert_eq!(least_rows_of_shares(shares), least, "{shares:?}");
        }
    }
}
