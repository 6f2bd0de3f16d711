//! Groups of ranks that run collectives together.
//!
//! A binomial tree over a group, rooted at its first member.
//!
//! ```text
//!            0
//!     1   2     4          the tree of 7 members
//!         3   5   6
//! ```
//!
//! The subtree of the member at index `n` has the members from `n` to just before `n` plus the lowest set bit
//! of `n`. So if every member appends the lists of its children, in their order, to its own, each list has
//! the order of the members. Gathering to the root takes one message for each other member. At most as many
//! messages follow each other as the number of members has bits. Sending something to all members takes as
//! long.

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

/// One member's neighbours in the tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tree {
    parent: Option<WorldRank>,
    children: Vec<WorldRank>,
}

impl Tree {
    /// Makes the tree over `group` for the group's own member.
    pub(crate) fn over(group: &Group) -> Self {
        let (members, index) = (group.members(), group.index());
        // The root has no set bit, and its subtree has all members.
        let subtree = if index == 0 { members.len() } else { 1 << index.trailing_zeros() };
        let distances = std::iter::successors(Some(1), |distance| Some(distance * 2));
        let children = distances.take_while(|&distance| distance < subtree);
        let children = children.filter_map(|distance| members.get(index + distance).copied());
        let parent = (index > 0).then(|| members[index & (index - 1)]);
        Self { parent, children: children.collect() }
    }

    /// Returns the member above this one; `None` at the root.
    pub(crate) fn parent(&self) -> Option<WorldRank> {
        self.parent
    }

    /// Returns the members below this one, in the order of the group.
    pub(crate) fn children(&self) -> &[WorldRank] {
        &self.children
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

    /// Returns the trees of all members of a group with `members` members.
    fn trees(members: u32) -> Vec<Tree> {
        let ranks: Vec<WorldRank> = (0..members).map(|rank| WorldRank::new(10 + rank)).collect();
        let tree = |&own: &WorldRank| Tree::over(&Group::new(ranks.clone(), own).expect("a group"));
        ranks.iter().map(tree).collect()
    }

    /// Returns the list of a member after its subtree was gathered, and the number of messages that follow
    /// each other before.
    fn gathered(trees: &[Tree], index: usize) -> (Vec<u32>, u32) {
        let mut list = vec![index as u32];
        let mut depth = 0;
        for child in trees[index].children() {
            let (below, in_a_row) = gathered(trees, child.index() - 10);
            list.extend(below);
            depth = depth.max(in_a_row + 1);
        }
        (list, depth)
    }

    #[test]
    fn the_root_gathers_all_members_in_order() {
        for members in 1..=33 {
            let trees = trees(members);
            let (list, depth) = gathered(&trees, 0);
            assert_eq!(list, (0..members).collect::<Vec<_>>(), "{members} members");
            assert!(
                depth <= u32::BITS - (members - 1).leading_zeros(),
                "{members} members: {depth} in a row"
            );
        }
    }

    #[test]
    fn every_child_knows_its_parent() {
        for members in 1..=33 {
            let trees = trees(members);
            assert_eq!(trees[0].parent(), None);
            for (index, tree) in trees.iter().enumerate() {
                for child in tree.children() {
                    assert_eq!(trees[child.index() - 10].parent(), Some(WorldRank::new(10 + index as u32)));
                }
            }
        }
    }
}
