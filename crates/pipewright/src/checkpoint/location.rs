//! Where the elements of a tensor are in the files of a checkpoint.
//!
//! Tensor ranks store shards of a tensor, and replicas with sharded parameters store rows of the tensor or of
//! a shard. A [`Location`] puts them together.

use std::collections::BTreeMap;
use std::ops::Range;

use burn::tensor::DType;
use serde::{Deserialize, Serialize};

use crate::tensor::TensorShard;
use crate::tensor::shard::RowShard;

/// The location of a tensor in the files, with its type and shape.
#[derive(Debug)]
pub(super) struct Location {
    pub(super) dtype: DType,
    /// The shape of the whole tensor, once it is joined.
    pub(super) shape: Vec<usize>,
    shard: StoredShard,
    /// The shards by their index.
    slabs: BTreeMap<u32, Slab>,
}

/// Which shard of a tensor a file has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StoredShard {
    /// The dimension along which the tensor is cut.
    pub(super) dimension: usize,
    /// The range of this dimension that the file has.
    pub(super) part: RowShard,
}

impl StoredShard {
    pub(super) const WHOLE: Self = Self { dimension: 0, part: RowShard::WHOLE };
}

/// A shard of a tensor, or a whole one: its rows, in order, in one file or divided among the files of
/// replicas.
#[derive(Debug)]
pub(super) struct Slab {
    shape: Vec<usize>,
    pub(super) pieces: Vec<Piece>,
    /// Further copies of the same rows.
    pub(super) copies: Vec<Piece>,
}

/// Rows of a tensor that are stored in one file.
#[derive(Debug)]
pub(super) struct Piece {
    pub(super) part: RowShard,
    pub(super) rows: usize,
    pub(super) file: usize,
    /// The position of their first byte in the file.
    pub(super) start: u64,
}

/// The error for parts of a tensor that do not make up the whole.
pub(super) struct Torn;

/// The reason why rows do not fit the tensor that they belong to.
pub(super) enum Unfit {
    /// Their shape or type differs from the shape or type of the other rows.
    Part,
    /// This file has the same rows in another shape.
    Copy(usize),
}

/// A range of each dimension of a tensor.
pub(super) type Bounds = Vec<Range<usize>>;

impl Location {
    pub(super) fn new(dtype: DType, shard: StoredShard) -> Self {
        Self { dtype, shape: Vec::new(), shard, slabs: BTreeMap::new() }
    }

    /// Adds rows of a shard of the tensor, of this type and shape.
    pub(super) fn add(
        &mut self,
        piece: Piece,
        dtype: DType,
        shape: &[usize],
        shard: StoredShard,
    ) -> Result<(), Unfit> {
        let cut = |shard: StoredShard| (shard.dimension, shard.part.of);
        if cut(shard) != cut(self.shard) {
            return Err(Unfit::Part);
        }
        let is_of_type = dtype == self.dtype;
        let slab = Slab { shape: shape.to_vec(), pieces: Vec::new(), copies: Vec::new() };
        self.slabs.entry(shard.part.index).or_insert(slab).add(piece, shape, is_of_type)
    }

    /// Puts the pieces in order and sets the shape of the whole tensor.
    pub(super) fn join(&mut self) -> Result<(), Torn> {
        self.slabs.values_mut().try_for_each(Slab::join)?;
        let StoredShard { dimension, part: RowShard { of, .. } } = self.shard;
        let Some(first) = self.slabs.get(&0).filter(|_| self.slabs.len() == of as usize) else {
            return Err(Torn);
        };
        self.shape = first.shape.clone();
        if of == 1 {
            return Ok(());
        }
        let sizes: Option<Vec<usize>> =
            self.slabs.values().map(|slab| slab.shape.get(dimension).copied()).collect();
        let Some(sizes) = sizes else { return Err(Torn) };
        self.shape[dimension] = sizes.iter().sum();
        let whole = &self.shape;
        let fits = |(part, slab): (RowShard, &Slab)| {
            let mut expected = whole.clone();
            expected[dimension] = part.rows(whole[dimension]).len();
            expected == slab.shape
        };
        if RowShard::all(of).zip(self.slabs.values()).all(fits) { Ok(()) } else { Err(Torn) }
    }

