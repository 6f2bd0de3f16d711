//! The sums of products in scalar code: the definition that all kernels follow.

/// The length of a block of the inner dimension.
pub(crate) const BLOCK: usize = 512;

/// Returns an element of a product in single precision, added to `old` if that exists.
#[cfg(test)]
pub(crate) fn sum_of_blocks(old: Option<f32>, inner: usize, factors: impl Fn(usize) -> [f32; 2]) -> f32 {
    let block = |start: usize| {
        (start..inner.min(start + BLOCK)).map(&factors).fold(0.0, |sum, [a, b]| f32::mul_add(a, b, sum))
    };
    let blocks = (0..inner).step_by(BLOCK).map(block);
    match old {
        Some(old) => blocks.fold(old, |sum, block| sum + block),
        None => blocks.reduce(|sum, block| sum + block).unwrap_or(0.0),
    }
}

/// Returns `sum` and the products of an element of a product of bfloat16. `factors` are in single precision.
pub(crate) fn sum_of_pairs(sum: f32, inner: usize, factors: impl Fn(usize) -> [f32; 2]) -> f32 {
    let factors = |k: usize| if k < inner { factors(k).map(flushed) } else { [0.0; 2] };
    (0..inner).step_by(2).fold(sum, |sum, even| {
        [even + 1, even].map(factors).into_iter().fold(sum, |sum, [a, b]| flushed_sum(a, b, sum))
    })
}

/// Returns `a b + sum`, rounded once to 24 bits with an exponent of any size, or a zero of its sign if that is
/// subnormal.
fn flushed_sum(a: f32, b: f32, sum: f32) -> f32 {
    let rounded = a.mul_add(b, sum);
    // Near the least normal number, subnormal numbers are half as dense as 24 bits are, so that a number below it may
    // have been rounded up to it. The product has 16 bits, so this sum is exact.
    let exact = f64::from(a) * f64::from(b) + f64::from(sum);
    let is_below = exact.abs()
        < f64::from(f32::MIN_POSITIVE) - f64::from(f32::MIN_POSITIVE) * f64::from(f32::EPSILON / 4.0);
    if is_below { 0f32.copysign(rounded) } else { rounded }
}

/// Returns `x`, or a zero of its sign if it is subnormal.
pub(crate) fn flushed(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}
