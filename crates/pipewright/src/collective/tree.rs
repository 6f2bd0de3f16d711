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

use super::group::Group;
use crate::ids::WorldRank;

/// One member's neighbours in the tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tree {
    /// The member above this one; `None` at the root.
    pub(crate) parent: Option<WorldRank>,
    /// The members below this one, in the order of the group.
    pub(crate) children: Vec<WorldRank>,
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
}

#[cfg(test)]
mod tests {
    use super::*;

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
        for child in &trees[index].children {
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
            assert_eq!(trees[0].parent, None);
            for (index, tree) in trees.iter().enumerate() {
                for child in &tree.children {
                    assert_eq!(trees[child.index() - 10].parent, Some(WorldRank::new(10 + index as u32)));
                }
            }
        }
    }
}
