//! Products with a narrow matrix, such as the products of low-rank adapters: one of the three dimensions is at most
//! about a hundred.
//!
//! Packing an operand takes longer than what such a product saves by it, so both are read as they are. Each
//! operand may be bfloat16; its elements are widened in registers. Sums are in single precision.
//!
//! ```text
//! left   any strides:        an element is spread over a register
//! right  rows of neighbours: 16 columns are a register
//! tile   8 x 32 or 16 x 16 sums in registers, over a block of the inner dimension
//! ```
//!
//! Sums have the order and the bits of [`crate::product`]. On a processor without AVX-512, it multiplies widened copies.

use half::bf16;

use crate::product::{self, Matrix, assert_fits};

/// A matrix of one of two element types.
#[derive(Clone, Copy, Debug)]
pub enum AnyMatrix<'a> {
    /// Single precision.
    Single(Matrix<'a>),
    /// Bfloat16.
    Half(Matrix<'a, bf16>),
}

impl AnyMatrix<'_> {
    /// Returns the matrix in single precision, with widened elements in `room`.
    fn single<'d>(&'d self, room: &'d mut Vec<f32>) -> Matrix<'d> {
        match self {
            Self::Single(matrix) => *matrix,
            Self::Half(matrix) => {
                *room = matrix.widened_lines();
                matrix.with_lines(room)
            }
        }
    }

    /// Returns the number of rows and of columns.
    fn size(&self) -> [usize; 2] {
        match self {
            Self::Single(matrix) => [matrix.rows, matrix.columns],
            Self::Half(matrix) => [matrix.rows, matrix.columns],
        }
    }

    /// Swaps rows and columns without moving elements.
    #[must_use]
    pub fn transposed(self) -> Self {
        match self {
            Self::Single(matrix) => Self::Single(matrix.transposed()),
            Self::Half(matrix) => Self::Half(matrix.transposed()),
        }
    }

    /// Returns whether the elements of a row are neighbours.
    #[cfg(target_arch = "x86_64")]
    fn has_rows_of_neighbours(&self) -> bool {
        match self {
            Self::Single(matrix) => matrix.column_stride == 1,
            Self::Half(matrix) => matrix.column_stride == 1,
        }
    }
}

/// Computes `a b` into new memory, in row-major order.
pub fn product(a: AnyMatrix<'_>, b: AnyMatrix<'_>) -> Vec<f32> {
    let ([rows, _], [_, columns]) = (a.size(), b.size());
    let size = rows.checked_mul(columns).expect("a product has at most usize::MAX elements");
    let mut out = vec![0.0; size];
    add_product(&mut out, columns, a, b);
    out
}

/// Computes `out += a b`, in rows that begin `row_stride` elements apart. It is fast if the elements of a row of
/// `b` are neighbours.
pub fn add_product(out: &mut [f32], row_stride: usize, a: AnyMatrix<'_>, b: AnyMatrix<'_>) {
    let ([rows, inner], [inner_of_b, columns]) = (a.size(), b.size());
    assert_eq!(inner, inner_of_b, "inner dimensions of a product agree");
    assert_fits(out.len(), rows, columns, row_stride);
    #[cfg(target_arch = "x86_64")]
    if b.has_rows_of_neighbours()
        && let Some(instructions) = tiles::Instructions::detect()
    {
        let target = tiles::Target { start: out.as_mut_ptr(), row_stride };
        // SAFETY: the assertions bound the result, and each matrix was bounded when it was made.
        return unsafe {
            match (a, b) {
                (AnyMatrix::Single(a), AnyMatrix::Single(b)) => tiles::multiply(instructions, target, a, b),
                (AnyMatrix::Single(a), AnyMatrix::Half(b)) => tiles::multiply(instructions, target, a, b),
                (AnyMatrix::Half(a), AnyMatrix::Single(b)) => tiles::multiply(instructions, target, a, b),
                (AnyMatrix::Half(a), AnyMatrix::Half(b)) => tiles::multiply(instructions, target, a, b),
            }
        };
    }
    let (mut left, mut right) = (Vec::new(), Vec::new());
    product::add_product(out, row_stride, a.single(&mut left), b.single(&mut right));
}

