//! How many times the pipeline stands side by side, and which rank of the world is where.
//!
//! A mesh has `pipeline` ranks along the model and `data` replicas of that row, each with its share of the batch. Ranks
//! of one replica are neighbours in the world, since they exchange the most.

use pipewright_schedule::Rank;

/// The sizes of a mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mesh {
    /// Ranks of one pipeline.
    pub pipeline: u32,
    /// Replicas of it.
    pub data: u32,
}

/// A rank's place in a mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seat {
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
    pub fn seat(&self, world: Rank) -> Seat {
        Seat { replica: world.get() / self.pipeline, rank: Rank::new(world.get() % self.pipeline) }
    }

    /// Which rank of the world sits there.
    pub fn world_rank(&self, seat: Seat) -> Rank {
        Rank::new(seat.replica * self.pipeline + seat.rank.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_has_a_seat_of_its_own() {
        let mesh = Mesh { pipeline: 3, data: 4 };
        for world in (0..12).map(Rank::new) {
            let seat = mesh.seat(world);
            assert!(seat.rank.get() < 3 && seat.replica < 4, "{seat:?}");
            assert_eq!(mesh.world_rank(seat), world);
        }
    }
}
