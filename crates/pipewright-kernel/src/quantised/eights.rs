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

use crate::simd::{LANES, fold};
pub(super) use units::Instructions;
use units::Unit;

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

    /// Writes the scales and offsets of the eights of a row, and returns the codes. `blocks` is room.
    fn eights<'a>(&'a self, row: usize, factors: Factors<'_>, blocks: &mut Vec<f32>) -> &'a [u8];
}

/// Room for the scales and offsets of the eights of a row.
pub(super) struct Factors<'a> {
    pub(super) scales: &'a mut [f32],
    pub(super) offsets: &'a mut [f32],
}

/// Writes the factor of each eight of a row, from the factors of its blocks of `block` elements. The row begins `skipped`
/// elements after its first block.
pub(super) fn spread(factors: &[f32], block: usize, skipped: usize, out: &mut [f32]) {
    let Some((&first, others)) = factors.split_first() else { return };
    let count = block / EIGHT;
    let (own, rest) = out.split_at_mut(((block - skipped) / EIGHT).min(out.len()));
    own.fill(first);
    match count {
        4 => spread_whole::<4>(others, rest),
        8 => spread_whole::<8>(others, rest),
        _ => {
            for (factor, to) in others.iter().zip(rest.chunks_mut(count)) {
                to.fill(*factor);
            }
        }
    }
}

/// Writes each factor `N` times: the sizes of blocks that are common have loops without branches.
fn spread_whole<const N: usize>(factors: &[f32], out: &mut [f32]) {
    let (whole, rest) = out.as_chunks_mut::<N>();
    for (factor, to) in factors.iter().zip(whole) {
        *to = [*factor; N];
    }
    if let Some(factor) = factors.last().filter(|_| !rest.is_empty()) {
        rest.fill(*factor);
    }
}

/// A row of numbers in the order in which codes are looked up.
pub(super) struct Spread {
    /// For each chunk, the first elements of the eights, then the second ones, and so on.
    chunks: Vec<[f32; CHUNK]>,
    /// The sums of the eights.
    sums: Vec<[f32; LANES]>,
    columns: usize,
}

impl Spread {
    pub(super) fn new(x: &[f32]) -> Self {
        let chunk = |part: &[f32]| -> [f32; CHUNK] {
            let element = |index| part.get(index % LANES * EIGHT + index / LANES).copied().unwrap_or(0.0);
            std::array::from_fn(element)
        };
        let chunks: Vec<_> = x.chunks(CHUNK).map(chunk).collect();
        let sum = |chunk: &[f32; CHUNK]| {
            std::array::from_fn(|lane| chunk[lane..].iter().step_by(LANES).fold(0.0, |sum, x| sum + x))
        };
        Self { sums: chunks.iter().map(sum).collect(), chunks, columns: x.len() }
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
    let chunks = x.chunks.len();
    let (mut scales, mut blocks) = (vec![[0.0; LANES]; ROWS * chunks], Vec::new());
    let mut offsets = vec![[0.0; LANES]; if M::HAS_OFFSETS { ROWS * chunks } else { 0 }];
    let mut codes: [&[u8]; ROWS] = [&[]; ROWS];
    for (index, out) in out.chunks_mut(ROWS).enumerate() {
        // Rows after the last one repeat it.
        for (place, codes) in codes.iter_mut().enumerate() {
            let first_lane = place * chunks * LANES;
            let own = first_lane..first_lane + x.columns / EIGHT;
            let factors = Factors {
                scales: &mut scales.as_flattened_mut()[own.clone()],
                offsets: offsets.as_flattened_mut().get_mut(own).unwrap_or_default(),
            };
            *codes = matrix.eights(first + index * ROWS + place.min(out.len() - 1), factors, &mut blocks);
        }
        let rows = Rows { codes, scales: &scales, offsets: &offsets, numbers: matrix.numbers(), x };
        let found = if M::HAS_OFFSETS {
            instructions.products::<true>(&rows)
        } else {
            instructions.products::<false>(&rows)
        };
        out.copy_from_slice(&found[..out.len()]);
    }
}

/// The operands of some products.
struct Rows<'a> {
    codes: [&'a [u8]; ROWS],
    /// The factors of the chunks of the first row, and then of the others.
    scales: &'a [[f32; LANES]],
    offsets: &'a [[f32; LANES]],
    numbers: &'a [f32; 16],
    x: &'a Spread,
}

impl Rows<'_> {
    /// Computes the products in the order that is described above.
    #[inline(always)]
    fn products<U: Unit, const HAS_OFFSETS: bool>(&self, unit: U) -> [f32; ROWS] {
        let numbers = unit.load(self.numbers);
        let count = self.x.chunks.len();
        let mut sums = [unit.zero(); ROWS];
        for (index, (x, of_x)) in self.x.chunks.iter().zip(&self.x.sums).enumerate() {
            let mut codes = [unit.no_codes(); ROWS];
            for (codes, bytes) in codes.iter_mut().zip(self.codes) {
                *codes = if let Some(chunk) = bytes.as_chunks::<{ CHUNK / 2 }>().0.get(index) {
                    unit.prefetch(chunk.as_ptr().wrapping_add(ROWS * bytes.len()));
                    unit.codes(chunk)
                } else {
                    let (mut chunk, rest) = ([0; CHUNK / 2], &bytes[index * CHUNK / 2..]);
                    chunk[..rest.len()].copy_from_slice(rest);
                    unit.codes(&chunk)
                };
            }
            let mut halves = [[unit.zero(); 2]; ROWS];
            for (pair, [even, odd]) in x.as_chunks::<LANES>().0.as_chunks::<2>().0.iter().enumerate() {
                let (even, odd, shift) = (unit.load(even), unit.load(odd), 8 * pair as i32);
                for (codes, halves) in codes.iter().zip(&mut halves) {
                    // The upper half of a byte comes first.
                    let of_even = unit.look_up(numbers, *codes, shift + 4);
                    halves[0] = unit.multiply_add(of_even, even, halves[0]);
                    halves[1] = unit.multiply_add(unit.look_up(numbers, *codes, shift), odd, halves[1]);
                }
            }
            for (row, (sum, [even, odd])) in sums.iter_mut().zip(halves).enumerate() {
                let place = row * count + index;
                *sum = unit.multiply_add(unit.add(even, odd), unit.load(&self.scales[place]), *sum);
                if HAS_OFFSETS {
                    *sum = unit.multiply_add(unit.load(of_x), unit.load(&self.offsets[place]), *sum);
                }
            }
        }
        let mut found = [0.0; ROWS];
        for (to, sum) in found.iter_mut().zip(sums) {
            *to = fold(unit.stored(sum), |a, b| a + b);
        }
        found
    }
}
