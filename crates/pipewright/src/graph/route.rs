//! Finds the route of a value from the stage that makes it to all that use it, with the fewest moves between
//! ranks.
//!
//! # Rules
//!
//! The sum of a gradient must be `g1 + (g2 + (g3 + ..))` over all uses, on whichever stages they are, so it
//! is computed from the last use to the first. One stage at a time *owns* the value: first the stage that
//! makes it. For the next stage with a use, the owner either
//!
//! - transfers the value: that stage becomes the owner of the remaining uses and returns the sum of their
//!   gradients; or
//! - lends the value, if that stage has a single use: it returns that one gradient, and the owner, which
//!   stays the same, adds it to the sum of the remaining uses.
//!
//! Either is one hop. A direct hop costs one move between ranks, or none within a rank; a hop along the
//! neighbours costs as many moves as there are changes of rank between the stages. [`hops`] finds the hops
//! with the fewest moves in total, by dynamic programming from the last holder to the first, with one state
//! for each possible owner: quadratic in the number of holders. If two routes are equal, it takes the
//! transfer, and the one along the neighbours.

use pipewright_schedule::{Placement, StageIndex};

/// A stage that makes or uses a value.
#[derive(Clone, Copy, Debug)]
pub(super) struct Holder {
    pub(super) stage: StageIndex,
    pub(super) uses: usize,
}

/// One hop of a value's route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hop {
    pub(super) from: StageIndex,
    pub(super) to: StageIndex,
    /// Whether the value is sent in its own message instead of along the stages between.
    pub(super) is_straight: bool,
}

/// The best route when the first `next` holders have the value and one of them owns it.
#[derive(Clone, Copy, Default)]
struct Choice {
    moves: usize,
    lends: bool,
}

/// Returns the hops from the first holder, which makes the value, to the others in order.
pub(super) fn hops(holders: &[Holder], placement: &Placement) -> Vec<Hop> {
    let hop = |from: usize, to: usize| cheapest(holders[from].stage, holders[to].stage, placement);
    // A row for each `next`, an entry for each earlier holder that may be the owner.
    let mut best = vec![vec![Choice::default(); holders.len()]; holders.len() + 1];
    for next in (1..holders.len()).rev() {
        for in_charge in 0..next {
            let (_, moves) = hop(in_charge, next);
            let handed = moves + best[next + 1][next].moves;
            let lent = moves + best[next + 1][in_charge].moves;
            let lends = holders[next].uses == 1 && lent < handed;
            best[next][in_charge] = Choice { moves: if lends { lent } else { handed }, lends };
        }
    }
    let mut in_charge = 0;
    let choose = |next: usize| {
        let (hop, _) = hop(in_charge, next);
        if !best[next][in_charge].lends {
            in_charge = next;
        }
        hop
    };
    (1..holders.len()).map(choose).collect()
}

/// Returns the cheaper kind of hop between two stages, and its moves between ranks.
fn cheapest(from: StageIndex, to: StageIndex, placement: &Placement) -> (Hop, usize) {
    let rank = |stage: u32| placement.rank_of(StageIndex::new(stage));
    let along = (from.get()..to.get()).filter(|&stage| rank(stage) != rank(stage + 1)).count();
    let straight = usize::from(rank(from.get()) != rank(to.get()));
    (Hop { from, to, is_straight: straight < along }, straight.min(along))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `holders`: stage and uses of each; `expected`: from, to, and whether the hop is direct.
    fn check(ranks: &[u32], holders: &[(u32, usize)], expected: &[(u32, u32, bool)]) {
        let placement =
            Placement::explicit(ranks.iter().copied().map(Into::into).collect()).expect("a placement");
        let holders: Vec<Holder> =
            holders.iter().map(|&(stage, uses)| Holder { stage: StageIndex::new(stage), uses }).collect();
        let found: Vec<_> = hops(&holders, &placement)
            .into_iter()
            .map(|hop| (hop.from.get(), hop.to.get(), hop.is_straight))
            .collect();
        assert_eq!(found, expected, "{ranks:?}");
    }

    #[test]
    fn neighbours_hand_values_on() {
        check(&[0, 1, 2], &[(0, 0), (1, 1), (2, 1)], &[(0, 1, false), (1, 2, false)]);
        check(&[0, 0, 0], &[(0, 1), (2, 1)], &[(0, 2, false)]);
    }

    #[test]
    fn one_move_beats_many() {
        check(&[0, 1, 2, 3, 4], &[(0, 1), (4, 1)], &[(0, 4, true)]);
        check(&[0, 0, 0, 1, 1], &[(0, 1), (4, 1)], &[(0, 4, false)]);
        check(&[0, 0, 1, 1, 2], &[(0, 1), (4, 1)], &[(0, 4, true)]);
    }

    #[test]
    fn back_on_its_rank_a_value_need_not_move() {
        check(&[0, 1, 1, 0], &[(0, 1), (3, 2)], &[(0, 3, true)]);
        // Stage 1 has one use and borrows the value; with two it must own it.
        check(&[0, 1, 1, 0], &[(0, 0), (1, 1), (3, 1)], &[(0, 1, false), (0, 3, true)]);
        check(&[0, 1, 1, 0], &[(0, 0), (1, 2), (3, 1)], &[(0, 1, false), (1, 3, false)]);
    }

    #[test]
    fn a_lender_stays_in_charge() {
        // If it were transferred, it would have to move back from the last holder.
        check(
            &[0, 1, 2, 1, 0],
            &[(0, 0), (1, 1), (2, 1), (4, 1)],
            &[(0, 1, false), (0, 2, true), (0, 4, true)],
        );
    }
}
