//! AdamW whose moments take one byte per element (Dettmers et al., "8-bit Optimizers via Block-wise
//! Quantization", 2022).
//!
//! A block is up to [`BLOCK`] neighbours in a row of the parameter. Its scale is the largest magnitude of the moment in
//! the block. A code means one of 256 shares of the scale, which are closer together near 0.
//! Blocks do not cross rows, so a part of the rows is updated as in the whole parameter. A step decodes a block, updates
//! it in single precision and encodes it again.

use std::sync::LazyLock;

use multiversion::multiversion;

use super::adamw::Coefficients;
use super::threads::{CHUNK, for_each};

/// The most elements that share a scale.
pub const BLOCK: usize = 256;

/// Returns the number of blocks in a row of `width` elements.
pub fn blocks_of_row(width: usize) -> usize {
    width.div_ceil(BLOCK)
}

/// A moment of a parameter whose rows have `width` elements.
#[derive(Clone, Debug, PartialEq)]
pub struct Moment {
    /// The code of each element.
    pub codes: Vec<u8>,
    /// The scale of each block, [`blocks_of_row`] for each row.
    pub scales: Vec<f32>,
}

impl Moment {
    /// Returns a moment of zeros.
    pub fn zeros(rows: usize, width: usize) -> Self {
        Self { codes: vec![0; rows * width], scales: vec![0.0; rows * blocks_of_row(width)] }
    }

    fn as_part(&mut self) -> Part<'_> {
        Part { codes: &mut self.codes, scales: &mut self.scales }
    }
}

/// Some rows of a moment, or a part of a row.
struct Part<'a> {
    codes: &'a mut [u8],
    scales: &'a mut [f32],
}

impl<'a> Part<'a> {
    /// Divides the part after every `rows` times `width` elements.
    fn chunks(self, rows: usize, width: usize) -> impl Iterator<Item = Self> {
        let scales = self.scales.chunks_mut(rows * blocks_of_row(width));
        self.codes.chunks_mut(rows * width).zip(scales).map(|(codes, scales)| Self { codes, scales })
    }
}

/// The values of the codes, and how the nearest one is found.
struct Codes {
    values: [f32; 256],
    /// The middles between the values that are not negative and the next ones. The last one is infinite.
    middles: Vec<f32>,
    /// For the numbers from 0 to 1 with the same leading bits ([`cell_of`]), how many of the middles are below all of
    /// them. At most one more is below some of them.
    passed: Vec<u8>,
}

/// The leading bits of a number: sign, exponent and 7 bits of the fraction. With fewer, numbers near 1 would share
/// several middles.
const LEADING: u32 = 16;
/// The leading bits of 2^-24, which is below all middles.
const LOWEST: u32 = (127 - 24) << (23 - LEADING);
/// The cells of the numbers from 0 to 1.
const CELLS: u32 = (127 << (23 - LEADING)) - LOWEST + 1;

/// Returns the cell of a number from 0 to 1.
fn cell_of(share: f32) -> u32 {
    (share.to_bits() >> LEADING).saturating_sub(LOWEST).min(CELLS - 1)
}

impl Codes {
    /// Makes the values: 0, 1, and for each of the decades below 1 as many steps as the place of the decade allows,
    /// the middles of equal parts of the decade. With `is_signed`, also the negative ones but -1.
    fn new(is_signed: bool) -> Self {
        let mut values = vec![0.0, 1.0];
        for (decade, scale) in [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1f32, 1.0].into_iter().enumerate() {
            let steps = if is_signed { 1 << decade } else { 2 << decade };
            let bound = |step: i32| 0.1f32 + 0.9f32 * step as f32 / steps as f32;
            for step in 0..steps {
                let value = scale * (bound(step) + bound(step + 1)) / 2.0;
                values.push(value);
                if is_signed {
                    values.push(-value);
                }
            }
        }
        values.sort_by(f32::total_cmp);
        let positive = values.partition_point(|&value| value < 0.0);
        let mut middles: Vec<f32> =
            values[positive..].windows(2).map(|pair| (pair[0] + pair[1]) / 2.0).collect();
        middles.push(f32::INFINITY);
        let lowest = |cell: u32| if cell == 0 { 0.0 } else { f32::from_bits((cell + LOWEST) << LEADING) };
        let passed = |cell| middles.partition_point(|&middle| middle < lowest(cell)) as u8;
        Self {
            values: std::array::from_fn(|code| values[code]),
            passed: (0..CELLS).map(passed).collect(),
            middles,
        }
    }

