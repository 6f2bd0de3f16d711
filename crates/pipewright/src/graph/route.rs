//! The way of a value from the stage that makes it to all that use it, with the fewest moves between ranks.
//!
//! # Rules
//!
//! A gradient's sum must be `g1 + (g2 + (g3 + ..))` over all uses, wherever they are, so it is made from the back. One
//! stage at a time is *in charge* of the value: first the one that makes it. For the next stage with a use, the stage in
//! charge either
//!
//! - hands the value over: that stage has its uses and is in charge of the rest, whose sum it adds to its own; or
//! - where that stage has one use alone, lends the value: it sends back that one gradient, and the stage in charge, which
//!   stays so, adds it to the sum of the rest.
//!
//! In either case one hop is made. It costs one move between ranks when it goes straight to another rank, none within a
//! rank, and along the neighbours as many as there are changes of rank on the way. [`hops`] finds the hops with the
//! fewest moves of all, going back over the holders once for each that may be in charge: quadratic in a value's holders.
//! Where two ways cost the same, the value is handed over, and rides along with the neighbours' messages.

use pipewright_schedule::{Placement, StageIndex};

/// A stage that makes or uses a value.
#[derive(Clone, Copy, Debug)]
pub(super) struct Holder {
    pub(super) stage: StageIndex,
    pub(super) uses: usize,
}

/// One leg of a value's way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hop {
    pub(super) from: StageIndex,
    pub(super) to: StageIndex,
    /// In a message of its own, not along the stages between.
    pub(super) is_straight: bool,
}

/// What is best when the first `next` holders have the value and one of them is in charge.
#[derive(Clone, Copy, Default)]
struct Choice {
    moves: usize,
    lends: bool,
}

/// The hops from the first holder, which makes the value, to the others, in their order.
pub(super) fn hops(holders: &[Holder], placement: &Placement) -> Vec<Hop> {
    let hop = |from: usize, to: usize| cheapest(holders[from].stage, holders[to].stage, placement);
    // A row for each `next`, an entry for each holder before it that may be in charge.
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

/// The cheaper way from one stage to another, and the moves between ranks that it takes.
fn cheapest(from: StageIndex, to: StageIndex, placement: &Placement) -> (Hop, usize) {
    let rank = |stage: u32| placement.rank_of(StageIndex::new(stage));
    let along = (from.get()..to.get()).filter(|&stage| rank(stage) != rank(stage + 1)).count();
    let straight = usize::from(rank(from.get()) != rank(to.get()));
    (Hop { from, to, is_straight: straight < along }, straight.min(along))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `holders`: stage and uses of each; `expected`: from, to, and whether straight.
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
        // Stage 1 has one use and borrows; with two it must be in charge of the rest.
        check(&[0, 1, 1, 0], &[(0, 0), (1, 1), (3, 1)], &[(0, 1, false), (0, 3, true)]);
        check(&[0, 1, 1, 0], &[(0, 0), (1, 2), (3, 1)], &[(0, 1, false), (1, 3, false)]);
    }

    #[test]
    fn a_lender_stays_in_charge() {
        // Handed on, it would have to move back from the last borrower.
        check(
            &[0, 1, 2, 1, 0],
            &[(0, 0), (1, 1), (2, 1), (4, 1)],
            &[(0, 1, false), (0, 2, true), (0, 4, true)],
        );
    }
}
