//! The groups of ranks of a running world, by its mesh ([`Mesh`]), and the coordinates of each rank.
//!
//! The ranks of a tensor group are consecutive in the world, and so are the ranks of one replica.

use pipewright_schedule::Rank;
pub use pipewright_schedule::mesh::{DataParallelMode, Mesh, least_rows_of_shares, rows_of_shares};

use crate::collective::Group;
use crate::ids::WorldRank;

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

/// The groups of ranks of a world with this mesh.
pub trait RankGroups {
    /// Returns the mesh.
    fn mesh(&self) -> &Mesh;

    /// Returns the coordinates of a rank of the world.
    fn coord(&self, world: WorldRank) -> MeshCoord {
        let &Mesh { pipeline, tensor, .. } = self.mesh();
        let group = world.get() / tensor;
        MeshCoord {
            replica: group / pipeline,
            rank: Rank::new(group % pipeline),
            tensor: world.get() % tensor,
        }
    }

    /// Returns the rank of the world at the coordinates.
    fn world_rank(&self, coord: MeshCoord) -> WorldRank {
        let &Mesh { pipeline, tensor, .. } = self.mesh();
        WorldRank::new((coord.replica * pipeline + coord.rank.get()) * tensor + coord.tensor)
    }

    /// Returns the ranks of all replicas with the same pipeline rank and the same index in their tensor
    /// groups; `None` for a rank outside the mesh.
    fn data_group(&self, world: WorldRank) -> Option<Group> {
        let coord = coord_inside(self.mesh(), world)?;
        group(self.mesh(), (0..self.mesh().data).map(|replica| MeshCoord { replica, ..coord }), world)
    }

    /// Returns those ranks of [`RankGroups::data_group`] that are in the rank's shard group: each holds another
    /// shard of the same parameters. `None` for a rank outside the mesh.
    fn shard_group(&self, world: WorldRank) -> Option<Group> {
        consecutive(self.mesh(), world, self.mesh().shards)
    }

    /// Returns those ranks of [`RankGroups::data_group`] that hold the same shard as the rank, one of each shard
    /// group; `None` for a rank outside the mesh.
    fn copy_group(&self, world: WorldRank) -> Option<Group> {
        one_of_each(self.mesh(), world, self.mesh().shards)
    }

    /// Returns those ranks of [`RankGroups::data_group`] that are in the rank's expert group: each holds other
    /// experts of the same mixtures. `None` for a rank outside the mesh.
    fn expert_group(&self, world: WorldRank) -> Option<Group> {
        consecutive(self.mesh(), world, self.mesh().experts)
    }

    /// Returns those ranks of [`RankGroups::data_group`] that hold the same experts as the rank, one of each expert
    /// group; `None` for a rank outside the mesh.
    fn expert_copy_group(&self, world: WorldRank) -> Option<Group> {
        one_of_each(self.mesh(), world, self.mesh().experts)
    }

    /// Returns those ranks of [`RankGroups::shard_group`] that hold the same experts as the rank: each holds other
    /// rows of them. `None` for a rank outside the mesh.
    fn expert_shard_group(&self, world: WorldRank) -> Option<Group> {
        let own = coord_inside(self.mesh(), world)?;
        let index = own.replica.checked_rem(self.mesh().experts)?;
        let shards = self.shard_group(world)?;
        let coords = shards.members().iter().map(|&member| self.coord(member));
        group(self.mesh(), coords.filter(|coord| coord.replica % self.mesh().experts == index), world)
    }

    /// Returns those ranks of [`RankGroups::data_group`] that hold the same rows of the same experts as the rank;
    /// `None` for a rank outside the mesh.
    fn expert_row_group(&self, world: WorldRank) -> Option<Group> {
        one_of_each(self.mesh(), world, self.mesh().shards.max(self.mesh().experts))
    }

    /// Returns the ranks that compute the same stages together; `None` for a rank outside the mesh.
    fn tensor_group(&self, world: WorldRank) -> Option<Group> {
        let coord = coord_inside(self.mesh(), world)?;
        group(self.mesh(), (0..self.mesh().tensor).map(|tensor| MeshCoord { tensor, ..coord }), world)
    }

    /// Returns the ranks that exchange messages with a rank in the middle of an action, and this rank: the tensor groups of its
    /// stages in all replicas of its expert group. `None` for a rank outside the mesh.
    fn action_group(&self, world: WorldRank) -> Option<Group> {
        let own = coord_inside(self.mesh(), world)?.rank;
        let members = self.model_group(world)?;
        let coords = members.members().iter().map(|&member| self.coord(member));
        group(self.mesh(), coords.filter(|coord| coord.rank == own), world)
    }

