//! Chooses the codes and scales of [`Blocks`]: Q8_0 as llama.cpp does, and Q4_K and Q6_K by a search of its own.
//!
//! ```text
//! Q8_0   d = max |x| / 127, and q = x (1 / d), rounded to the closest integer, ties away from zero
//! Q4_K   for each 32 elements: of several widths of the codes, with the scale and the least number that have the smallest
//!        squared errors (least squares), the best one; then both rounded to six bits, and codes for the rounded ones
//! Q6_K   for each 16 elements: the same, without a least number
//! ```

use half::f16;
use rayon::prelude::*;

use super::block_kind::BlockKind;
use super::blocks::Blocks;
use super::error::CodebookError;

/// Quantises the elements of a matrix of `rows` and `columns`.
///
/// # Errors
/// When an element is not finite or too large for the scales, or the rows do not consist of whole blocks.
///
/// # Panics
/// When the form is none of Q8_0, Q4_K and Q6_K, or there are fewer or more elements.
pub fn quantise(
    kind: BlockKind,
    elements: &[f32],
    [rows, columns]: [usize; 2],
) -> Result<Blocks, CodebookError> {
    assert_eq!(elements.len(), rows * columns, "a matrix has so many elements");
    let encode: fn(&[f32], &mut [u8]) = match kind {
        BlockKind::Q8_0 => eight,
        BlockKind::Q4K => four,
        BlockKind::Q6K => six,
        other => panic!("no codes are chosen for {other:?}"),
    };
    if elements.iter().any(|element| !element.is_finite()) {
        return Err(CodebookError::NotFinite);
    }
    if !columns.is_multiple_of(kind.elements()) {
        return Err(CodebookError::Columns { block: kind.elements() });
    }
    let mut bytes = vec![0; elements.len() / kind.elements() * kind.bytes()];
    let blocks = bytes.par_chunks_exact_mut(kind.bytes()).zip(elements.par_chunks_exact(kind.elements()));
    blocks.for_each(|(to, from)| encode(from, to));
    Blocks::new(kind, [rows, columns], bytes)
}

/// Writes a number in half precision, and returns it.
fn write_half(number: f32, to: &mut [u8]) -> f32 {
    let half = f16::from_f32(number);
    to[..2].copy_from_slice(&half.to_le_bytes());
    half.to_f32()
}

/// Returns 1 divided by a number, or 0 for 0.
fn inverse(number: f32) -> f32 {
    if number == 0.0 { 0.0 } else { 1.0 / number }
}

fn eight(elements: &[f32], block: &mut [u8]) {
    let largest = elements.iter().fold(0f32, |largest, element| largest.max(element.abs()));
    let scale = largest / 127.0;
    let inverse = inverse(scale);
    write_half(scale, block);
    for (to, element) in block[2..].iter_mut().zip(elements) {
        *to = (element * inverse).round() as i8 as u8;
    }
}

fn four(elements: &[f32], block: &mut [u8]) {
    let found: Vec<[f32; 2]> = elements.as_chunks::<32>().0.iter().map(scale_and_least).collect();
    let largest = |index: usize| found.iter().fold(0f32, |largest, unit| largest.max(unit[index]));
    let scale = write_half(largest(0) / 63.0, &mut block[..2]);
    let least = write_half(largest(1) / 63.0, &mut block[2..4]);
    let [of_scale, of_least] = [scale, least].map(inverse);
    for (unit, (elements, found)) in elements.chunks_exact(32).zip(&found).enumerate() {
        let six_bits = |number: f32| number.round().clamp(0.0, 63.0) as u8;
        let (s, t) = (six_bits(found[0] * of_scale), six_bits(found[1] * of_least));
        if unit < 4 {
            block[4 + unit] |= s;
            block[8 + unit] |= t;
        } else {
            block[8 + unit] = s & 15 | t << 4;
            block[unit] |= s >> 4 << 6;
            block[4 + unit] |= t >> 4 << 6;
        }
        let (inverse, least) = (inverse(scale * f32::from(s)), least * f32::from(t));
        for (to, element) in block[16 + unit / 2 * 32..].iter_mut().zip(elements) {
            let code = ((element + least) * inverse).round().clamp(0.0, 15.0) as u8;
            *to |= code << (unit % 2 * 4);
        }
    }
}

