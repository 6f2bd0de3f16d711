//! The mesh of pipelines and replicas, and the coordinates of each rank of the world.
//!
//! A mesh has `data` replicas of a pipeline of `pipeline` ranks; each replica gets its part of the batch. The ranks of
//! one replica are consecutive in the world, because they exchange the most data.

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
}

/// Which part of the training state each replica holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DataParallelMode {
    /// Every replica holds all parameters, gradients and optimizer state of its stages.
    #[default]
    Replicated,
    /// Every replica holds a shard of each. Whole parameters are gathered from all replicas before their stage
    /// computes, as the program says (`UNSHARD`, `RESHARD`), and gradients are reduced to shards.
    Sharded,
}

impl DataParallelMode {
    /// Returns whether `replicas` replicas hold shards; a single replica always holds everything.
    pub fn shards(self, replicas: u32) -> bool {
        self == Self::Sharded && replicas > 1
    }
}

/// A rank's coordinates in the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeshCoord {
    /// The replica's index, from 0.
    pub replica: u32,
    /// The rank within its pipeline.
    pub rank: Rank,
}

impl Mesh {
    /// Returns the number of ranks of all replicas; `None` if it exceeds `u32`.
    pub fn ranks(&self) -> Option<u32> {
        self.pipeline.checked_mul(self.data)
    }

    /// Returns the coordinates of a rank of the world.
    pub fn coord(&self, world: WorldRank) -> MeshCoord {
        MeshCoord { replica: world.get() / self.pipeline, rank: Rank::new(world.get() % self.pipeline) }
    }

    /// Returns all ranks of the pipeline of a rank of the world; `None` for a rank outside the mesh.
    pub fn pipeline_group(&self, world: WorldRank) -> Option<Group> {
        let MeshCoord { replica, .. } = self.contains(world).then(|| self.coord(world))?;
        let ranks = (0..self.pipeline).map(|rank| MeshCoord { replica, rank: Rank::new(rank) });
        self.group(ranks, world)
    }

    /// Returns the ranks of all replicas with the same pipeline rank; `None` for a rank outside the mesh.
    pub fn data_group(&self, world: WorldRank) -> Option<Group> {
        let MeshCoord { rank, .. } = self.contains(world).then(|| self.coord(world))?;
        self.group((0..self.data).map(|replica| MeshCoord { replica, rank }), world)
    }

    fn contains(&self, world: WorldRank) -> bool {
        self.ranks().is_some_and(|ranks| world.get() < ranks)
    }

    fn group(&self, members: impl Iterator<Item = MeshCoord>, own: WorldRank) -> Option<Group> {
        Group::new(members.map(|coord| self.world_rank(coord)).collect(), own).ok()
    }

    /// Returns the rank of the world at the coordinates.
    pub fn world_rank(&self, coord: MeshCoord) -> WorldRank {
        WorldRank::new(coord.replica * self.pipeline + coord.rank.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_has_its_own_coordinates() {
        let mesh = Mesh { pipeline: 3, data: 4 };
        for world in (0..12).map(WorldRank::new) {
            let coord = mesh.coord(world);
            assert!(coord.rank.get() < 3 && coord.replica < 4, "{coord:?}");
            assert_eq!(mesh.world_rank(coord), world);
            let groups = mesh.pipeline_group(world).zip(mesh.data_group(world));
            let (pipeline, data) = groups.expect("it is in the mesh");
            assert_eq!((pipeline.members().len(), pipeline.place()), (3, coord.rank.index()));
            assert_eq!((data.members().len(), data.place()), (4, coord.replica as usize));
            assert!(pipeline.members()[pipeline.place()] == world && data.members()[data.place()] == world);
        }
        assert_eq!(mesh.data_group(WorldRank::new(12)), None);
        assert_eq!(Mesh { pipeline: 0, data: 1 }.pipeline_group(WorldRank::new(0)), None);
    }
}
