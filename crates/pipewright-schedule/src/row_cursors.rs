//! Rows that are read or written side by side, an action here and an action there.
//!
//! With a thousand ranks, each action of a walk over all of them is at another row, on another page of memory: more
//! pages than a processor's address cache holds, and more rows than it reads ahead of, so that nearly every action
//! would wait for memory. So rows are read and written in short pieces that lie close together. A piece moves
//! between its row and the rest as a whole, in little more time than a single action would take.

use crate::action::Action;
use crate::ids::Rank;

/// The length of a piece: long enough to make a move rare, short enough that the pieces of a thousand ranks stay in
/// cache.
const PIECE: usize = 64;

/// Rows that are read side by side, each from its start to its end. A cell is an action, or may be a bubble.
pub(crate) struct RowReaders<'a, Cell> {
    rows: &'a [Vec<Cell>],
    pieces: Vec<ReadPiece<Cell>>,
}

/// The part of a row around the place that is read. It is empty at the row's end alone.
struct ReadPiece<Cell> {
    cells: Vec<Cell>,
    at: usize,
    /// Where in the row the piece begins.
    start: usize,
}

impl<'a, Cell: Copy> RowReaders<'a, Cell> {
    /// Stands at the start of each of `rows`.
    pub(crate) fn over(rows: &'a [Vec<Cell>]) -> Self {
        let piece = || ReadPiece { cells: Vec::with_capacity(PIECE), at: 0, start: 0 };
        let mut readers = Self { rows, pieces: rows.iter().map(|_| piece()).collect() };
        (0..rows.len()).for_each(|rank| readers.fill(rank));
        readers
    }

    /// The cell at which the reader of `rank` stands; `None` at the row's end.
    #[inline]
    pub(crate) fn current(&self, rank: Rank) -> Option<Cell> {
        let piece = &self.pieces[rank.index()];
        piece.cells.get(piece.at).copied()
    }

    /// The cells that the reader of `rank` has moved past.
    pub(crate) fn passed(&self, rank: Rank) -> &'a [Cell] {
        let piece = &self.pieces[rank.index()];
        &self.rows[rank.index()][..piece.start + piece.at]
    }

    /// Moves the reader of `rank` past the cell at which it stands.
    #[inline]
    pub(crate) fn step(&mut self, rank: Rank) {
        let piece = &mut self.pieces[rank.index()];
        piece.at += 1;
        if piece.at == piece.cells.len() {
            self.fill(rank.index());
        }
    }

    /// Reads the next piece of a row.
    #[inline(never)]
    fn fill(&mut self, rank: usize) {
        let (row, piece) = (&self.rows[rank], &mut self.pieces[rank]);
        piece.start += piece.at;
        piece.at = 0;
        piece.cells.clear();
        piece.cells.extend(row[piece.start..].iter().take(PIECE));
    }
}

/// Rows that are written side by side.
pub(crate) struct RowWriters {
    rows: Vec<Vec<Action>>,
    /// The last actions of each row, which are not in the row yet.
    pieces: Vec<Vec<Action>>,
}

impl RowWriters {
    /// Empty rows with room for so many actions each.
    pub(crate) fn with_capacities(capacities: impl Iterator<Item = usize>) -> Self {
        let rows: Vec<_> = capacities.map(Vec::with_capacity).collect();
        let pieces = rows.iter().map(|_| Vec::with_capacity(PIECE)).collect();
        Self { rows, pieces }
    }

    /// Appends `action` to the row of `rank`.
    #[inline]
    pub(crate) fn push(&mut self, rank: Rank, action: Action) {
        let piece = &mut self.pieces[rank.index()];
        piece.push(action);
        if piece.len() == PIECE {
            self.rows[rank.index()].append(piece);
        }
    }

    /// The rows.
    pub(crate) fn into_rows(mut self) -> Vec<Vec<Action>> {
        for (row, piece) in self.rows.iter_mut().zip(&mut self.pieces) {
            row.append(piece);
        }
        self.rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{Microbatch, StageIndex};

    fn forward(microbatch: u32) -> Action {
        Action::Forward { stage: StageIndex::new(microbatch % 2), microbatch: Microbatch::new(microbatch) }
    }

    /// Two rows that share `length` actions in turn are written, and read in turn.
    fn check(length: u32) {
        let mut writers = RowWriters::with_capacities([0, 5].into_iter());
        (0..length).for_each(|at| writers.push(Rank::new(at % 2), forward(at)));
        let rows = writers.into_rows();
        let of = |rank: u32| (rank..length).step_by(2).map(forward).collect::<Vec<_>>();
        assert_eq!(rows, [of(0), of(1)]);

        let mut readers = RowReaders::over(&rows);
        for at in 0..length {
            let rank = Rank::new(at % 2);
            assert_eq!(readers.current(rank), Some(forward(at)));
            assert_eq!(readers.passed(rank), &rows[rank.index()][..at as usize / 2]);
            readers.step(rank);
        }
        for (rank, row) in (0..).map(Rank::new).zip(&rows) {
            assert_eq!((readers.current(rank), readers.passed(rank)), (None, row.as_slice()));
        }
    }

    #[test]
    fn rows_keep_their_order() {
        for length in [0, 1, 2, 31, 32, 33, 63, 64, 65, 1000] {
            check(length);
        }
    }
}