    /// Returns the place of the nearest value, among the values that are not negative, of a number from 0 to 1.
    #[inline(always)]
    fn nearest(&self, share: f32) -> u8 {
        let passed = self.passed[cell_of(share) as usize];
        passed + u8::from(share > self.middles[usize::from(passed)])
    }

    /// Returns the code of a share of the scale, from -1 to 1. A small negative one stays negative, as in bitsandbytes.
    #[inline(always)]
    fn signed_code(&self, share: f32) -> u8 {
        let nearest = self.nearest(share.abs());
        if share < 0.0 { SIGNED_ZERO - nearest.clamp(1, SIGNED_ZERO) } else { SIGNED_ZERO + nearest }
    }
}

static SIGNED: LazyLock<Codes> = LazyLock::new(|| Codes::new(true));
static UNSIGNED: LazyLock<Codes> = LazyLock::new(|| Codes::new(false));
/// The code of 0 for the first moment, after the negative values.
const SIGNED_ZERO: u8 = 127;

/// Updates a parameter whose rows have `width` elements, and its moments, in place.
///
/// # Panics
/// If the lengths do not fit together.
pub fn step(
    parameter: &mut [f32],
    gradient: &[f32],
    width: usize,
    [first, second]: [&mut Moment; 2],
    by: Coefficients,
) {
    let len = parameter.len();
    if len == 0 {
        return;
    }
    let scales = len / width * blocks_of_row(width);
    assert!(len.is_multiple_of(width), "rows are whole");
    assert_eq!((gradient.len(), first.codes.len(), second.codes.len()), (len, len, len), "lengths");
    assert_eq!((first.scales.len(), second.scales.len()), (scales, scales), "scales");
    let rows = (CHUNK / width).max(1);
    let moments = first.as_part().chunks(rows, width).zip(second.as_part().chunks(rows, width));
    let chunks = parameter.chunks_mut(rows * width).zip(gradient.chunks(rows * width)).zip(moments);
    let tables = [&*SIGNED, &*UNSIGNED];
    for_each(chunks, len, |((p, g), (first, second))| {
        let moments = first.chunks(1, width).zip(second.chunks(1, width));
        for ((p, g), (first, second)) in p.chunks_mut(width).zip(g.chunks(width)).zip(moments) {
            let moments = first.chunks(1, BLOCK).zip(second.chunks(1, BLOCK));
            for ((p, g), (first, second)) in p.chunks_mut(BLOCK).zip(g.chunks(BLOCK)).zip(moments) {
                step_block(p, g, [first, second], tables, by);
            }
        }
    });
}

