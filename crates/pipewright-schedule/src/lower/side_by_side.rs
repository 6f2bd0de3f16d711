//! Rows that grow side by side, an action here and an action there.
//!
//! With a thousand ranks, each action of a sweep goes to the end of another row, on another page of memory: more
//! pages than a processor's address cache holds, so that nearly every push would wait for a page table. So actions
//! are gathered in short pieces that lie close together, and moved to their rows a piece at a time.

use crate::action::Action;
use crate::ids::{Microbatch, Rank, StageIndex};

/// The length of a piece: long enough to make a move rare, short enough that the pieces of a thousand ranks stay in
/// cache.
const PIECE: usize = 16;

/// A row's last actions, which are not in the row yet.
#[derive(Clone, Copy)]
struct Piece {
    actions: [Action; PIECE],
    length: u32,
}

/// Rows that grow side by side.
pub(super) struct SideBySide {
    rows: Vec<Vec<Action>>,
    pieces: Vec<Piece>,
}

impl SideBySide {
    /// Empty rows with room for so many actions each.
    pub(super) fn with_capacities(capacities: impl Iterator<Item = usize>) -> Self {
        let rows: Vec<_> = capacities.map(Vec::with_capacity).collect();
        // What fills a piece is never read.
        let filler = Action::Forward { stage: StageIndex::new(0), microbatch: Microbatch::new(0) };
        let pieces = vec![Piece { actions: [filler; PIECE], length: 0 }; rows.len()];
        Self { rows, pieces }
    }

    /// Appends `action` to the row of `rank`.
    #[inline]
    pub(super) fn push(&mut self, rank: Rank, action: Action) {
        let piece = &mut self.pieces[rank.index()];
        let length = piece.length as usize;
        piece.actions[length] = action;
        piece.length += 1;
        if length + 1 == PIECE {
            self.rows[rank.index()].extend_from_slice(&piece.actions);
            piece.length = 0;
        }
    }

    /// The rows.
    pub(super) fn into_rows(mut self) -> Vec<Vec<Action>> {
        for (row, piece) in self.rows.iter_mut().zip(&self.pieces) {
            row.extend_from_slice(&piece.actions[..piece.length as usize]);
        }
        self.rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(length: u32) {
        let forward = |microbatch| Action::Forward {
            stage: StageIndex::new(microbatch % 2),
            microbatch: Microbatch::new(microbatch),
        };
        let mut rows = SideBySide::with_capacities([0, 5].into_iter());
        (0..length).for_each(|at| rows.push(Rank::new(at % 2), forward(at)));
        let of = |rank: u32| (rank..length).step_by(2).map(forward).collect::<Vec<_>>();
        assert_eq!(rows.into_rows(), [of(0), of(1)]);
    }

    #[test]
    fn rows_keep_their_order() {
        for length in [0, 1, 2, 31, 32, 33, 64, 65, 1000] {
            check(length);
        }
    }
}
