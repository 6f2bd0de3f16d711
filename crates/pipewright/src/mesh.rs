//! The mesh of pipelines, replicas and tensor groups, and the coordinates of each rank of the world.
//!
//! A mesh has `data` replicas of a pipeline of `pipeline` ranks; each replica gets its part of the batch. At
//! each rank of a pipeline, `tensor` ranks of the world compute the stages together: each holds its shards of
//! the parameters. They are consecutive in the world, because they exchange the most data, and so are the
//! ranks of one replica.
//!
//! `shards` consecutive replicas form a shard group: together they hold the parameters once, each replica a
//! shard. Each shard group holds all parameters.
//!
//! `experts` consecutive replicas form an expert group: together they hold the experts of each mixture once,
//! each replica some of them. The other parameters are on every replica, or sharded.

use pipewright_schedule::Rank;
use serde::{Deserialize, Serialize};

use crate::collective::Group;
use crate::ids::WorldRank;

/// The sizes of a mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mesh {
    /// Ranks of one pipeline.
    pub pipeline: u32,
    /// Replicas of the pipeline.
    pub data: u32,
    /// The number of replicas in a shard group, a divisor of `data`; 1 if every replica holds all parameters.
    pub shards: u32,
    /// The number of replicas in an expert group, a divisor of `data`; 1 if every replica holds all experts.
    pub experts: u32,
    /// Ranks of the world that compute the stages of one rank of a pipeline together.
    pub tensor: u32,
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
}

