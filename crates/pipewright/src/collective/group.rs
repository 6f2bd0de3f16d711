//! Groups of ranks that run collectives together.

use std::sync::Arc;

use crate::ids::WorldRank;
use crate::transport::Endpoint;

/// Ranks of the world in an order that is the same on each of them, and the member that holds this value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    members: Arc<[WorldRank]>,
    index: usize,
}

/// Why a list of ranks is not a group.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct GroupError(String);

pipewright_schedule::message_as_debug!(GroupError);

impl Group {
    /// Makes the group of `members`, which is the same list on each of them, for the member `own`.
    ///
    /// # Errors
    /// When `own` is not a member, or a rank is in the list twice.
    pub fn new(members: Vec<WorldRank>, own: WorldRank) -> Result<Self, GroupError> {
        let mut sorted = members.clone();
        sorted.sort_unstable();
        if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(GroupError(format!("rank {} is in the group twice: name each member once", pair[0])));
        }
        match members.iter().position(|&rank| rank == own) {
            Some(index) => Ok(Self { members: members.into(), index }),
            None => Err(GroupError(format!(
                "rank {own} is not a member of the group: only members make the group"
            ))),
        }
    }

    /// Makes the group of all ranks of a world.
    pub fn of_world(endpoint: &Endpoint) -> Self {
        let members = (0..endpoint.ranks()).map(WorldRank::new).collect();
        Self { members, index: endpoint.rank().index() }
    }

    /// Returns the members, in their order.
    pub fn members(&self) -> &[WorldRank] {
        &self.members
    }

    /// Returns the index of this rank among the members.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Returns the member that holds this value.
    pub(crate) fn own(&self) -> WorldRank {
        self.members[self.index]
    }

    /// Returns the other members with their indices.
    pub(crate) fn others(&self) -> impl Iterator<Item = (usize, WorldRank)> + use<'_> {
        self.members.iter().copied().enumerate().filter(|(index, _)| *index != self.index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_seen_by_a_member_and_names_each_once() {
        let ranks = |members: &[u32]| members.iter().copied().map(WorldRank::new).collect::<Vec<_>>();
        let group = Group::new(ranks(&[3, 1, 2]), WorldRank::new(1)).expect("a group");
        assert_eq!(group.index(), 1);
        assert_eq!(group.others().collect::<Vec<_>>(), [(0, WorldRank::new(3)), (2, WorldRank::new(2))]);
        let own = WorldRank::new(0);
        let refused = |members: &[u32]| Group::new(ranks(members), own).expect_err("no group").to_string();
        assert!(refused(&[1, 2]).starts_with("rank 0 is not a member of the group"));
        assert!(refused(&[0, 2, 0]).starts_with("rank 0 is in the group twice"));
    }
}
