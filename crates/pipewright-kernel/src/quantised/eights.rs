//! Products of a row of numbers with rows of elements of four bits, whose scales are the same for eight neighbours.
//!
//! The order of a sum does not depend on the instructions. A row is cut into chunks of 128 elements, and the last one
//! is filled up with zeros. There are sixteen lanes, and lane `l` has the elements `8 l` to `8 l + 7` of each chunk:
//!
//! ```text
//! even = t0 x0,  then fma(t2, x2, even), fma(t4, x4, even), fma(t6, x6, even)    t is the number of a code
//! odd  = t1 x1,  then fma(t3, x3, odd),  fma(t5, x5, odd),  fma(t7, x7, odd)
//! sum  = fma(even + odd, scale, sum)                                             in the order of the chunks
//! sum  = fma(x0 + .. + x7, offset, sum)                                          if elements have offsets
//! ```
//!
//! The sums of the lanes are added pairwise ([`fold`]). So each four bytes of codes are one lane of a register,
//! from which shifts take the codes.

mod units;

use multiversion::multiversion;

#[cfg(target_arch = "x86_64")]
use crate::simd::are_hidden;
use crate::simd::{LANES, fold};
#[cfg(target_arch = "x86_64")]
use units::{Avx2, Avx512};
use units::{Scalar, Unit};

/// The neighbours with one scale.
pub(super) const EIGHT: usize = 8;
/// The elements of a chunk.
const CHUNK: usize = EIGHT * LANES;
/// The rows that are multiplied together, so that each number of `x` is read once for them.
const ROWS: usize = 4;

/// A matrix whose rows consist of eights.
pub(super) trait InEights {
    /// Whether an element is `number * scale + offset`, and not `number * scale`.
    const HAS_OFFSETS: bool;

    /// Returns the numbers of the codes.
    fn numbers(&self) -> &[f32; 16];

    /// Returns whether the elements of each `count` neighbours of a row, which begin at a multiple of `count`, are in one block.
    fn is_in_runs(&self, count: usize) -> bool;

    /// Writes the scales and offsets of each `run` neighbours of a row, and returns the codes.
    fn row<'a>(&'a self, row: usize, run: usize, factors: Factors<'_>) -> &'a [u8];
}

/// Room for the scales and offsets of the runs of a row.
pub(super) struct Factors<'a> {
    pub(super) scales: &'a mut [f32],
    pub(super) offsets: &'a mut [f32],
}

/// Blocks whose elements have the same factor, divided into runs of neighbours.
#[derive(Clone, Copy)]
pub(super) struct BlocksOfRuns {
    /// The runs of a block.
    pub(super) size: usize,
    /// The runs of the first block that are before the row.
    pub(super) skipped: usize,
}

impl BlocksOfRuns {
    /// Returns the runs of the first `count` blocks.
    pub(super) fn runs(self, count: usize) -> usize {
        count * self.size - self.skipped
    }

    /// Writes the factor of each run of a row. `factor_of` returns the factor of a block.
    #[inline(always)]
    pub(super) fn spread(self, factor_of: impl Fn(usize) -> f32, out: &mut [f32]) {
        if out.is_empty() {
            return;
        }
        let (own, others) = out.split_at_mut(self.runs(1).min(out.len()));
        own.fill(factor_of(0));
        // Blocks of common sizes are filled without a loop.
        match self.size {
            2 => fill::<2>(&factor_of, others),
            4 => fill::<4>(&factor_of, others),
            size => {
                for (block, to) in others.chunks_mut(size).enumerate() {
                    to.fill(factor_of(block + 1));
                }
            }
        }
    }
}

/// Writes the factor of each block from the second one on `N` times.
#[inline(always)]
fn fill<const N: usize>(factor_of: impl Fn(usize) -> f32, out: &mut [f32]) {
    let (whole, rest) = out.as_chunks_mut::<N>();
    let count = whole.len();
    for (block, to) in whole.iter_mut().enumerate() {
        *to = [factor_of(block + 1); N];
    }
    if !rest.is_empty() {
        rest.fill(factor_of(count + 1));
    }
}

