//! Quantises elements as NF4 with double quantisation, as bitsandbytes does (Dettmers et al., 2023,
//! <https://arxiv.org/abs/2305.14314>): sixteen quantiles of the normal distribution, a scale for each block of
//! 64 elements, and a byte for each scale.

use super::codebook::{Codebook, DoubleScales, Scales};
use super::error::CodebookError;

/// The numbers of NF4, in order (appendix E of the paper).
#[expect(clippy::excessive_precision, reason = "the digits of the paper")]
pub const NF4: [f32; 16] = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
];

/// The elements of a block.
pub const BLOCK: usize = 64;
/// The scales of a block.
pub const NESTED_BLOCK: usize = 256;

/// Quantises the elements of a matrix of `rows` and `columns`.
///
/// # Errors
/// When an element is not finite.
///
/// # Panics
/// When there are fewer or more elements.
pub fn quantise(elements: &[f32], [rows, columns]: [usize; 2]) -> Result<Codebook, CodebookError> {
    assert_eq!(elements.len(), rows * columns, "a matrix has so many elements");
    let largest = |block: &[f32]| block.iter().fold(0f32, |largest, element| largest.max(element.abs()));
    let scales: Vec<f32> = elements.chunks(BLOCK).map(largest).collect();
    let mut codes = vec![0; elements.len().div_ceil(2)];
    for (index, element) in elements.iter().enumerate() {
        let scaled = (element * (1.0 / scales[index / BLOCK].max(1e-38))).clamp(-1.0, 1.0);
        let code = closest(&NF4, scaled) as u8;
        codes[index / 2] |= if index.is_multiple_of(2) { code << 4 } else { code };
    }
    if elements.iter().any(|element| !element.is_finite()) {
        return Err(CodebookError::NotFinite);
    }
    Codebook::new([rows, columns], codes, NF4, Scales::Double(quantised_scales(&scales)), BLOCK)
}

/// Quantises scales as differences from their mean.
fn quantised_scales(scales: &[f32]) -> DoubleScales {
    let sum: f64 = scales.iter().copied().map(f64::from).sum();
    let offset = (sum / scales.len().max(1) as f64) as f32;
    let map = dynamic_map();
    let (mut codes, mut of_blocks) = (Vec::with_capacity(scales.len()), Vec::new());
    for block in scales.chunks(NESTED_BLOCK) {
        let differences: Vec<f32> = block.iter().map(|scale| scale - offset).collect();
        let largest = differences.iter().fold(0f32, |largest, difference| largest.max(difference.abs()));
        let code = |difference: &f32| closest(&*map, difference / largest.max(1e-38)) as u8;
        codes.extend(differences.iter().map(code));
        of_blocks.push(largest);
    }
    DoubleScales { codes, map, scales: of_blocks, block: NESTED_BLOCK, offset, first: 0 }
}

/// Returns the index of the closest number; of two equally close ones, the smaller.
fn closest(numbers: &[f32], number: f32) -> usize {
    let after = numbers.partition_point(|other| *other < number);
    match (after.checked_sub(1), numbers.get(after)) {
        (None, _) => 0,
        (Some(before), None) => before,
        (Some(before), Some(above)) => {
            let middle = f32::midpoint(numbers[before], *above);
            if number <= middle { before } else { after }
        }
    }
}

/// Returns the 256 numbers of a byte with a sign, a unary exponent of base 10 and a linear fraction (Dettmers et
/// al., 2022, <https://arxiv.org/abs/2110.02861>), in order.
fn dynamic_map() -> Box<[f32; 256]> {
    const DECADES: [f32; 7] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0];
    let mut numbers = vec![0.0, 1.0];
    for (exponent, decade) in DECADES.into_iter().enumerate() {
        let fractions = 1 << exponent;
        let step = (1.0f32 - 0.1) / fractions as f32;
        // Boundaries are counted from both ends, so that the last one is 1.
        let boundary = |index: i32| {
            if index < (fractions + 1) / 2 {
                0.1 + step * index as f32
            } else {
                1.0 - step * (fractions - index) as f32
            }
        };
        for index in 0..fractions {
            let number = (boundary(index) + boundary(index + 1)) / 2.0 * decade;
            numbers.extend([number, -number]);
        }
    }
    numbers.sort_by(f32::total_cmp);
    let numbers: [f32; 256] = numbers.try_into().expect("254 fractions, 0 and 1");
    Box::new(numbers)
}
