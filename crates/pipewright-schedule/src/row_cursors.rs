//! Cursors over many rows that are read or written in turn, one action at a time.
//!
//! With a thousand ranks, consecutive accesses go to different rows on different pages of memory. These are
//! more pages than the TLB of a processor holds, and more rows than it prefetches, so nearly every access
//! would wait for memory. So each row has a short buffer, and the buffers are close together in memory. A
//! buffer is filled from its row or appended to it as a whole, which takes little longer than a single
//! access.

use crate::action::Action;
use crate::ids::Rank;

/// The length of a buffer: long enough that it is rarely refilled, short enough that the buffers of a
/// thousand ranks stay in cache.
const PIECE: usize = 64;

/// Cursors that read rows, each from its start to its end. A cell is an action or a bubble.
pub(crate) struct RowReaders<'a, Cell> {
    rows: &'a [Vec<Cell>],
    pieces: Vec<ReadPiece<Cell>>,
}

/// The buffered part of a row. It is empty only at the end of the row.
struct ReadPiece<Cell> {
    cells: Vec<Cell>,
    at: usize,
    /// The position in the row at which the buffer begins.
    start: usize,
}

impl<'a, Cell: Copy> RowReaders<'a, Cell> {
    /// Makes cursors at the start of each of `rows`.
    pub(crate) fn over(rows: &'a [Vec<Cell>]) -> Self {
        let piece = || ReadPiece { cells: Vec::with_capacity(PIECE), at: 0, start: 0 };
        let mut readers = Self { rows, pieces: rows.iter().map(|_| piece()).collect() };
        (0..rows.len()).for_each(|rank| readers.fill(rank));
        readers
    }

    /// Returns the next cell of `rank`; `None` at the end of the row.
    #[inline]
    pub(crate) fn current(&self, rank: Rank) -> Option<Cell> {
        let piece = &self.pieces[rank.index()];
        piece.cells.get(piece.at).copied()
    }

    /// Returns the cells of `rank` that have been read.
    pub(crate) fn passed(&self, rank: Rank) -> &'a [Cell] {
        let piece = &self.pieces[rank.index()];
        &self.rows[rank.index()][..piece.start + piece.at]
    }

    /// Moves the cursor of `rank` past the next cell.
    #[inline]
    pub(crate) fn step(&mut self, rank: Rank) {
        let piece = &mut self.pieces[rank.index()];
        piece.at += 1;
        if piece.at == piece.cells.len() {
            self.fill(rank.index());
        }
    }

    /// Fills the buffer of a row.
    #[inline(never)]
    fn fill(&mut self, rank: usize) {
        let (row, piece) = (&self.rows[rank], &mut self.pieces[rank]);
        piece.start += piece.at;
        piece.at = 0;
        piece.cells.clear();
        piece.cells.extend(row[piece.start..].iter().take(PIECE));
    }
}

/// Cursors that append to rows.
pub(crate) struct RowWriters {
    rows: Vec<Vec<Action>>,
    /// The last actions of each row, which have not been appended yet.
    pieces: Vec<Vec<Action>>,
}

impl RowWriters {
    /// Makes empty rows with these capacities.
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

    /// Returns the rows.
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

    /// Writes `length` actions to two rows in turn, and reads them back in turn.
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