/// Writes the factor of each run of a row, from the factors of its blocks.
#[multiversion(targets = "simd")]
pub(super) fn spread(factors: &[f32], blocks: BlocksOfRuns, out: &mut [f32]) {
    if blocks.size == 1 {
        return out.copy_from_slice(&factors[..out.len()]);
    }
    blocks.spread(|block| factors[block], out);
}

/// Numbers of the lanes, in one line of a cache.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Lanes([f32; LANES]);

/// The scales or offsets of a chunk: one for each run of neighbours.
trait Chunked: Copy {
    /// The neighbours of a run.
    const RUN: usize;
    const ZERO: Self;

    /// Returns the factors of all chunks.
    fn flat(chunks: &mut [Self]) -> &mut [f32];

    /// Returns the factor of each lane.
    fn lanes<U: Unit>(&self, unit: U) -> U::Lanes;
}

impl Chunked for Lanes {
    const RUN: usize = EIGHT;
    const ZERO: Self = Self([0.0; LANES]);

    fn flat(chunks: &mut [Self]) -> &mut [f32] {
        // SAFETY: the type has the layout of its only field, whose size is the alignment.
        unsafe { std::slice::from_raw_parts_mut(chunks.as_mut_ptr().cast(), chunks.len() * LANES) }
    }

    #[inline(always)]
    fn lanes<U: Unit>(&self, unit: U) -> U::Lanes {
        unit.load(&self.0)
    }
}

/// Two runs, as in blocks of 64 elements and more.
impl Chunked for [f32; 2] {
    const RUN: usize = CHUNK / 2;
    const ZERO: Self = [0.0; 2];

    fn flat(chunks: &mut [Self]) -> &mut [f32] {
        chunks.as_flattened_mut()
    }

    #[inline(always)]
    fn lanes<U: Unit>(&self, unit: U) -> U::Lanes {
        unit.halves(self)
    }
}

/// A row of numbers in the order in which codes are looked up.
pub(super) struct Spread {
    /// For each chunk, the first elements of the eights, then the second ones, and so on.
    chunks: Vec<[Lanes; EIGHT]>,
    /// The sums of the eights.
    sums: Vec<Lanes>,
    columns: usize,
}

impl Spread {
    pub(super) fn new(x: &[f32]) -> Self {
        let chunk = |part: &[f32]| -> [Lanes; EIGHT] {
            let mut filled = [0.0; CHUNK];
            filled[..part.len()].copy_from_slice(part);
            let lanes = |place| Lanes(std::array::from_fn(|lane| filled[lane * EIGHT + place]));
            std::array::from_fn(lanes)
        };
        let chunks: Vec<_> = x.chunks(CHUNK).map(chunk).collect();
        let sum = |chunk: &[Lanes; EIGHT], lane| chunk.iter().fold(0.0, |sum, x| sum + x.0[lane]);
        let sums = chunks.iter().map(|chunk| Lanes(std::array::from_fn(|lane| sum(chunk, lane)))).collect();
        Self { chunks, sums, columns: x.len() }
    }
}

/// Computes the products of the rows from `first` on with a row.
pub(super) fn products<M: InEights>(
    instructions: Instructions,
    matrix: &M,
    first: usize,
    x: &Spread,
    out: &mut [f32],
) {
    if matrix.is_in_runs(<[f32; 2]>::RUN) {
        products_of::<_, [f32; 2]>(instructions, matrix, first, x, out);
    } else {
        products_of::<_, Lanes>(instructions, matrix, first, x, out);
    }
}

fn products_of<M: InEights, F: Chunked>(
    instructions: Instructions,
    matrix: &M,
    first: usize,
    x: &Spread,
    out: &mut [f32],
) {
    let chunks = x.chunks.len();
    let of_row = |is_used: bool| vec![F::ZERO; if is_used { chunks } else { 0 }];
    let mut scales: [_; ROWS] = std::array::from_fn(|_| of_row(true));
    let mut offsets: [_; ROWS] = std::array::from_fn(|_| of_row(M::HAS_OFFSETS));
    let mut codes: [&[u8]; ROWS] = [&[]; ROWS];
    for (index, out) in out.chunks_mut(ROWS).enumerate() {
        // Rows after the last one repeat it.
        for (place, codes) in codes.iter_mut().enumerate() {
            let runs = x.columns / F::RUN;
            let factors = Factors {
                scales: &mut F::flat(&mut scales[place])[..runs],
                offsets: F::flat(&mut offsets[place]).get_mut(..runs).unwrap_or_default(),
            };
            *codes = matrix.row(first + index * ROWS + place.min(out.len() - 1), F::RUN, factors);
        }
        let [scales, offsets] = [&scales, &offsets].map(|factors| factors.each_ref().map(Vec::as_slice));
        let rows = Rows { codes, scales, offsets, numbers: matrix.numbers(), x };
        let found = if M::HAS_OFFSETS {
            instructions.products::<_, true>(&rows)
        } else {
            instructions.products::<_, false>(&rows)
        };
        out.copy_from_slice(&found[..out.len()]);
    }
}