    /// Returns the ranges of some rows of a shard of the tensor.
    pub(super) fn wanted(&self, shard: TensorShard, part: RowShard) -> Bounds {
        let mut bounds = whole(&self.shape);
        if let Some(range) = bounds.get_mut(shard.dimension).filter(|_| !shard.is_whole()) {
            *range = shard.range(range.len());
        }
        let (first, rows) = (bounds[0].start, part.rows(bounds[0].len()));
        bounds[0] = first + rows.start..first + rows.end;
        bounds
    }

    /// Returns the shards with their ranges in the whole tensor.
    pub(super) fn slabs(&self) -> impl Iterator<Item = (Bounds, &Slab)> {
        let StoredShard { dimension, part: RowShard { of, .. } } = self.shard;
        self.slabs.iter().map(move |(&index, slab)| {
            let mut bounds = whole(&self.shape);
            if of > 1 {
                bounds[dimension] = RowShard::one(index, of).rows(self.shape[dimension]);
            }
            (bounds, slab)
        })
    }

    /// Returns all copies of rows, each with the rows that they must be equal to, and the number of bytes.
    pub(super) fn copies(&self) -> impl Iterator<Item = (&Piece, &Piece, u64)> {
        self.slabs.values().flat_map(|slab| {
            slab.copies.iter().map(|copy| {
                let first = slab.pieces.iter().find(|piece| piece.part == copy.part);
                let first = first.expect("a copy repeats rows of a piece");
                (first, copy, (copy.rows * slab.elements_in_a_row() * self.dtype.size()) as u64)
            })
        })
    }
}

impl Slab {
    fn add(&mut self, piece: Piece, shape: &[usize], is_of_type: bool) -> Result<(), Unfit> {
        let is_alike = is_of_type && shape.iter().skip(1).eq(self.shape.iter().skip(1));
        match self.pieces.iter().find(|other| other.part == piece.part) {
            Some(other) if is_alike && other.rows == piece.rows => self.copies.push(piece),
            Some(other) => return Err(Unfit::Copy(other.file)),
            None if is_alike => self.pieces.push(piece),
            None => return Err(Unfit::Part),
        }
        Ok(())
    }

    pub(super) fn elements_in_a_row(&self) -> usize {
        self.shape.iter().skip(1).product()
    }

    /// Puts the pieces in order and sets the number of rows.
    fn join(&mut self) -> Result<(), Torn> {
        self.pieces.sort_unstable_by_key(|piece| piece.part.index);
        let rows = self.pieces.iter().map(|piece| piece.rows).sum();
        let RowShard { index, count, of } = self.pieces[0].part;
        // A tensor that every replica has whole is stored by the first replica only, whose part has one index.
        if index == 0 && count == 1 && self.pieces.len() == 1 {
            return Ok(());
        }
        // The parts from one index up to another one, which no file has.
        let is_empty = |index: u32, end: u32| {
            end.checked_sub(index).is_some_and(|count| RowShard { index, count, of }.rows(rows).is_empty())
        };
        let end = self.pieces.iter().try_fold(0, |end, piece| {
            let fits = piece.part.of == of && piece.part.rows(rows).len() == piece.rows;
            (fits && is_empty(end, piece.part.index)).then_some(piece.part.end())
        });
        if !end.is_some_and(|end| is_empty(end, of)) {
            return Err(Torn);
        }
        if let Some(first) = self.shape.first_mut() {
            *first = rows;
        }
        Ok(())
    }
}

/// Returns the ranges of a whole tensor. A number has one row.
fn whole(shape: &[usize]) -> Bounds {
    match shape {
        [] => std::iter::once(0..1).collect(),
        _ => shape.iter().map(|&size| 0..size).collect(),
    }
}

/// Returns what two boxes have in common; `None` if that is nothing.
pub(super) fn common(one: &[Range<usize>], other: &[Range<usize>]) -> Option<Bounds> {
    let ranges = one.iter().zip(other).map(|(one, other)| one.start.max(other.start)..one.end.min(other.end));
    let ranges: Bounds = ranges.collect();
    ranges.iter().all(|range| range.start < range.end).then_some(ranges)
}

