//! One tile of a result, whose sums stay in registers.

use super::definition::sum_of_pairs;
use super::request::LineRequests;
use super::vector::{Vector, prefetch};

/// How the sums of a part of the inner dimension join the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Join {
    /// They are the result.
    Replace,
    /// They are added to the result.
    Add,
    /// They begin with the result instead of zero.
    Continue,
}

/// The order of the products of a sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Single precision, in blocks.
    Blocks,
    /// Numbers of bfloat16 in pairs; the odd one comes first. No number and no sum is subnormal.
    Pairs,
    /// Pairs, if a number or a sum may be subnormal.
    FlushedPairs,
}

/// How many elements of a column ahead of the products the processor requests.
const AHEAD: usize = 128;

/// A tile and its packed operands.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// Elements of the inner dimension. Pairs are whole.
    pub(super) inner: usize,
    /// `rows` elements for each of the inner dimension.
    pub(super) left: *const f32,
    /// The elements of whole registers for each element of the inner dimension.
    pub(super) right: *const f32,
    /// The distance between two rows of `right`.
    pub(super) right_stride: usize,
    /// The tile's first element.
    pub(super) out: *mut f32,
    /// The distance between two rows of the result.
    pub(super) stride: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) join: Join,
    /// Memory that is used later.
    pub(super) requests: Option<[LineRequests; 2]>,
}

impl Tile {
    /// Computes a tile of `ROWS` rows. Requests are left out unless `HAS_REQUESTS`: products of one row would take longer by them.
    ///
    /// # Safety
    /// The processor must have the instructions of `V`. The operands must have the elements that their fields say, and
    /// the rows and columns of the result must be memory that nothing else uses, initialised unless it is replaced.
    #[inline(always)]
    pub(super) unsafe fn compute<
        V: Vector,
        const ROWS: usize,
        const VECTORS: usize,
        const IN_PAIRS: bool,
        const IS_FLUSHED: bool,
        const HAS_REQUESTS: bool,
    >(
        &self,
    ) {
        // The sums stay in registers only if loops that are not unrolled have copies of their own.
        // SAFETY: as the caller says; each element of the inner dimension has its elements in both operands.
        unsafe {
            // The result is in the cache when the sums are complete.
            for row in 0..ROWS {
                for vector in 0..VECTORS {
                    prefetch(self.part::<V>(row, vector).0);
                }
            }
            let mut sums: [[V; VECTORS]; ROWS] = self.start();
            let mut least = V::splat(0.0);
            let (mut left, mut right) = (self.left, self.right);
            let mut requests = self.requests.unwrap_or([LineRequests::of_one_line(left); 2]);
            if IN_PAIRS {
                for _ in 0..self.inner / 2 {
                    if HAS_REQUESTS {
                        LineRequests::step_all(&mut requests);
                    }
                    let odd = (left.add(ROWS), right.add(self.right_stride));
                    step::<V, ROWS, VECTORS, IS_FLUSHED>(&mut sums, odd, &mut least);
                    step::<V, ROWS, VECTORS, IS_FLUSHED>(&mut sums, (left, right), &mut least);
                    (left, right) = (left.add(2 * ROWS), right.add(2 * self.right_stride));
                }
            } else {
                for _ in 0..self.inner {
                    if HAS_REQUESTS {
                        LineRequests::step_all(&mut requests);
                    }
                    step::<V, ROWS, VECTORS, false>(&mut sums, (left, right), &mut least);
                    (left, right) = (left.add(ROWS), right.add(self.right_stride));
                }
            }
            if IS_FLUSHED && has_nonzero(least) {
                return self.compute_slowly();
            }
            self.finish(sums);
        }
    }

    /// Computes a tile of `ROWS` rows in blocks, from columns of the right operand whose elements are neighbours:
    /// `right_stride` is the distance between two columns. Squares of them are transposed in registers, and used once.
    ///
    /// # Safety
    /// As [`Tile::compute`], with whole registers of columns.
    #[inline(always)]
    pub(super) unsafe fn compute_turned<V: Vector, const ROWS: usize>(&self) {
        let mut first = 0;
        while first < self.columns {
            // SAFETY: as the caller says; the columns and elements that are read exist.
            unsafe {
                let mut sums = [[V::splat(0.0); 1]; ROWS];
                let mut k = 0;
                while k < self.inner {
                    let count = self.inner - k;
                    let from = self.right.wrapping_add(first * self.right_stride + k);
                    let mut square = V::square();
                    for (column, elements) in square.as_mut().iter_mut().enumerate() {
                        let at = from.wrapping_add(column * self.right_stride);
                        *elements = if count >= V::LANES { V::load(at) } else { V::load_part(at, count) };
                        // A processor predicts too little of so many runs.
                        prefetch(at.wrapping_add(AHEAD));
                    }
                    let mut square = V::transpose(square);
                    for (i, &mut elements) in square.as_mut().iter_mut().enumerate() {
                        if i < count {
                            let left = self.left.add((k + i) * ROWS);
                            for (row, [sum]) in sums.iter_mut().enumerate() {
                                *sum = V::multiply_add(V::splat(*left.add(row)), elements, *sum);
                            }
                        }
                    }
                    k += V::LANES;
                }
                let part = Self { out: self.out.add(first), columns: V::LANES, ..*self };
                part.finish(sums);
            }
            first += V::LANES;
        }
    }