#[cfg(target_arch = "x86_64")]
mod tiles {
    //! The tiles of a product, with the instructions of AVX-512.

    use std::arch::x86_64::*;

    use half::bf16;
    use rayon::prelude::*;

    use crate::product::{BLOCK, Matrix, is_parallel};

    /// Lanes of a register.
    const LANES: usize = 16;

    /// Proves that the processor has the instructions.
    #[derive(Clone, Copy)]
    pub(super) struct Instructions(());

    impl Instructions {
        pub(super) fn detect() -> Option<Self> {
            #[cfg(feature = "testing")]
            if crate::testing::is_hidden() {
                return None;
            }
            let are_available = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl");
            are_available.then_some(Self(()))
        }
    }

    /// The result of a product.
    #[derive(Clone, Copy)]
    pub(super) struct Target {
        /// The first element.
        pub(super) start: *mut f32,
        /// The distance between two rows.
        pub(super) row_stride: usize,
    }

    // SAFETY: threads write different tiles of the target.
    unsafe impl Sync for Target {}

    impl Target {
        fn at(&self, row: usize, column: usize) -> *mut f32 {
            self.start.wrapping_add(row * self.row_stride + column)
        }
    }

    /// An element that is widened in registers.
    pub(super) trait Widened: Copy + Sync {
        /// Spreads an element over a register.
        ///
        /// # Safety
        /// The processor must have the instructions, and the element must exist.
        unsafe fn spread(from: *const Self) -> __m512;

        /// Loads the elements of a mask.
        ///
        /// # Safety
        /// The processor must have the instructions, and the mask's elements must exist.
        unsafe fn load(mask: __mmask16, from: *const Self) -> __m512;
    }

    impl Widened for f32 {
        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
        unsafe fn spread(from: *const Self) -> __m512 {
            // SAFETY: the element exists.
            _mm512_set1_ps(unsafe { *from })
        }

        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
        unsafe fn load(mask: __mmask16, from: *const Self) -> __m512 {
            // SAFETY: the mask's elements exist.
            unsafe { _mm512_maskz_loadu_ps(mask, from) }
        }
    }

    impl Widened for bf16 {
        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
        unsafe fn spread(from: *const Self) -> __m512 {
            // SAFETY: the element exists.
            let bits = unsafe { *from }.to_bits().cast_signed();
            // The upper half of a word of single precision has the bits of bfloat16.
            let upper = _mm512_and_si512(_mm512_set1_epi16(bits), _mm512_set1_epi32(-0x1_0000));
            _mm512_castsi512_ps(upper)
        }

        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
        unsafe fn load(mask: __mmask16, from: *const Self) -> __m512 {
            // SAFETY: the mask's elements exist.
            let bits = unsafe { _mm256_maskz_loadu_epi16(mask, from.cast()) };
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
        }
    }

    /// Computes `target += a b`.
    ///
    /// # Safety
    /// The target must have `a.rows` rows of `b.columns` elements that nothing else uses, and the elements of
    /// a row of `b` must be neighbours.
    pub(super) unsafe fn multiply<A: Widened, B: Widened>(
        _: Instructions,
        target: Target,
        a: Matrix<'_, A>,
        b: Matrix<'_, B>,
    ) {
        if a.columns == 0 {
            return;
        }
        let is_parallel = is_parallel(a.rows, b.columns, a.columns);
        // SAFETY: the processor has the instructions, and the caller says the rest.
        unsafe {
            if b.columns <= LANES {
                all_tiles::<16, 1, A, B>(target, a, b, is_parallel);
            } else {
                all_tiles::<8, 2, A, B>(target, a, b, is_parallel);
            }
        }
    }