/// Copies the elements of `common` from one row-major box to another. An element has `element` bytes.
pub(super) fn copy(
    (source, of): (&[u8], &[Range<usize>]),
    (target, to): (&mut [u8], &[Range<usize>]),
    common: &[Range<usize>],
    element: usize,
) {
    let ([from, ..], [into, ..], [range, ..]) = (of, to, common) else {
        return target.copy_from_slice(source);
    };
    let size =
        |bounds: &[Range<usize>]| bounds[1..].iter().map(ExactSizeIterator::len).product::<usize>() * element;
    let (step, stride) = (size(of), size(to));
    let start = (range.start - from.start) * step;
    let offset = (range.start - into.start) * stride;
    // Elements that follow each other in both boxes are copied at once.
    if common[1..] == of[1..] && common[1..] == to[1..] {
        let bytes = range.len() * step;
        return target[offset..][..bytes].copy_from_slice(&source[start..][..bytes]);
    }
    for row in 0..range.len() {
        let source = &source[start + row * step..][..step];
        let target = &mut target[offset + row * stride..][..stride];
        copy((source, &of[1..]), (target, &to[1..]), &common[1..], element);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Joins pieces of a tensor whose rows are two numbers. Each has the rows that its part has of `rows`.
    /// Returns the number of rows; `None` if the pieces do not make up the tensor.
    fn joined(rows: usize, parts: &[&str]) -> Option<usize> {
        let piece = |text: &&str| {
            let part: RowShard = text.parse().expect("a shard");
            (part, part.rows(rows).len())
        };
        joined_of(&parts.iter().map(piece).collect::<Vec<_>>())
    }

    fn joined_of(pieces: &[(RowShard, usize)]) -> Option<usize> {
        let piece = |&(part, rows): &(RowShard, usize)| Piece { part, rows, file: 0, start: 0 };
        let pieces: Vec<Piece> = pieces.iter().map(piece).collect();
        let mut slab = Slab { shape: vec![pieces[0].rows, 2], pieces, copies: Vec::new() };
        slab.join().is_ok().then_some(slab.shape[0])
    }

    #[test]
    fn parts_make_up_a_tensor_if_each_follows_the_one_before() {
        let check = |parts: &[&str], expected| assert_eq!(joined(10, parts), expected, "{parts:?}");
        check(&["0-1/4", "2-3/4"], Some(10));
        check(&["2/4", "3/4", "0-1/4"], Some(10));
        check(&["0-3/4"], Some(10));
        check(&["0-1/4", "3/4"], None);
        check(&["0-1/4", "1-3/4"], None);
        check(&["0-1/4", "1/2"], None);
        check(&["0/4", "1/4"], None);
        check(&["1/4", "2-3/4"], None);
        // One file has only some of the rows. A file of one part may have a whole tensor.
        check(&["0-1/4"], None);
        check(&["2-3/4"], None);
        assert_eq!(joined_of(&[(RowShard::one(0, 4), 10)]), Some(10));
    }

    #[test]
    fn parts_without_rows_need_no_file() {
        let check = |parts: &[&str], expected| assert_eq!(joined(2, parts), expected, "{parts:?}");
        check(&["0/4", "1/4"], Some(2));
        check(&["0-1/4"], Some(2));
        check(&["0-1/4", "2/4"], Some(2));
        check(&["1-3/4"], None);
    }

    #[test]
    fn parts_with_other_numbers_of_rows_are_refused() {
        let part = |text: &str| text.parse().expect("a shard");
        assert_eq!(joined_of(&[(part("0-1/4"), 6), (part("2-3/4"), 4)]), Some(10));
        assert_eq!(joined_of(&[(part("0-1/4"), 5), (part("2-3/4"), 5)]), None);
    }

    #[test]
    fn boxes_of_one_tensor_are_copied_where_they_overlap() {
        // Columns 0 to 2 and 2 to 5 of a tensor [2, 5, 2], into rows 1 to 2 and columns 1 to 4.
        let element = |row: usize, column: usize, inner: usize| (row * 10 + column * 2 + inner) as u8;
        let filled = |bounds: &Bounds| -> Vec<u8> {
            let [rows, columns, inner] = [0, 1, 2].map(|dimension: usize| bounds[dimension].clone());
            let rows = rows.flat_map(|row| columns.clone().map(move |column| (row, column)));
            rows.flat_map(|(row, column)| inner.clone().map(move |inner| element(row, column, inner)))
                .collect()
        };
        let wanted = vec![1..2, 1..4, 0..2];
        let mut found = vec![0; 6];
        for columns in [0..2, 2..5] {
            let bounds = vec![0..2, columns, 0..2];
            let common = common(&bounds, &wanted).expect("they overlap");
            copy((&filled(&bounds), &bounds), (&mut found, &wanted), &common, 1);
        }
        assert_eq!(found, filled(&wanted));
        assert_eq!(common(&[0..2, 0..1], &[0..2, 1..4]), None);
    }
}