/// Returns the scale `s` and the number `t`, which is not negative, with which `s q - t` is closest to the elements,
/// for codes `q` from 0 to 15.
fn scale_and_least(elements: &[f32; 32]) -> [f32; 2] {
    let least = elements.iter().fold(0f32, |least, element| least.min(*element));
    let largest = elements.iter().fold(0f32, |largest, element| largest.max(*element));
    let width = largest - least;
    if width == 0.0 {
        return [0.0, 0.0];
    }
    let count = elements.len() as f32;
    let (mut best, mut smallest) = ([width / 15.0, -least], f32::INFINITY);
    for step in 0..=20 {
        let inverse = (13.5 + 0.15 * step as f32) / width;
        let codes = elements.map(|element| ((element - least) * inverse).round().clamp(0.0, 15.0));
        let sum: f32 = codes.iter().sum();
        let squares: f32 = codes.iter().map(|code| code * code).sum();
        let of_elements: f32 = elements.iter().sum();
        let products: f32 = codes.iter().zip(elements).map(|(code, element)| code * element).sum();
        let determinant = count * squares - sum * sum;
        let (mut scale, mut offset) = (
            (count * products - sum * of_elements) * self::inverse(determinant),
            (sum * products - squares * of_elements) * self::inverse(determinant),
        );
        if offset < 0.0 {
            (scale, offset) = (products * self::inverse(squares), 0.0);
        }
        let errors = codes.iter().zip(elements).map(|(code, element)| scale * code - offset - element);
        let error: f32 = errors.map(|error| error * error).sum();
        if scale > 0.0 && error < smallest {
            (best, smallest) = ([scale, offset], error);
        }
    }
    best
}

fn six(elements: &[f32], block: &mut [u8]) {
    let scales: Vec<f32> = elements.as_chunks::<16>().0.iter().map(scale).collect();
    let largest =
        scales.iter().fold(0f32, |largest, scale| if scale.abs() > largest.abs() { *scale } else { largest });
    let scale = write_half(largest / -128.0, &mut block[208..]);
    let of_scale = inverse(scale);
    for (index, (elements, own)) in elements.chunks_exact(16).zip(&scales).enumerate() {
        let rounded = (own * of_scale).round().clamp(-128.0, 127.0);
        block[192 + index] = rounded as i8 as u8;
        let inverse = inverse(scale * rounded);
        let (half, quarter, start) = (index / 8, index / 2 % 4, index % 2 * 16);
        for (place, element) in (start..).zip(elements) {
            let code = ((element * inverse).round().clamp(-32.0, 31.0) + 32.0) as u8;
            block[half * 64 + quarter % 2 * 32 + place] |= (code & 15) << (quarter / 2 * 4);
            block[128 + half * 32 + place] |= (code >> 4) << (quarter * 2);
        }
    }
}

/// Returns the scale `s` with which `s q` is closest to the elements, for codes `q` from -32 to 31.
fn scale(elements: &[f32; 16]) -> f32 {
    let largest = elements.iter().fold(0f32, |largest, x| if x.abs() > largest.abs() { *x } else { largest });
    if largest == 0.0 {
        return 0.0;
    }
    let (mut best, mut most) = (largest / -32.0, 0.0);
    for step in 0..=20 {
        let inverse = -(31.0 + 0.1 * step as f32) / largest;
        let codes = elements.map(|element| (element * inverse).round().clamp(-32.0, 31.0));
        let squares: f32 = codes.iter().map(|code| code * code).sum();
        let products: f32 = codes.iter().zip(elements).map(|(code, element)| code * element).sum();
        // The part of the squares of the elements that the codes explain.
        let explained = products * products * self::inverse(squares);
        if explained > most {
            (best, most) = (products * self::inverse(squares), explained);
        }
    }
    best
}