    /// # Safety
    /// As [`multiply`], on a processor that has the instructions.
    unsafe fn all_tiles<const ROWS: usize, const VECTORS: usize, A: Widened, B: Widened>(
        target: Target,
        a: Matrix<'_, A>,
        b: Matrix<'_, B>,
        is_parallel: bool,
    ) {
        let panels = b.columns.div_ceil(VECTORS * LANES);
        let tiles = a.rows.div_ceil(ROWS) * panels;
        let target = &target;
        let compute = |index: usize| {
            let (row, column) = (index / panels * ROWS, index % panels * VECTORS * LANES);
            // SAFETY: the tile begins inside the result, and each tile is computed once.
            unsafe { tile::<ROWS, VECTORS, A, B>(target, a, b, [row, column]) };
        };
        if is_parallel {
            // So many tiles that a thread's next task takes longer than to fetch it.
            (0..tiles).into_par_iter().with_min_len(16).for_each(compute);
        } else {
            (0..tiles).for_each(compute);
        }
    }

    /// Adds a tile that begins at a row and a column. Rows behind the last one are computed as copies of the
    /// last one, and not written.
    ///
    /// # Safety
    /// As [`all_tiles`], for a row and a column of the result.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn tile<const ROWS: usize, const VECTORS: usize, A: Widened, B: Widened>(
        target: &Target,
        a: Matrix<'_, A>,
        b: Matrix<'_, B>,
        [row, column]: [usize; 2],
    ) {
        let rows = ROWS.min(a.rows - row);
        let mut starts = [0; ROWS];
        for (index, start) in starts.iter_mut().enumerate() {
            *start = (row + index.min(rows - 1)) * a.row_stride;
        }
        let mut masks = [0; VECTORS];
        for (index, mask) in masks.iter_mut().enumerate() {
            let present = b.columns.saturating_sub(column + index * LANES).min(LANES);
            *mask = u16::MAX.checked_shr((LANES - present) as u32).unwrap_or(0);
        }
        let mut right = [_mm512_setzero_ps(); VECTORS];
        for start in (0..a.columns).step_by(BLOCK) {
            let mut sums = [[_mm512_setzero_ps(); VECTORS]; ROWS];
            for inner in start..a.columns.min(start + BLOCK) {
                let line = b.data.as_ptr().wrapping_add(inner * b.row_stride + column);
                let left = a.data.as_ptr().wrapping_add(inner * a.column_stride);
                for (index, (right, &mask)) in right.iter_mut().zip(&masks).enumerate() {
                    // SAFETY: the masks end at the last column; without a column nothing is read.
                    *right = unsafe { B::load(mask, line.wrapping_add(index * LANES)) };
                }
                for (sums, &start) in sums.iter_mut().zip(&starts) {
                    // SAFETY: each start is of a row of the operand.
                    let element = unsafe { A::spread(left.wrapping_add(start)) };
                    for (sum, &right) in sums.iter_mut().zip(&right) {
                        *sum = _mm512_fmadd_ps(element, right, *sum);
                    }
                }
            }
            for (index, sums) in sums.iter().enumerate().take(rows) {
                for (vector, (&sum, &mask)) in sums.iter().zip(&masks).enumerate() {
                    let at = target.at(row + index, column + vector * LANES);
                    // SAFETY: the mask ends at the last column, and masked elements are not accessed.
                    unsafe {
                        _mm512_mask_storeu_ps(at, mask, _mm512_add_ps(_mm512_maskz_loadu_ps(mask, at), sum));
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rayon::ThreadPoolBuilder;

    use super::*;
    use crate::half::Half;
    use crate::numbers::numbers;
    use crate::testing::run_without_instruction;

    /// Checks all combinations of element types and orientations of the left operand.
    fn check(rows: usize, columns: usize, inner: usize) {
        let (a, b) =
            (bf16::narrowed(&numbers(rows * inner, 1)), bf16::narrowed(&numbers(inner * columns, 2)));
        let (wide_a, wide_b) = (bf16::widened(&a), bf16::widened(&b));
        let turned: Vec<bf16> =
            (0..rows * inner).map(|i| a[i % rows.max(1) * inner + i / rows.max(1)]).collect();
        let wide_turned = bf16::widened(&turned);
        let lefts = [
            AnyMatrix::Half(Matrix::new(&a, rows, inner)),
            AnyMatrix::Single(Matrix::new(&wide_a, rows, inner)),
            AnyMatrix::Half(Matrix::new(&turned, inner, rows).transposed()),
            AnyMatrix::Single(Matrix::new(&wide_turned, inner, rows).transposed()),
        ];
        let rights = [
            AnyMatrix::Half(Matrix::new(&b, inner, columns)),
            AnyMatrix::Single(Matrix::new(&wide_b, inner, columns)),
        ];
        let stride = columns + 3;
        let element = |row: usize, column: usize| -> f64 {
            (0..inner)
                .map(|i| f64::from(wide_a[row * inner + i]) * f64::from(wide_b[i * columns + column]))
                .sum()
        };
        let mut first = None;
        for (left, right) in lefts.iter().flat_map(|left| rights.iter().map(move |right| (*left, *right))) {
            let mut out = vec![1.0; rows * stride];
            add_product(&mut out, stride, left, right);
            for (row, found) in out.chunks(stride).enumerate() {
                for (column, found) in found[..columns].iter().enumerate() {
                    let expected = element(row, column) + 1.0;
                    assert!(
                        (f64::from(*found) - expected).abs() < 1e-4,
                        "{found} {expected} at {row} {column}"
                    );
                }
                assert_eq!(found[columns..], [1.0; 3], "{rows} {columns} {inner}");
            }
            assert_eq!(first.get_or_insert_with(|| out.clone()), &out, "all operands have the same bits");
        }
    }

    #[test]
    fn products_equal_their_definition() {
        for (rows, columns, inner) in
            [(1, 1, 1), (16, 16, 7), (17, 9, 33), (9, 40, 16), (7, 33, 5), (3, 64, 2), (4, 5, 0), (0, 5, 3)]
        {
            check(rows, columns, inner);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "takes minutes under Miri")]
    fn rows_have_the_same_bits_on_any_number_of_threads() {
        let (a, b) = (numbers(700 * 90, 1), bf16::narrowed(&numbers(90 * 130, 2)));
        let (left, right) =
            (AnyMatrix::Single(Matrix::new(&a, 700, 90)), AnyMatrix::Half(Matrix::new(&b, 90, 130)));
        const { assert!(700 * 90 * 130 >= product::PARALLEL_FROM) };
        let on_threads = |threads| {
            let pool = ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
            pool.install(|| product(left, right))
        };
        let whole = on_threads(1);
        for threads in [2, 3] {
            assert_eq!(on_threads(threads), whole, "{threads} threads");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri starts no processes")]
    fn all_without_the_instruction() {
        run_without_instruction("narrow_product");
    }

    #[test]
    fn sums_have_the_bits_of_other_products() {
        for [rows, columns, inner] in [[17, 16, 1100], [9, 40, 513], [3, 20, 512]] {
            let (a, b) = (numbers(rows * inner, 1), numbers(inner * columns, 2));
            let (left, right) = (Matrix::new(&a, rows, inner), Matrix::new(&b, inner, columns));
            let [mut found, mut expected] = [(); 2].map(|()| numbers(rows * columns, 3));
            add_product(&mut found, columns, AnyMatrix::Single(left), AnyMatrix::Single(right));
            product::add_product(&mut expected, columns, left, right);
            assert_eq!(found, expected, "{rows} {columns} {inner}");
        }
    }

    #[test]
    fn a_row_has_the_same_bits_in_every_product() {
        let (a, b) = (numbers(300 * 40, 1), numbers(40 * 24, 2));
        let right = AnyMatrix::Single(Matrix::new(&b, 40, 24));
        let whole = product(AnyMatrix::Single(Matrix::new(&a, 300, 40)), right);
        let part = product(AnyMatrix::Single(Matrix::new(&a[40 * 7..], 11, 40)), right);
        assert_eq!(part, whole[24 * 7..24 * 18]);
    }

    #[test]
    #[should_panic = "inner dimensions of a product agree"]
    fn operands_that_do_not_fit_are_refused() {
        let numbers = [0.0; 6];
        let _ = product(
            AnyMatrix::Single(Matrix::new(&numbers, 2, 3)),
            AnyMatrix::Single(Matrix::new(&numbers, 2, 3)),
        );
    }
}