    /// Returns what the sums begin with.
    ///
    /// # Safety
    /// As [`Tile::compute`].
    #[inline(always)]
    unsafe fn start<V: Vector, const ROWS: usize, const VECTORS: usize>(&self) -> [[V; VECTORS]; ROWS] {
        // SAFETY: as the caller says.
        unsafe {
            let mut sums = [[V::splat(0.0); VECTORS]; ROWS];
            if self.join == Join::Continue {
                for (row, sums) in sums.iter_mut().enumerate() {
                    for (vector, sum) in sums.iter_mut().enumerate() {
                        let (at, count) = self.part::<V>(row, vector);
                        *sum = V::load_part(at, count);
                    }
                }
            }
            sums
        }
    }

    /// Joins the sums with the result.
    ///
    /// # Safety
    /// As [`Tile::compute`].
    #[inline(always)]
    unsafe fn finish<V: Vector, const ROWS: usize, const VECTORS: usize>(&self, sums: [[V; VECTORS]; ROWS]) {
        let is_added = self.join == Join::Add;
        for (row, sums) in sums.iter().enumerate() {
            for (vector, &sum) in sums.iter().enumerate() {
                let (at, count) = self.part::<V>(row, vector);
                // SAFETY: as the caller says; the part ends at the last column.
                unsafe {
                    if count == V::LANES {
                        V::store(if is_added { V::load(at).add(sum) } else { sum }, at);
                    } else {
                        let sum = if is_added { V::load_part(at, count).add(sum) } else { sum };
                        V::store_part(sum, at, count);
                    }
                }
            }
        }
    }

    /// Returns a part of a row of the result: its first element, and the elements that exist of a register.
    #[inline(always)]
    fn part<V: Vector>(&self, row: usize, vector: usize) -> (*mut f32, usize) {
        let first = vector * V::LANES;
        let at = self.out.wrapping_add(row * self.stride + first);
        (at, self.columns.saturating_sub(first).min(V::LANES))
    }

    /// Computes a tile of pairs whose sums come close to the least normal number, by the definition.
    ///
    /// # Safety
    /// As [`Tile::compute`].
    #[cold]
    unsafe fn compute_slowly(&self) {
        for (row, column) in (0..self.rows).flat_map(|row| (0..self.columns).map(move |column| (row, column)))
        {
            // SAFETY: as the caller says.
            unsafe {
                let at = self.out.add(row * self.stride + column);
                let factors = |k: usize| {
                    [*self.left.add(k * self.rows + row), *self.right.add(k * self.right_stride + column)]
                };
                let start = if self.join == Join::Continue { *at } else { 0.0 };
                let sum = sum_of_pairs(start, self.inner, factors);
                at.write(if self.join == Join::Add { *at + sum } else { sum });
            }
        }
    }
}

/// Adds the products of one element of the inner dimension.
///
/// # Safety
/// As [`Tile::compute`].
#[inline(always)]
unsafe fn step<V: Vector, const ROWS: usize, const VECTORS: usize, const IS_FLUSHED: bool>(
    sums: &mut [[V; VECTORS]; ROWS],
    (left, right): (*const f32, *const f32),
    least: &mut V,
) {
    // SAFETY: as the caller says.
    unsafe {
        let mut factors = [V::splat(0.0); VECTORS];
        for (vector, factor) in factors.iter_mut().enumerate() {
            *factor = V::load(right.add(vector * V::LANES));
        }
        for (row, sums) in sums.iter_mut().enumerate() {
            let element = V::splat(*left.add(row));
            for (sum, &factor) in sums.iter_mut().zip(&factors) {
                *sum = V::multiply_add(element, factor, *sum);
                if IS_FLUSHED {
                    *sum = V::flush(*sum, least);
                }
            }
        }
    }
}

/// # Safety
/// The processor must have the instructions of `V`, which has at most 16 lanes.
#[inline(always)]
unsafe fn has_nonzero<V: Vector>(vector: V) -> bool {
    let mut lanes = [0f32; 16];
    // SAFETY: as the caller says.
    unsafe { V::store(vector, lanes.as_mut_ptr()) };
    lanes != [0.0; 16]
}
