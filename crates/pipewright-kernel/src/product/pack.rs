//! Packs the operands of a product in panels: for each element of the inner dimension, the elements of some rows of the
//! left operand or of some columns of the right one.

use super::matrix::Matrix;
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

    /// Writes element `start + k` of vector `first + v` at index `k * width + v`.
    ///
    /// # Safety
    /// The processor must have the instructions of `V`. `into` must point to memory for the panel.
    #[inline(always)]
    pub(super) unsafe fn pack<V: Vector>(self, panel: Panel, into: *mut f32) {
        let present = panel.width.min(self.count - panel.first);
        let depth = panel.depth.min(self.depth - panel.start);
        // SAFETY: as the caller says.
        unsafe {
            if self.stride == 1 {
                self.copy::<V>(panel, [present, depth], into);
            } else {
                self.turn::<V>(panel, [present, depth], into);
            }
            into.add(depth * panel.width).write_bytes(0, (panel.depth - depth) * panel.width);
        }
    }

    /// Packs neighbouring vectors.
    ///
    /// # Safety
    /// As [`Vectors::pack`].
    #[inline(always)]
    unsafe fn copy<V: Vector>(self, panel: Panel, [present, depth]: [usize; 2], into: *mut f32) {
        for k in 0..depth {
            let from = self.data.as_ptr().wrapping_add((panel.start + k) * self.depth_stride + panel.first);
            let mut lane = 0;
            while lane < panel.width {
                let read = present.saturating_sub(lane).min(V::LANES);
                // SAFETY: the vectors that are present have this element, and the panel has its place.
                unsafe {
                    let elements: V = load_elements(from.wrapping_add(lane), read, panel.is_flushed);
                    store(into.add(k * panel.width + lane), elements, panel.width - lane);
                }
                lane += V::LANES;
            }
        }
    }

    /// Packs vectors whose elements are neighbours, in squares that are transposed in registers.
    ///
    /// # Safety
    /// As [`Vectors::pack`].
    #[inline(always)]
    unsafe fn turn<V: Vector>(self, panel: Panel, [present, depth]: [usize; 2], into: *mut f32) {
        let mut lane = 0;
        while lane < panel.width {
            let vectors = present.saturating_sub(lane).min(V::LANES);
            let mut k = 0;
            while k < depth {
                let from = (panel.first + lane) * self.stride + panel.start + k;
                let from = self.data.as_ptr().wrapping_add(from);
                // SAFETY: the vectors and elements that are read exist, and the panel has their places.
                unsafe {
                    let mut square = V::square();
                    for (vector, row) in square.as_mut().iter_mut().enumerate() {
                        if vector < vectors {
                            *row = load_elements(
                                from.wrapping_add(vector * self.stride),
                                depth - k,
                                panel.is_flushed,
                            );
                        }
                    }
                    let mut square = V::transpose(square);
                    for (i, &mut row) in square.as_mut().iter_mut().enumerate() {
                        if k + i < depth {
                            store(into.add((k + i) * panel.width + lane), row, panel.width - lane);
                        }
                    }
                }
                k += V::LANES;
            }
            lane += V::LANES;
        }
    }
}

/// Loads a register, or `count` elements if they are fewer.
///
/// # Safety
/// The processor must have the instructions of `V`, and the elements must exist.
#[inline(always)]
unsafe fn load_elements<V: Vector>(from: *const f32, count: usize, is_flushed: bool) -> V {
    // SAFETY: as the caller says.
    unsafe {
        let elements = if count >= V::LANES { V::load(from) } else { V::load_part(from, count) };
        if is_flushed { V::flush(elements, &mut V::splat(0.0)) } else { elements }
    }
}

/// Stores a register, or `count` elements if they are fewer.
///
/// # Safety
/// As [`load_elements`].
#[inline(always)]
unsafe fn store<V: Vector>(to: *mut f32, elements: V, count: usize) {
    // SAFETY: as the caller says.
    unsafe {
        if count >= V::LANES {
            V::store(elements, to);
        } else {
            V::store_part(elements, to, count);
        }
    }
}
