//! The statistics of a vocabulary's parts in the form in which they cross a boundary between stages.
//!
//! Half precision rounds each number that crosses a boundary. A rounded statistic would be a rounded loss, and
//! a rounded gradient of it would scale all gradients of a row's logits. So each statistic, and also its
//! gradient, crosses as three numbers of that precision whose sum it is.

use std::sync::Arc;

use burn::tensor::{DType, Tensor};

use crate::autodiff::{Rule, inner_of, record_one};

/// The number of pieces into which a statistic or a gradient is cut.
const PIECES: usize = 3;

/// The factor by which the rest of a gradient is multiplied before the next piece is cut off. Gradients are divided by the number
/// of tokens, and f16 has few bits for numbers as small as their last pieces. A rest is at most 2^-8 times the
/// number in front of it, so the factor makes no piece larger than the first.
const GRADIENT_FACTOR: f64 = 256.0;

/// Returns statistics in the form that crosses a boundary in `precision`. In half precision each of the two
/// statistics of a row is cut into three numbers whose sum it is, except that f16 has no bits below 2^-24. In
/// other precisions the statistics do not change. Gradients are not rounded, if [`join_statistics`] joins the
/// statistics.
///
/// Shapes: statistics `[rows, 2]`, result `[rows, 6]` in half precision.
pub fn cut_statistics(statistics: Tensor<2>, precision: DType) -> Tensor<2> {
    if !matches!(precision, DType::F16 | DType::BF16) {
        return statistics;
    }
    let pieces = cut(inner_of(statistics.clone()), precision, 1.0);
    record_one(statistics, pieces, Arc::new(CutRule))
}

/// Returns the statistics that [`cut_statistics`] has cut, in single precision. Statistics that are not in
/// half precision do not change.
pub fn join_statistics(pieces: Tensor<2>) -> Tensor<2> {
    let precision = pieces.dtype();
    if !matches!(precision, DType::F16 | DType::BF16) {
        return pieces;
    }
    let statistics = join(inner_of(pieces.clone()), 1.0);
    record_one(pieces, statistics, Arc::new(JoinRule { precision }))
}

/// Cuts numbers in single precision. Each piece but the first is multiplied by `factor` once more than the piece
/// before it.
fn cut(numbers: Tensor<2>, precision: DType, factor: f64) -> Tensor<2> {
    let (mut rest, mut pieces) = (numbers, Vec::with_capacity(PIECES));
    for index in 0..PIECES {
        if index > 0 && factor != 1.0 {
            rest = rest * factor;
        }
        let piece = rest.clone().cast(precision);
        rest = rest - piece.clone().cast(DType::F32);
        pieces.push(piece);
    }
    Tensor::cat(pieces, 1)
}

/// Returns the numbers that [`cut`] has cut with the same factor.
fn join(pieces: Tensor<2>, factor: f64) -> Tensor<2> {
    let [first, second, third] = <[Tensor<2>; PIECES]>::try_from(pieces.cast(DType::F32).chunk(PIECES, 1))
        .expect("statistics are cut into three pieces");
    let scaled = |piece: Tensor<2>, factor: f64| if factor == 1.0 { piece } else { piece / factor };
    first + scaled(second, factor) + scaled(third, factor * factor)
}

/// The backward of [`cut_statistics`].
#[derive(Debug)]
struct CutRule;

impl Rule<1> for CutRule {
    fn backward(&self, gradient: Tensor<2>, _wanted: [bool; 1]) -> [Option<Tensor<2>>; 1] {
        [Some(join(gradient, GRADIENT_FACTOR))]
    }
}

/// The backward of [`join_statistics`].
#[derive(Debug)]
struct JoinRule {
    precision: DType,
}

impl Rule<1> for JoinRule {
    fn backward(&self, gradient: Tensor<2>, _wanted: [bool; 1]) -> [Option<Tensor<2>>; 1] {
        [Some(cut(gradient, self.precision, GRADIENT_FACTOR))]
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    #[test]
    fn pieces_keep_the_statistics_and_their_gradients() {
        let numbers = [0.1f32, -7.654_321, 11.098_765, 0.0, 1e-3, 250.123_46];
        // The shares of a token in losses of 30 and of 100,000 tokens, and of a scaled one.
        let shares = [1.0f32 / 30.0, -1.0 / 30.0, 1e-5, -1e-5, 65_536.0 / 30.0, 0.0];
        for device in [Device::flex().autodiff(), Device::flex().autodiff().gradient_checkpointing()] {
            for half in [DType::BF16, DType::F16] {
                let leaf = |numbers: [f32; 6]| Tensor::<1>::from_floats(numbers, &device).reshape([3, 2]);
                let statistics = leaf(numbers).require_grad();
                let pieces = cut_statistics(statistics.clone(), half);
                assert_eq!((pieces.dims(), pieces.dtype()), ([3, 6], half));
                let found = join_statistics(pieces);
                // The smallest number of f16 is 2^-24.
                let lost = if half == DType::F16 { 2f32.powi(-24) } else { 0.0 };
                let found_numbers = found.clone().inner().into_data();
                for (found, expected) in found_numbers.iter::<f32>().zip(numbers) {
                    assert!((found - expected).abs() <= lost, "{half:?}: {found} {expected}");
                }
                let gradient =
                    statistics.grad(&(found * leaf(shares)).sum().backward()).expect("it is a leaf");
                assert_eq!(gradient.into_data(), leaf(shares).into_data(), "{half:?}");
            }
        }
        let single = Tensor::<2>::ones([3, 2], &Device::flex());
        assert_eq!(join_statistics(cut_statistics(single, DType::F32)).dims(), [3, 2]);
    }
}