/// Instructions that the processor has.
#[derive(Clone, Copy, Debug)]
pub(super) enum Instructions {
    Scalar(Scalar),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
}

impl Instructions {
    /// Returns the widest instructions.
    pub(super) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let [is_wide_hidden, is_hidden] = are_hidden();
            if let Some(wide) = Avx512::detect().filter(|_| !is_wide_hidden) {
                return Self::Avx512(wide);
            }
            if let Some(wide) = Avx2::detect().filter(|_| !is_hidden) {
                return Self::Avx2(wide);
            }
        }
        Self::Scalar(Scalar)
    }

    /// Returns all instructions that the processor has.
    #[cfg(test)]
    fn all() -> Vec<Self> {
        let mut all = vec![Self::Scalar(Scalar)];
        #[cfg(target_arch = "x86_64")]
        {
            all.extend(Avx2::detect().map(Self::Avx2));
            all.extend(Avx512::detect().map(Self::Avx512));
        }
        all
    }

    fn products<F: Chunked, const HAS_OFFSETS: bool>(self, rows: &Rows<'_, F>) -> [f32; ROWS] {
        match self {
            Self::Scalar(unit) => rows.products::<_, HAS_OFFSETS>(unit),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the unit proves that the processor has the instructions.
            Self::Avx2(unit) => unsafe { in_avx2::<_, HAS_OFFSETS>(unit, rows) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the unit proves that the processor has the instructions.
            Self::Avx512(unit) => unsafe { in_avx512::<_, HAS_OFFSETS>(unit, rows) },
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn in_avx2<F: Chunked, const HAS_OFFSETS: bool>(unit: Avx2, rows: &Rows<'_, F>) -> [f32; ROWS] {
    rows.products::<_, HAS_OFFSETS>(unit)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn in_avx512<F: Chunked, const HAS_OFFSETS: bool>(unit: Avx512, rows: &Rows<'_, F>) -> [f32; ROWS] {
    rows.products::<_, HAS_OFFSETS>(unit)
}

/// The operands of some products.
struct Rows<'a, F> {
    codes: [&'a [u8]; ROWS],
    /// The factors of the chunks of each row.
    scales: [&'a [F]; ROWS],
    offsets: [&'a [F]; ROWS],
    numbers: &'a [f32; 16],
    x: &'a Spread,
}

impl<F: Chunked> Rows<'_, F> {
    /// Computes the products in the order that is described above.
    #[inline(always)]
    fn products<U: Unit, const HAS_OFFSETS: bool>(&self, unit: U) -> [f32; ROWS] {
        let numbers = unit.load(self.numbers);
        let mut sums = [unit.zero(); ROWS];
        let (x, of_x) = (&self.x.chunks[..], &self.x.sums[..]);
        let whole = x.len().min(self.codes[0].len() / (CHUNK / 2));
        // The loop then checks no index.
        let mut codes = [&[][..]; ROWS];
        for (chunks, codes) in codes.iter_mut().zip(self.codes) {
            *chunks = &codes.as_chunks().0[..whole];
        }
        let scales = cut(self.scales, whole);
        let offsets = cut(self.offsets, if HAS_OFFSETS { whole } else { 0 });
        let of_x = &of_x[..whole];
        for index in 0..whole {
            let mut chunk = Chunk {
                codes: [&codes[0][index]; ROWS],
                scales: [&scales[0][index]; ROWS],
                offsets: [&scales[0][index]; ROWS],
                x: &x[index],
                of_x: &of_x[index],
            };
            for row in 0..ROWS {
                chunk.codes[row] = &codes[row][index];
                chunk.scales[row] = &scales[row][index];
                if HAS_OFFSETS {
                    chunk.offsets[row] = &offsets[row][index];
                }
                unit.prefetch(chunk.codes[row].as_ptr().wrapping_add(ROWS * self.codes[0].len()));
            }
            chunk.add::<U, HAS_OFFSETS>(unit, numbers, &mut sums);
        }
        if whole < x.len() {
            let mut filled = [[0; CHUNK / 2]; ROWS];
            for (filled, codes) in filled.iter_mut().zip(self.codes) {
                let rest = codes.as_chunks::<{ CHUNK / 2 }>().1;
                filled[..rest.len()].copy_from_slice(rest);
            }
            let scales = self.scales.map(|scales| &scales[whole]);
            let offsets = if HAS_OFFSETS { self.offsets.map(|offsets| &offsets[whole]) } else { scales };
            let (codes, x, of_x) = (filled.each_ref(), &x[whole], &self.x.sums[whole]);
            Chunk { codes, scales, offsets, x, of_x }.add::<U, HAS_OFFSETS>(unit, numbers, &mut sums);
        }
        let mut found = [0.0; ROWS];
        for (to, sum) in found.iter_mut().zip(sums) {
            *to = fold(unit.stored(sum), |a, b| a + b);
        }
        found
    }
}

/// Returns the first `len` elements of each slice. `map` of arrays is not always inlined.
#[inline(always)]
fn cut<T>(mut slices: [&[T]; ROWS], len: usize) -> [&[T]; ROWS] {
    for slice in &mut slices {
        *slice = &slice[..len];
    }
    slices
}

/// The operands of the products of one chunk.
struct Chunk<'a, F> {
    codes: [&'a [u8; CHUNK / 2]; ROWS],
    scales: [&'a F; ROWS],
    offsets: [&'a F; ROWS],
    x: &'a [Lanes; EIGHT],
    of_x: &'a Lanes,
}

impl<F: Chunked> Chunk<'_, F> {
    /// Adds the products to the sums of the rows.
    #[inline(always)]
    fn add<U: Unit, const HAS_OFFSETS: bool>(&self, unit: U, numbers: U::Lanes, sums: &mut [U::Lanes; ROWS]) {
        let mut codes = [unit.no_codes(); ROWS];
        for (codes, bytes) in codes.iter_mut().zip(self.codes) {
            *codes = unit.codes(bytes);
        }
        let mut halves = [[unit.zero(); 2]; ROWS];
        for (pair, [even, odd]) in self.x.as_chunks::<2>().0.iter().enumerate() {
            let (even, odd, shift) = (unit.load(&even.0), unit.load(&odd.0), 8 * pair as i32);
            for (codes, halves) in codes.iter().zip(&mut halves) {
                // The upper half of a byte comes first.
                let of_even = unit.look_up(numbers, *codes, shift + 4);
                halves[0] = unit.multiply_add(of_even, even, halves[0]);
                halves[1] = unit.multiply_add(unit.look_up(numbers, *codes, shift), odd, halves[1]);
            }
        }
        for (row, (sum, [even, odd])) in sums.iter_mut().zip(halves).enumerate() {
            *sum = unit.multiply_add(unit.add(even, odd), self.scales[row].lanes(unit), *sum);
            if HAS_OFFSETS {
                let of_x = unit.load(&self.of_x.0);
                *sum = unit.multiply_add(of_x, self.offsets[row].lanes(unit), *sum);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantised::{Codebook, DoubleScales, Grouped, Scales};

    /// Returns numbers from -1 to 1 that fill their mantissas.
    fn numbers(count: usize, seed: u32) -> Vec<f32> {
        let next = |state: &u32| Some(state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453));
        let states = std::iter::successors(Some(seed), next).skip(3).take(count);
        states.map(|state| state as f32 / 2f32.powi(31) - 1.0).collect()
    }

    fn bytes(count: usize, seed: u32) -> Vec<u8> {
        numbers(count, seed).into_iter().map(|number| (number * 127.0) as i8 as u8).collect()
    }

    /// Computes the product of one row as the documentation of the module says, element by element.
    fn defined<M: InEights>(matrix: &M, row: usize, x: &[f32]) -> f32 {
        let (mut scales, mut offsets) = (vec![0.0; x.len() / EIGHT], vec![0.0; x.len() / EIGHT]);
        let factors = Factors { scales: &mut scales, offsets: &mut offsets };
        let codes = matrix.row(row, EIGHT, factors);
        let mut lanes = [0f32; LANES];
        for (eight, x) in x.chunks(EIGHT).enumerate() {
            let number = |index: usize| {
                let byte = codes[(eight * EIGHT + index) / 2];
                matrix.numbers()[usize::from(if index.is_multiple_of(2) { byte >> 4 } else { byte & 15 })]
            };
            let half = |first: usize| {
                let others = (first + 2..EIGHT).step_by(2);
                others.fold(number(first) * x[first], |sum, index| number(index).mul_add(x[index], sum))
            };
            let sum = &mut lanes[eight % LANES];
            *sum = (half(0) + half(1)).mul_add(scales[eight], *sum);
            if M::HAS_OFFSETS {
                *sum = x.iter().fold(0.0, |sum, x| sum + x).mul_add(offsets[eight], *sum);
            }
        }
        fold(lanes, |a, b| a + b)
    }

    fn check<M: InEights>(matrix: &M, [rows, columns]: [usize; 2]) {
        let x = numbers(columns, 3);
        let expected: Vec<u32> = (0..rows).map(|row| defined(matrix, row, &x).to_bits()).collect();
        for instructions in Instructions::all() {
            let mut out = vec![0.0; rows];
            products(instructions, matrix, 0, &Spread::new(&x), &mut out);
            let found: Vec<u32> = out.iter().map(|product| product.to_bits()).collect();
            assert_eq!(found, expected, "{instructions:?}, {rows} x {columns}");
            let last = &mut out[rows - 1..];
            products(instructions, matrix, rows - 1, &Spread::new(&x), last);
            assert_eq!(last[0].to_bits(), expected[rows - 1], "{instructions:?}, the last row alone");
        }
    }

    /// Rows with and without a part of a chunk, and blocks that end within rows or have elements of several rows.
    const SHAPES: [[usize; 3]; 10] = [
        [1, 8, 8],
        [4, 128, 64],
        [5, 136, 32],
        [9, 320, 64],
        [6, 1016, 24],
        [3, 2056, 128],
        [7, 72, 256],
        [2, 512, 16],
        [3, 320, 128],
        [5, 512, 256],
    ];

    #[test]
    fn all_instructions_give_the_sums_that_are_defined() {
        for [rows, columns, block] in SHAPES {
            let table = numbers(16, 1).try_into().expect("sixteen");
            let (codes, blocks) = (bytes(rows * columns / 2, 2), (rows * columns).div_ceil(block));
            let double = DoubleScales {
                codes: bytes(blocks, 4),
                map: Box::new(numbers(256, 5).try_into().expect("256")),
                scales: numbers(blocks.div_ceil(3), 6),
                block: 3,
                offset: 0.125,
                first: 0,
            };
            let powers = Scales::Exponents((0..blocks).map(|index| 120 + (index % 16) as u8).collect());
            for scales in [Scales::Double(double), Scales::Single(numbers(blocks, 7)), powers] {
                let matrix = Codebook::new([rows, columns], codes.clone(), table, scales, block);
                let matrix = matrix.expect("a matrix");
                check(&matrix, [rows, columns]);
                if rows > 2 && columns > 16 {
                    let part = matrix.part(1..rows, 8..columns - 8);
                    assert!(part.is_in_runs(EIGHT));
                    check(&part, [rows - 1, columns - 16]);
                }
            }
        }
    }

    #[test]
    fn offsets_are_added_by_all_instructions() {
        for [rows, columns, group] in SHAPES {
            let groups = rows * columns.div_ceil(group);
            let zeros = bytes(groups, 4).into_iter().map(|zero| zero % 16).collect();
            let codes = bytes(rows * columns / 2, 2);
            let matrix = Grouped::new([rows, columns], codes, zeros, numbers(groups, 5), group);
            let matrix = matrix.expect("a matrix");
            check(&matrix, [rows, columns]);
            if rows > 2 && columns > 16 {
                check(&matrix.part(1..rows, 8..columns - 8), [rows - 1, columns - 16]);
            }
        }
    }
}
