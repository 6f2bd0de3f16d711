//! Rotation of the heads of queries and keys by their positions.

use multiversion::multiversion;

use super::element::Element;

/// Cosines and sines of the pairs of elements at the beginning of a head. Element `j` pairs with element
/// `j + pairs`; the elements after the pairs are not rotated.
#[derive(Clone, Copy, Debug)]
pub struct Rotary<'a> {
    /// How many pairs a head has, at most `head_dim / 2`.
    pub pairs: usize,
    /// `[positions, pairs]`, or as many for each sequence.
    pub cos: &'a [f32],
    /// The sines, in the form of `cos`.
    pub sin: &'a [f32],
    /// The factor of all elements.
    pub scale: f32,
}

impl<'a> Rotary<'a> {
    /// Returns the tables of a sequence with so many positions: its own if each sequence has tables,
    /// otherwise the shared ones.
    pub(crate) fn of(self, positions: usize, batch: usize) -> Self {
        let size = positions * self.pairs;
        let start = if self.cos.len() > size { batch * size } else { 0 };
        Self { cos: &self.cos[start..][..size], sin: &self.sin[start..][..size], ..self }
    }
}

/// Rotates a head, whose rows are `stride` apart in `from`, into rows of `width`.
#[multiversion(targets = "simd")]
pub(crate) fn turn<T: Element>(by: Rotary<'_>, from: &[T], stride: usize, to: &mut [T], width: usize) {
    for (index, to) in to.chunks_exact_mut(width).enumerate() {
        turn_row(by, index, &from[index * stride..][..width], to, 1.0);
    }
}

/// Applies the transpose of the rotation, from rows of `width` to rows that are `stride` apart.
#[multiversion(targets = "simd")]
pub(crate) fn turn_back<T: Element>(by: Rotary<'_>, from: &[f32], width: usize, to: &mut [T], stride: usize) {
    for (index, from) in from.chunks_exact(width).enumerate() {
        turn_row(by, index, from, &mut to[index * stride..][..width], -1.0);
    }
}

/// Rotates a head at a position; `sign` is 1 forward and -1 backward.
#[inline(always)]
fn turn_row<F: Element, T: Element>(by: Rotary<'_>, position: usize, from: &[F], to: &mut [T], sign: f32) {
    let pairs = by.pairs;
    let (turned, rest) = from.split_at(2 * pairs);
    let (to_turned, to_rest) = to.split_at_mut(2 * pairs);
    let (cos, sin) = (&by.cos[position * pairs..][..pairs], &by.sin[position * pairs..][..pairs]);
    turn_pairs(turned.split_at(pairs), to_turned.split_at_mut(pairs), cos, sin, by.scale, sign);
    to_rest.iter_mut().zip(rest).for_each(|(to, from)| *to = T::rounded(from.single() * by.scale));
}

/// Rotates pairs by the angles of `cos` and `sin`; `sign` is 1 forward and -1 backward.
#[inline(always)]
fn turn_pairs<F: Element, T: Element>(
    (first, second): (&[F], &[F]),
    (to_first, to_second): (&mut [T], &mut [T]),
    cos: &[f32],
    sin: &[f32],
    scale: f32,
    sign: f32,
) {
    let to = to_first.iter_mut().zip(to_second);
    for (((a, b), (to_a, to_b)), (cos, sin)) in first.iter().zip(second).zip(to).zip(cos.iter().zip(sin)) {
        let (a, b, sin) = (a.single() * scale, b.single() * scale, sin * sign);
        *to_a = T::rounded(a * cos - b * sin);
        *to_b = T::rounded(b * cos + a * sin);
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::half::Half;
    use crate::numbers::numbers;

    #[test]
    fn bf16_is_the_rounded_result() {
        check(3);
        check(2);
    }

    /// Rotates this number of pairs in heads of 6 elements.
    fn check(pairs: usize) {
        let (cos, sin) = (numbers(3 * pairs, 1), numbers(3 * pairs, 2));
        let by = Rotary { pairs, cos: &cos, sin: &sin, scale: 0.7 };
        // Three positions of a head of 6 elements, in rows of 11.
        let rows = bf16::narrowed(&numbers(33, 3));
        let (mut narrow, mut wide) = (vec![bf16::ZERO; 18], vec![0.0; 18]);
        turn(by, &rows, 11, &mut narrow, 6);
        turn(by, &bf16::widened(&rows), 11, &mut wide, 6);
        assert_eq!(narrow, bf16::narrowed(&wide));
        let from = numbers(18, 4);
        let (mut narrow, mut wide) = (vec![bf16::ZERO; 33], vec![0.0; 33]);
        turn_back(by, &from, 6, &mut narrow, 11);
        turn_back(by, &from, 6, &mut wide, 11);
        assert_eq!(narrow, bf16::narrowed(&wide));
    }
}