/// A rank's coordinates in the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeshCoord {
    /// The replica's index, from 0.
    pub replica: u32,
    /// The rank within its pipeline.
    pub rank: Rank,
    /// The index among the ranks that compute the same stages together, from 0.
    pub tensor: u32,
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

    /// Returns the coordinates of a rank of the world.
    pub fn coord(&self, world: WorldRank) -> MeshCoord {
        let group = world.get() / self.tensor;
        MeshCoord {
            replica: group / self.pipeline,
            rank: Rank::new(group % self.pipeline),
            tensor: world.get() % self.tensor,
        }
    }

    /// Returns the ranks of all replicas with the same pipeline rank and the same index in their tensor
    /// groups; `None` for a rank outside the mesh.
    pub fn data_group(&self, world: WorldRank) -> Option<Group> {
        let coord = self.contains(world).then(|| self.coord(world))?;
        self.group((0..self.data).map(|replica| MeshCoord { replica, ..coord }), world)
    }

    /// Returns those ranks of [`Mesh::data_group`] that are in the rank's shard group: each holds another
    /// shard of the same parameters. `None` for a rank outside the mesh.
    pub fn shard_group(&self, world: WorldRank) -> Option<Group> {
        self.consecutive(world, self.shards)
    }

    /// Returns those ranks of [`Mesh::data_group`] that hold the same shard as the rank, one of each shard
    /// group; `None` for a rank outside the mesh.
    pub fn copy_group(&self, world: WorldRank) -> Option<Group> {
        self.one_of_each(world, self.shards)
    }

    /// Returns those ranks of [`Mesh::data_group`] that are in the rank's expert group: each holds other
    /// experts of the same mixtures. `None` for a rank outside the mesh.
    pub fn expert_group(&self, world: WorldRank) -> Option<Group> {
        self.consecutive(world, self.experts)
    }

    /// Returns those ranks of [`Mesh::data_group`] that hold the same experts as the rank, one of each expert
    /// group; `None` for a rank outside the mesh.
    pub fn expert_copy_group(&self, world: WorldRank) -> Option<Group> {
        self.one_of_each(world, self.experts)
    }

    /// Returns those ranks of [`Mesh::shard_group`] that hold the same experts as the rank: each holds other
    /// rows of them. `None` for a rank outside the mesh.
    pub fn expert_shard_group(&self, world: WorldRank) -> Option<Group> {
        let own = self.contains(world).then(|| self.coord(world))?;
        let index = own.replica.checked_rem(self.experts)?;
        let shards = self.shard_group(world)?;
        let coords = shards.members().iter().map(|&member| self.coord(member));
        self.group(coords.filter(|coord| coord.replica % self.experts == index), world)
    }

    /// Returns those ranks of [`Mesh::data_group`] that hold the same rows of the same experts as the rank;
    /// `None` for a rank outside the mesh.
    pub fn expert_row_group(&self, world: WorldRank) -> Option<Group> {
        self.one_of_each(world, self.shards.max(self.experts))
    }

    /// Returns the ranks of [`Mesh::data_group`] in the rank's group of `size` consecutive replicas.
    fn consecutive(&self, world: WorldRank, size: u32) -> Option<Group> {
        let coord = self.contains(world).then(|| self.coord(world))?;
        let first = coord.replica - coord.replica.checked_rem(size)?;
        let replicas = first..self.data.min(first.saturating_add(size));
        self.group(replicas.map(|replica| MeshCoord { replica, ..coord }), world)
    }

    /// Returns the ranks of [`Mesh::data_group`] with the rank's index in their groups of `size` consecutive
    /// replicas.
    fn one_of_each(&self, world: WorldRank, size: u32) -> Option<Group> {
        let coord = self.contains(world).then(|| self.coord(world))?;
        let index = coord.replica.checked_rem(size)?;
        let replicas = (index..self.data).step_by(size as usize);
        self.group(replicas.map(|replica| MeshCoord { replica, ..coord }), world)
    }

    /// Returns the ranks that compute the same stages together; `None` for a rank outside the mesh.
    pub fn tensor_group(&self, world: WorldRank) -> Option<Group> {
        let coord = self.contains(world).then(|| self.coord(world))?;
        self.group((0..self.tensor).map(|tensor| MeshCoord { tensor, ..coord }), world)
    }

    /// Returns all ranks of the replicas of a rank's expert group. If every replica holds all experts, these
    /// are the ranks of its own replica. `None` for a rank outside the mesh.
    pub fn model_group(&self, world: WorldRank) -> Option<Group> {
        let coord = self.contains(world).then(|| self.coord(world))?;
        let of_replica = self.pipeline * self.tensor;
        let first = (coord.replica - coord.replica.checked_rem(self.experts)?) * of_replica;
        let last = self.ranks()?.min(first + of_replica * self.experts);
        self.group((first..last).map(|rank| self.coord(WorldRank::new(rank))), world)
    }

    /// Returns the share of the batch that a replica gets in a repetition of a step: the share of the
    /// `rotation`-th next replica, or of the same replica of the `rotation`-th next expert group if replicas
    /// hold experts together. Each replica with an expert then gets the tokens that another replica with this
    /// expert had, in the same order.
    ///
    /// Sums over a group of replicas that holds the parameters together must add the same shares. So shares
    /// stay in such a group, unless the group is a part of an expert group and moves as a whole.
    pub(crate) fn share_of(&self, replica: u32, rotation: u32) -> u32 {
        let size = if self.shards > self.experts { self.shards } else { self.data };
        let first = replica - replica % size;
        let distance = rotation % (size / self.experts) * self.experts;
        first + (replica - first + distance) % size
    }

    /// Orders the contents of a group's ranks by the shares of the batch that their replicas get in a
    /// repetition of a step.
    pub(crate) fn by_share<T>(
        &self,
        group: &Group,
        contents: impl Iterator<Item = T>,
        rotation: u32,
    ) -> Vec<T> {
        let share = |&member: &WorldRank| self.share_of(self.coord(member).replica, rotation);
        let mut contents: Vec<(u32, T)> = group.members().iter().map(share).zip(contents).collect();
        contents.sort_by_key(|(share, _)| *share);
        contents.into_iter().map(|(_, content)| content).collect()
    }

    /// Returns the row of a rank in a step's timeline, which has one row for each tensor group.
    pub fn timeline_row(&self, world: WorldRank) -> Rank {
        Rank::new(world.get() / self.tensor)
    }

    fn contains(&self, world: WorldRank) -> bool {
        self.ranks().is_some_and(|ranks| world.get() < ranks)
    }

    fn group(&self, members: impl Iterator<Item = MeshCoord>, own: WorldRank) -> Option<Group> {
        Group::new(members.map(|coord| self.world_rank(coord)).collect(), own).ok()
    }

    /// Returns the rank of the world at the coordinates.
    pub fn world_rank(&self, coord: MeshCoord) -> WorldRank {
        WorldRank::new((coord.replica * self.pipeline + coord.rank.get()) * self.tensor + coord.tensor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shares move among `size` replicas, in `groups` expert groups.
    #[test]
    fn the_shares_of_an_expert_group_move_together() {
        for (data, shards, experts, size, groups) in [
            (1, 1, 1, 1, 1),
            (3, 1, 1, 3, 3),
            (4, 4, 1, 4, 4),
            (6, 3, 1, 3, 3),
            (4, 1, 2, 4, 2),
            (6, 1, 2, 6, 3),
            (4, 1, 4, 4, 1),
            (8, 4, 2, 4, 2),
            (8, 8, 2, 8, 4),
            (8, 8, 8, 8, 1),
            // The shards of each expert group move with it.
            (8, 2, 2, 8, 4),
            (8, 2, 4, 8, 2),
        ] {
            let mesh = Mesh { pipeline: 2, data, shards, experts, tensor: 1 };
            for rotation in 0..5 {
                let shares: Vec<u32> = (0..data).map(|replica| mesh.share_of(replica, rotation)).collect();
                assert_eq!(shares[0], (rotation % groups) * experts, "{mesh:?}, {rotation}");
                for (replica, share) in (0..data).zip(&shares) {
                    assert_eq!((replica % experts, replica / size), (share % experts, share / size));
                }
                let groups = [Mesh::data_group, Mesh::shard_group, Mesh::copy_group, Mesh::expert_row_group];
                for group in groups {
                    for rank in 0..2 * data {
                        let group = group(&mesh, WorldRank::new(rank)).expect("it is in the mesh");
                        let of =
                            group.members().iter().map(|&member| shares[mesh.coord(member).replica as usize]);
                        let sorted = mesh.by_share(&group, of, rotation);
                        assert!(sorted.is_sorted(), "{mesh:?}, {rotation}: {sorted:?}");
                    }
                }
                // A group that holds the parameters together has the shares of such a group.
                for group in shares.chunks(shards as usize) {
                    assert!(group.iter().all(|share| share / shards == group[0] / shards), "{mesh:?}");
                }
            }
        }
    }

    #[test]
    fn every_rank_has_its_own_coordinates() {
        let mesh = Mesh { pipeline: 3, data: 4, shards: 2, experts: 1, tensor: 2 };
        for world in (0..24).map(WorldRank::new) {
            let coord = mesh.coord(world);
            assert!(coord.rank.get() < 3 && coord.replica < 4 && coord.tensor < 2, "{coord:?}");
            assert_eq!(mesh.world_rank(coord), world);
            assert_eq!(mesh.timeline_row(world).get(), coord.replica * 3 + coord.rank.get());
            let data = mesh.data_group(world).expect("it is in the mesh");
            assert_eq!((data.members().len(), data.index()), (4, coord.replica as usize));
            assert_eq!(data.members()[data.index()], world);
            let groups = mesh.shard_group(world).zip(mesh.copy_group(world));
            let (shards, copies) = groups.expect("it is in the mesh");
            let indices = (shards.index() as u32, copies.index() as u32);
            assert_eq!(indices, (coord.replica % 2, coord.replica / 2));
            let replicas = |group: &Group| -> Vec<u32> {
                group.members().iter().map(|&member| mesh.coord(member).replica).collect()
            };
            assert_eq!(replicas(&shards), [[0, 1], [2, 3]][indices.1 as usize], "consecutive replicas");
            assert_eq!(replicas(&copies), [[0, 2], [1, 3]][indices.0 as usize], "one of each shard group");
            let groups = mesh.tensor_group(world).zip(mesh.model_group(world));
            let (tensor, replica) = groups.expect("it is in the mesh");
            let first = world.get() - coord.tensor;
            assert_eq!(tensor.members(), [first, first + 1].map(WorldRank::new), "neighbours");
            assert_eq!((replica.members().len(), replica.index()), (6, world.index() % 6));
        }
        assert_eq!(mesh.data_group(WorldRank::new(24)), None);
        let empty = Mesh { pipeline: 0, data: 1, shards: 1, experts: 1, tensor: 1 };
        assert_eq!(empty.data_group(WorldRank::new(0)), None);
    }

    #[test]
    fn an_expert_group_holds_the_model() {
        let mesh = Mesh { pipeline: 3, data: 4, shards: 1, experts: 2, tensor: 1 };
        assert_eq!(mesh.expert_groups(), Some(2));
        assert_eq!(Mesh { experts: 3, ..mesh }.expert_groups(), None);
        let of_six = |experts| Mesh { data: 6, experts, ..mesh }.expert_groups();
        assert_eq!([1, 2, 3, 6].map(of_six), [Some(6), Some(3), None, Some(1)]);
        let world = WorldRank::new(10);
        let members = |group: Option<Group>| -> Vec<u32> {
            group.expect("it is in the mesh").members().iter().map(|member| member.get()).collect()
        };
        assert_eq!(members(mesh.expert_group(world)), [7, 10]);
        assert_eq!(members(mesh.expert_copy_group(world)), [4, 10]);
        assert_eq!(members(mesh.model_group(world)), [6, 7, 8, 9, 10, 11]);
        assert_eq!(members(mesh.model_group(WorldRank::new(0))), [0, 1, 2, 3, 4, 5]);
    }

    /// Two replicas hold the experts together. Eight replicas form shard groups.
    #[test]
    fn replicas_of_a_shard_group_share_the_rows_of_their_experts() {
        let check = |shards, experts, replica, sharing: &[u32], copies: &[u32]| {
            let mesh = Mesh { pipeline: 1, data: 8, shards, experts, tensor: 1 };
            assert!(mesh.groups_fit(), "{mesh:?}");
            let members = |group: Option<Group>| -> Vec<u32> {
                group.expect("it is in the mesh").members().iter().map(|member| member.get()).collect()
            };
            let world = WorldRank::new(replica);
            assert_eq!(members(mesh.expert_shard_group(world)), sharing, "{mesh:?}");
            assert_eq!(members(mesh.expert_row_group(world)), copies, "{mesh:?}");
        };
        check(4, 2, 7, &[5, 7], &[3, 7]);
        check(8, 2, 3, &[1, 3, 5, 7], &[3]);
        check(2, 2, 3, &[3], &[1, 3, 5, 7]);
        check(2, 4, 3, &[3], &[3, 7]);
        check(1, 4, 3, &[3], &[3, 7]);
        check(4, 1, 5, &[4, 5, 6, 7], &[1, 5]);
        let fit = |data, shards, experts| Mesh { pipeline: 1, data, shards, experts, tensor: 1 }.groups_fit();
        assert!(fit(6, 6, 6) && fit(6, 2, 6) && fit(12, 6, 2) && fit(6, 1, 6));
        assert!(!fit(6, 3, 6) && !fit(6, 3, 2) && !fit(12, 6, 4));
    }
}
