//! How many times the pipeline stands side by side, and which rank of the world is where.
//!
//! A mesh has `pipeline` ranks along the model and `data` replicas of that row, each with its share of the batch. Ranks
//! of one replica are neighbours in the world, since they exchange the most.

use pipewright_schedule::Rank;
use serde::{Deserialize, Serialize};

use crate::collective::Group;

/// The sizes of a mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mesh {
    /// Ranks of one pipeline.
    pub pipeline: u32,
    /// Replicas of it.
    pub data: u32,
}

/// What each replica of a pipeline holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DataParallelMode {
    /// All parameters, gradients and optimizer state of its stages.
    #[default]
    Replicated,
    /// Its part of each: whole parameters are gathered from all replicas before their stage computes, as the program
    /// says (`UNSHARD`, `RESHARD`), and gradients are summed over the replicas into parts.
    Sharded,
}

impl DataParallelMode {
    /// Whether each of so many replicas holds a part of the parameters; one alone has all of them.
    pub fn shards(self, replicas: u32) -> bool {
        self == Self::Sharded && replicas > 1
    }
}

/// A rank's place in a mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeshCoord {
    /// The replica, from 0.
    pub replica: u32,
    /// The rank within its pipeline.
    pub rank: Rank,
}

impl Mesh {
    /// Ranks of all replicas; none when there are more than a world can have.
    pub fn ranks(&self) -> Option<u32> {
        self.pipeline.checked_mul(self.data)
    }

    /// Where a rank of the world sits.
    pub fn coord(&self, world: Rank) -> MeshCoord {
        MeshCoord { replica: world.get() / self.pipeline, rank: Rank::new(world.get() % self.pipeline) }
    }

    /// All ranks of the pipeline in which a rank of the world sits; none for a rank outside the mesh.
    pub fn pipeline_group(&self, world: Rank) -> Option<Group> {
        let MeshCoord { replica, .. } = self.contains(world).then(|| self.coord(world))?;
        let ranks = (0..self.pipeline).map(|rank| MeshCoord { replica, rank: Rank::new(rank) });
        self.group(ranks, world)
    }

    /// The ranks that have, in each replica, the place of a rank of the world; none for a rank outside the mesh.
    pub fn data_group(&self, world: Rank) -> Option<Group> {
        let MeshCoord { rank, .. } = self.contains(world).then(|| self.coord(world))?;
        self.group((0..self.data).map(|replica| MeshCoord { replica, rank }), world)
    }

    fn contains(&self, world: Rank) -> bool {
        self.ranks().is_some_and(|ranks| world.get() < ranks)
    }

    fn group(&self, seats: impl Iterator<Item = MeshCoord>, own: Rank) -> Option<Group> {
        Group::new(seats.map(|coord| self.world_rank(coord)).collect(), own).ok()
    }

    /// Which rank of the world sits there.
    pub fn world_rank(&self, coord: MeshCoord) -> Rank {
        Rank::new(coord.replica * self.pipeline + coord.rank.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_has_a_seat_of_its_own() {
        let mesh = Mesh { pipeline: 3, data: 4 };
        for world in (0..12).map(Rank::new) {
            let coord = mesh.coord(world);
            assert!(coord.rank.get() < 3 && coord.replica < 4, "{coord:?}");
            assert_eq!(mesh.world_rank(coord), world);
            let groups = mesh.pipeline_group(world).zip(mesh.data_group(world));
            let (pipeline, data) = groups.expect("it is in the mesh");
            assert_eq!((pipeline.members().len(), pipeline.place()), (3, coord.rank.index()));
            assert_eq!((data.members().len(), data.place()), (4, coord.replica as usize));
            assert!(pipeline.members()[pipeline.place()] == world && data.members()[data.place()] == world);
        }
        assert_eq!(mesh.data_group(Rank::new(12)), None);
        assert_eq!(Mesh { pipeline: 0, data: 1 }.pipeline_group(Rank::new(0)), None);
    }
}