/// Updates a block: its elements of the parameter, and the codes and the scale of both moments.
#[multiversion(targets = "simd")]
fn step_block(
    parameter: &mut [f32],
    gradient: &[f32],
    [first, second]: [Part<'_>; 2],
    [signed, unsigned]: [&Codes; 2],
    by: Coefficients,
) {
    let (first_scale, second_scale) = (&mut first.scales[0], &mut second.scales[0]);
    let (first, second) = (first.codes, second.codes);
    let Coefficients { betas: (beta_1, beta_2), step_size, second_correction, epsilon, keep } = by;
    let len = parameter.len();
    let (mut all_m, mut all_v) = ([0.0f32; BLOCK], [0.0f32; BLOCK]);
    let (m, v) = (&mut all_m[..len], &mut all_v[..len]);
    // Loops of their own, so that the arithmetic between them runs in vectors.
    for (m, &code) in m.iter_mut().zip(&*first) {
        *m = signed.values[usize::from(code)];
    }
    for (v, &code) in v.iter_mut().zip(&*second) {
        *v = unsigned.values[usize::from(code)];
    }
    let (old_first, old_second) = (*first_scale, *second_scale);
    for ((p, g), (m, v)) in parameter.iter_mut().zip(gradient).zip(m.iter_mut().zip(v.iter_mut())) {
        *m = beta_1 * (*m * old_first) + (1.0 - beta_1) * g;
        *v = beta_2 * (*v * old_second) + (1.0 - beta_2) * g * g;
        *p = keep * *p - step_size * *m / ((*v * second_correction).sqrt() + epsilon);
    }
    *first_scale = largest(m);
    *second_scale = largest(v);
    divide(m, *first_scale);
    divide(v, *second_scale);
    for (code, &share) in first.iter_mut().zip(&*m) {
        *code = signed.signed_code(share);
    }
    for (code, &share) in second.iter_mut().zip(&*v) {
        // A positive moment stays positive. In bitsandbytes it may become 0, and if the next gradient is 0 too, the update
        // is the first moment divided by `epsilon`, which is many times the learning rate.
        *code = unsigned.nearest(share).max(u8::from(share > 0.0));
    }
}

/// Returns the largest magnitude.
#[inline(always)]
fn largest(moment: &[f32]) -> f32 {
    // Several maxima, which do not wait for each other.
    let mut largest = [0.0f32; 16];
    for chunk in moment.chunks(16) {
        for (largest, x) in largest.iter_mut().zip(chunk) {
            *largest = largest.max(x.abs());
        }
    }
    largest.into_iter().fold(0.0, f32::max)
}

/// Divides a moment by its scale. Any share of a scale of 0 is 0.
#[inline(always)]
fn divide(moment: &mut [f32], scale: f32) {
    let scale = if scale > 0.0 { scale } else { 1.0 };
    moment.iter_mut().for_each(|x| *x /= scale);
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::threads::{LentThreads, with_threads};

    const BY: Coefficients = Coefficients {
        betas: (0.9, 0.95),
        step_size: 3e-3,
        second_correction: 1.7,
        epsilon: 1e-8,
        keep: 0.999,
    };

    fn numbers(len: usize, seed: f32) -> Vec<f32> {
        // Magnitudes differ by many decades.
        (0..len).map(|i| (i as f32 * 0.37 + seed).sin() * 10f32.powi(-((i * 7 % 11) as i32))).collect()
    }

    fn nearest(codes: &Codes, share: f32) -> f32 {
        let distance = |value: &f32| (value - share).abs();
        let nearest =
            codes.values.iter().copied().min_by(|one, other| distance(one).total_cmp(&distance(other)));
        nearest.expect("256 values")
    }

    #[test]
    fn codes_are_the_nearest_values() {
        let check = |codes: &Codes, code_of: &dyn Fn(f32) -> u8, share: f32| {
            let value = codes.values[code_of(share) as usize];
            let expected = nearest(codes, share);
            let is_lost = expected == 0.0 && share < 0.0;
            assert!(
                // Sums are not exact.
                (value - share).abs() <= (expected - share).abs() + f32::EPSILON * share.abs()
                    || is_lost && value == codes.values[126],
                "{share}: {value} instead of {expected}"
            );
        };
        let shares: Vec<f32> =
            numbers(5000, 0.2).into_iter().chain(SIGNED.values).chain(UNSIGNED.values).collect();
        for codes in [&*SIGNED, &*UNSIGNED] {
            assert!(codes.values.windows(2).all(|pair| pair[0] < pair[1]));
            // Next to the middles too.
            let near =
                codes.middles.iter().flat_map(|middle| [middle.next_down(), *middle, middle.next_up()]);
            for share in shares.iter().copied().chain(near).filter(|share| share.abs() <= 1.0) {
                check(&UNSIGNED, &|share| UNSIGNED.nearest(share), share.abs());
                check(&SIGNED, &|share| SIGNED.signed_code(share), share);
                check(&SIGNED, &|share| SIGNED.signed_code(share), -share);
            }
        }
        assert_eq!(SIGNED.values[SIGNED_ZERO as usize], 0.0);
        assert_eq!([SIGNED.values[255], UNSIGNED.values[255], UNSIGNED.values[0]], [1.0, 1.0, 0.0]);
    }

    /// Returns the parameter and the moments after three steps.
    fn trained(rows: usize, width: usize) -> (Vec<f32>, [Moment; 2]) {
        let mut parameter = numbers(rows * width, 0.5);
        let [mut first, mut second] = [(); 2].map(|()| Moment::zeros(rows, width));
        for t in 0..3 {
            step(&mut parameter, &numbers(rows * width, t as f32), width, [&mut first, &mut second], BY);
        }
        (parameter, [first, second])
    }

    /// Compares with one element after another, whose moments are decoded and encoded in between.
    fn check(rows: usize, width: usize) {
        let (parameter, moments) = trained(rows, width);
        let len = rows * width;
        let (mut expected, mut decoded) = (numbers(len, 0.5), [vec![0.0f32; len], vec![0.0f32; len]]);
        for t in 0..3 {
            let gradient = numbers(len, t as f32);
            let [m, v] = &mut decoded;
            crate::adamw::step(&mut expected, &gradient, m, v, BY);
            for (moment, codes) in decoded.iter_mut().zip([&*SIGNED, &*UNSIGNED]) {
                for block in moment.chunks_mut(width).flat_map(|row| row.chunks_mut(BLOCK)) {
                    let scale = block.iter().map(|x| x.abs()).fold(0.0, f32::max);
                    for x in block {
                        let value = nearest(codes, *x / scale);
                        let zero = codes.values.iter().position(|value| *value == 0.0).expect("a code");
                        // Negative first moments stay negative, and positive second ones positive.
                        *x = scale
                            * match value == 0.0 {
                                true if *x < 0.0 => codes.values[zero - 1],
                                true if *x > 0.0 && zero == 0 => codes.values[1],
                                _ => value,
                            };
                    }
                }
            }
        }
        let close = |one: &[f32], other: &[f32], what: &str| {
            for (i, (one, other)) in one.iter().zip(other).enumerate() {
                assert!((one - other).abs() <= 1e-6 * other.abs() + 1e-12, "{what} {i}: {one} and {other}");
            }
        };
        close(&parameter, &expected, "parameter");
        for ((moment, codes), expected) in moments.iter().zip([&*SIGNED, &*UNSIGNED]).zip(&decoded) {
            let scale = |i: usize| {
                let (row, column) = (i / width, i % width);
                moment.scales[row * blocks_of_row(width) + column / BLOCK]
            };
            let values: Vec<f32> = moment
                .codes
                .iter()
                .enumerate()
                .map(|(i, &code)| codes.values[code as usize] * scale(i))
                .collect();
            close(&values, expected, "moment");
        }
    }

    #[test]
    fn a_step_decodes_updates_and_encodes() {
        for (rows, width) in [(1, 1), (3, 8), (2, 256), (2, 300), (5, 1000)] {
            check(rows, width);
        }
    }

    #[test]
    fn parts_of_the_rows_and_threads_have_the_same_bits() {
        let (rows, width) = (300, 300);
        let whole = trained(rows, width);
        let threads = Arc::new(LentThreads::new(2));
        assert_eq!(with_threads(&threads, || trained(rows, width)), whole);
        let mut parameter = numbers(rows * width, 0.5);
        let (upper, lower) = parameter.split_at_mut(100 * width);
        let mut parts = Vec::new();
        for (rows, part, offset) in [(100, upper, 0), (200, lower, 100 * width)] {
            let [mut first, mut second] = [(); 2].map(|()| Moment::zeros(rows, width));
            for t in 0..3 {
                let gradient = &numbers(300 * width, t as f32)[offset..offset + rows * width];
                step(part, gradient, width, [&mut first, &mut second], BY);
            }
            parts.extend(first.codes);
        }
        assert_eq!((parameter, parts), (whole.0, whole.1[0].codes.clone()));
    }

    #[test]
    fn an_update_is_not_much_larger_than_the_learning_rate() {
        let width = 256;
        // Magnitudes differ by many decades, and the next steps have no gradient, as the rows of rare tokens.
        let (mut parameter, gradient) = (vec![0.0f32; width], numbers(width, 0.3));
        let [mut first, mut second] = [(); 2].map(|()| Moment::zeros(1, width));
        for t in 1..=4 {
            let before = parameter.clone();
            let power = |beta: f32| 1.0 - beta.powi(t);
            let (step_size, second_correction) = (1.0 / power(0.9), 1.0 / power(0.95));
            let by = Coefficients { step_size, second_correction, keep: 1.0, ..BY };
            let gradient = if t == 1 { &gradient } else { &vec![0.0; width] };
            step(&mut parameter, gradient, width, [&mut first, &mut second], by);
            let largest =
                parameter.iter().zip(&before).map(|(one, other)| (one - other).abs()).fold(0.0, f32::max);
            assert!(largest < 2.0, "{largest} times the learning rate in step {t}");
        }
    }

    /// `bench/peer/adamw8bit.py` has the same trial.
    #[test]
    fn steps_are_those_of_bitsandbytes() {
        let (rows, width) = (2, 512);
        let numbers = |factor: i64, modulus: i64, scale: f32| -> Vec<f32> {
            (0..rows * width).map(|i| (i as i64 * factor % modulus - modulus / 2) as f32 * scale).collect()
        };
        let mut parameter = numbers(7919, 1001, 2f32.powi(-9));
        let [mut first, mut second] = [(); 2].map(|()| Moment::zeros(rows, width));
        for t in 0..4 {
            let (power, rate) = (|beta: f64| 1.0 - beta.powi(t + 1), 1e-2);
            let by = Coefficients {
                betas: (0.9, 0.95),
                step_size: (rate / power(0.9)) as f32,
                second_correction: (1.0 / power(0.95)) as f32,
                epsilon: 1e-8,
                keep: (1.0 - rate * 0.1) as f32,
            };
            let gradient = numbers(104_729 + 31 * i64::from(t), 1999, 2f32.powi(-10 - 2 * t));
            step(&mut parameter, &gradient, width, [&mut first, &mut second], by);
        }
        let golden = include_str!("../tests/golden/adamw8bit.txt");
        let lines: Vec<Vec<f32>> = golden
            .lines()
            .filter(|line| !line.starts_with('#'))
            .map(|line| line.split(' ').map(|word| word.parse().expect("a number")).collect())
            .collect();
        let (elements, scales) = lines.split_at(rows * width);
        let mut other_codes = 0;
        for (i, line) in elements.iter().enumerate() {
            // The order of the two factors of an update differs, and with it the last bits.
            assert!((parameter[i] - line[0]).abs() < 1e-5, "{i}: {} and {line:?}", parameter[i]);
            for (code, expected) in [first.codes[i], second.codes[i]].into_iter().zip(&line[1..]) {
                other_codes += usize::from(f32::from(code) != *expected);
            }
        }
        assert!(other_codes <= 10, "{other_codes} codes differ, which the last bits may explain for a few");
        for (i, line) in scales.iter().enumerate() {
            for (scale, expected) in [first.scales[i], second.scales[i]].into_iter().zip(line) {
                assert!((scale / expected - 1.0).abs() < 1e-5, "{scale} and {expected}");
            }
        }
    }

    #[test]
    fn a_block_without_gradients_stays_at_zero() {
        let mut parameter = vec![1.0; 4];
        let [mut first, mut second] = [(); 2].map(|()| Moment::zeros(2, 2));
        step(&mut parameter, &[0.0; 4], 2, [&mut first, &mut second], BY);
        assert_eq!(parameter, [0.999; 4]);
        assert_eq!((first.scales, second.scales), (vec![0.0; 2], vec![0.0; 2]));
    }
}