    /// Returns all ranks of the replicas of a rank's expert group. If every replica holds all experts, these
    /// are the ranks of its own replica. `None` for a rank outside the mesh.
    fn model_group(&self, world: WorldRank) -> Option<Group> {
        let coord = coord_inside(self.mesh(), world)?;
        let of_replica = self.mesh().pipeline * self.mesh().tensor;
        let first = (coord.replica - coord.replica.checked_rem(self.mesh().experts)?) * of_replica;
        let last = self.mesh().ranks()?.min(first + of_replica * self.mesh().experts);
        group(self.mesh(), (first..last).map(|rank| self.coord(WorldRank::new(rank))), world)
    }

    /// Returns the row of a rank in a step's timeline, which has one row for each tensor group.
    fn timeline_row(&self, world: WorldRank) -> Rank {
        Rank::new(world.get() / self.mesh().tensor)
    }
}

impl RankGroups for Mesh {
    fn mesh(&self) -> &Mesh {
        self
    }
}

/// Returns the ranks of [`RankGroups::data_group`] in the rank's group of `size` consecutive replicas.
fn consecutive(mesh: &Mesh, world: WorldRank, size: u32) -> Option<Group> {
    let coord = coord_inside(mesh, world)?;
    let first = coord.replica - coord.replica.checked_rem(size)?;
    let replicas = first..mesh.data.min(first.saturating_add(size));
    group(mesh, replicas.map(|replica| MeshCoord { replica, ..coord }), world)
}

/// Returns the ranks of [`RankGroups::data_group`] with the rank's index in their groups of `size` consecutive
/// replicas.
fn one_of_each(mesh: &Mesh, world: WorldRank, size: u32) -> Option<Group> {
    let coord = coord_inside(mesh, world)?;
    let index = coord.replica.checked_rem(size)?;
    let replicas = (index..mesh.data).step_by(size as usize);
    group(mesh, replicas.map(|replica| MeshCoord { replica, ..coord }), world)
}

/// Orders the contents of a group's ranks by the shares of the batch that their replicas get in a
/// repetition of a step.
pub(crate) fn by_share<T>(
    mesh: &Mesh,
    group: &Group,
    contents: impl Iterator<Item = T>,
    rotation: u32,
) -> Vec<T> {
    let share = |&member: &WorldRank| mesh.share_of(mesh.coord(member).replica, rotation);
    let mut contents: Vec<(u32, T)> = group.members().iter().map(share).zip(contents).collect();
    contents.sort_by_key(|(share, _)| *share);
    contents.into_iter().map(|(_, content)| content).collect()
}

/// Returns the coordinates of a rank, unless it is outside the mesh.
fn coord_inside(mesh: &Mesh, world: WorldRank) -> Option<MeshCoord> {
    mesh.ranks().filter(|&ranks| world.get() < ranks).map(|_| mesh.coord(world))
}

fn group(mesh: &Mesh, members: impl Iterator<Item = MeshCoord>, own: WorldRank) -> Option<Group> {
    Group::new(members.map(|coord| mesh.world_rank(coord)).collect(), own).ok()
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
            let mesh = Mesh { pipeline: 2, data, shards, experts, tensor: 1, ..Mesh::default() };
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
                        let sorted = by_share(&mesh, &group, of, rotation);
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
        let mesh = Mesh { pipeline: 3, data: 4, shards: 2, experts: 1, tensor: 2, ..Mesh::default() };
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
        let empty = Mesh { pipeline: 0, data: 1, shards: 1, experts: 1, tensor: 1, ..Mesh::default() };
        assert_eq!(empty.data_group(WorldRank::new(0)), None);
    }

    #[test]
    fn an_expert_group_holds_the_model() {
        let mesh = Mesh { pipeline: 3, data: 4, shards: 1, experts: 2, tensor: 1, ..Mesh::default() };
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
            let mesh = Mesh { pipeline: 1, data: 8, shards, experts, tensor: 1, ..Mesh::default() };
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
        let fit = |data, shards, experts| {
            Mesh { pipeline: 1, data, shards, experts, tensor: 1, ..Mesh::default() }.groups_fit()
        };
        assert!(fit(6, 6, 6) && fit(6, 2, 6) && fit(12, 6, 2) && fit(6, 1, 6));
        assert!(!fit(6, 3, 6) && !fit(6, 3, 2) && !fit(12, 6, 4));
    }
}
