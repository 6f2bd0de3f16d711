//! Packs the operands of a product in panels: for each element of the inner dimension, the elements of some rows of the
//! left operand or of some columns of the right one.

use super::matrix::Matrix;
use super::request::LineRequests;
use super::vector::Vector;

/// An operand as vectors along the inner dimension: the rows of a left operand, the columns of a right one.
#[derive(Clone, Copy)]
pub(super) struct Vectors<'a> {
    data: &'a [f32],
    pub(super) count: usize,
    /// Elements of a vector.
    depth: usize,
    /// The distance between two vectors. This or the next is 1.
    stride: usize,
    /// The distance between two elements of a vector.
    depth_stride: usize,
}

/// A panel of an operand.
#[derive(Clone, Copy)]
pub(super) struct Panel {
    /// The first vector.
    pub(super) first: usize,
    /// The number of vectors. Missing ones are zero.
    pub(super) width: usize,
    /// The first element of each.
    pub(super) start: usize,
    /// The number of elements. Missing ones are zero.
    pub(super) depth: usize,
    /// Whether subnormal numbers become zero.
    pub(super) is_flushed: bool,
}

impl<'a> Vectors<'a> {
    pub(super) fn rows_of(matrix: Matrix<'a>) -> Self {
        let Matrix { data, rows, columns, row_stride, column_stride } = matrix;
        Self { data, count: rows, depth: columns, stride: row_stride, depth_stride: column_stride }
    }

    pub(super) fn columns_of(matrix: Matrix<'a>) -> Self {
        Self::rows_of(matrix.transposed())
    }

    /// Returns a request for a part of the memory of a panel: the part `part` of `parts`, in `steps` steps.
    pub(super) fn request(self, panel: Panel, [part, parts]: [usize; 2], steps: usize) -> LineRequests {
        let Panel { first, width, start, depth, .. } = panel;
        let (count, depth) =
            (width.min(self.count.saturating_sub(first)), depth.min(self.depth.saturating_sub(start)));
        let from = self.data.as_ptr().wrapping_add(first * self.stride + start * self.depth_stride);
        let runs =
            if self.stride == 1 { [depth, count, self.depth_stride] } else { [count, depth, self.stride] };
        LineRequests::new(from, runs, [part, parts], steps)
    }

    /// Writes element `start + k` of vector `first + v` at index `k * width + v`. Most panels of right operands have `VECTORS`
    /// registers.
    ///
    /// # Safety
    /// The processor must have the instructions of `V`. `into` must point to memory for the panel.
    #[inline(always)]
    pub(super) unsafe fn pack<V: Vector, const VECTORS: usize>(self, panel: Panel, into: *mut f32) {
        // SAFETY: as the caller says.
        unsafe {
            if panel.is_flushed {
                self.pack_in::<V, VECTORS, true>(panel, into);
            } else {
                self.pack_in::<V, VECTORS, false>(panel, into);
            }
        }
    }

    /// # Safety
    /// As [`Vectors::pack`].
    #[inline(always)]
    unsafe fn pack_in<V: Vector, const VECTORS: usize, const IS_FLUSHED: bool>(
        self,
        panel: Panel,
        into: *mut f32,
    ) {
        let present = panel.width.min(self.count - panel.first);
        let depth = panel.depth.min(self.depth - panel.start);
        let from = panel.first * self.stride + panel.start * self.depth_stride;
        let from = self.data.as_ptr().wrapping_add(from);
        let target = Packed { start: into, width: panel.width, depth: panel.depth };
        // SAFETY: as the caller says.
        unsafe {
            if self.stride == 1 && present == VECTORS * V::LANES {
                self.copy::<V, VECTORS, IS_FLUSHED>((from, V::LANES), target, 0, depth);
            } else {
                for lane in (0..panel.width).step_by(V::LANES) {
                    let read = present.saturating_sub(lane).min(V::LANES);
                    let from = from.wrapping_add(lane * self.stride);
                    if self.stride == 1 {
                        self.copy::<V, 1, IS_FLUSHED>((from, read), target, lane, depth);
                    } else {
                        self.turn::<V, IS_FLUSHED>((from, read), target, lane, depth);
                    }
                }
            }
            into.add(depth * panel.width).write_bytes(0, (panel.depth - depth) * panel.width);
        }
    }

    /// Packs `COUNT` registers of neighbouring vectors. In each, `read` vectors are present.
    ///
    /// # Safety
    /// As [`Vectors::pack`].
    #[inline(always)]
    unsafe fn copy<V: Vector, const COUNT: usize, const IS_FLUSHED: bool>(
        self,
        (from, read): (*const f32, usize),
        target: Packed,
        lane: usize,
        depth: usize,
    ) {
        for k in 0..depth {
            for index in 0..COUNT {
                let from = from.wrapping_add(k * self.depth_stride + index * V::LANES);
                // SAFETY: the vectors that are present have this element, and the panel has its place.
                unsafe { target.store(k, lane + index * V::LANES, load::<V, IS_FLUSHED>(from, read)) };
            }
        }
    }

    /// Packs up to a register of vectors whose elements are neighbours, in squares that are transposed in registers.
    ///
    /// # Safety
    /// As [`Vectors::pack`].
    #[inline(always)]
    unsafe fn turn<V: Vector, const IS_FLUSHED: bool>(
        self,
        (from, read): (*const f32, usize),
        target: Packed,
        lane: usize,
        depth: usize,
    ) {
        for start in (0..depth).step_by(V::LANES) {
            let count = V::LANES.min(depth - start);
            // SAFETY: the vectors and elements that are read exist, and the panel has their places.
            unsafe {
                let mut square = V::square();
                for (vector, row) in square.as_mut().iter_mut().enumerate() {
                    if vector < read {
                        *row = load::<V, IS_FLUSHED>(from.wrapping_add(vector * self.stride + start), count);
                    }
                }
                let mut square = V::transpose(square);
                for (i, &mut row) in square.as_mut().iter_mut().enumerate() {
                    if i < count {
                        target.store(start + i, lane, row);
                    }
                }
            }
        }
    }
}

/// Memory of a packed panel.
#[derive(Clone, Copy)]
struct Packed {
    start: *mut f32,
    width: usize,
    depth: usize,
}

impl Packed {
    /// Stores the elements `k` of a register of vectors from `lane` on. In a panel that is narrower than a register, it also
    /// writes into the places of the next elements, which are stored later.
    ///
    /// # Safety
    /// The processor must have the instructions of `V`, and the panel must have the places.
    #[inline(always)]
    unsafe fn store<V: Vector>(self, k: usize, lane: usize, elements: V) {
        let is_narrow = self.width < V::LANES;
        let room = if is_narrow { (self.depth - k) * self.width } else { self.width - lane };
        // SAFETY: as the caller says; a whole register does not reach beyond the panel.
        unsafe {
            let to = self.start.add(k * self.width + lane);
            if room >= V::LANES {
                V::store(elements, to);
            } else {
                V::store_part(elements, to, self.width - lane);
            }
        }
    }
}

/// Loads a register, or `count` elements if they are fewer.
///
/// # Safety
/// The processor must have the instructions of `V`, and the elements must exist.
#[inline(always)]
unsafe fn load<V: Vector, const IS_FLUSHED: bool>(from: *const f32, count: usize) -> V {
    // SAFETY: as the caller says.
    unsafe {
        let elements = if count == V::LANES { V::load(from) } else { V::load_part(from, count) };
        if IS_FLUSHED { V::flush(elements, &mut V::splat(0.0)) } else { elements }
    }
}
