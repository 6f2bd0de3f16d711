//! The exponential, in a form that a compiler can vectorise.

/// Above this the result is infinity. The true limit is 88.72; a scale of `2^128` would not fit.
pub(super) const LARGEST: f32 = 88.0;
/// Below this the result, no longer a normal number, is zero.
pub(super) const SMALLEST: f32 = -87.3;
/// Adding and subtracting this number rounds to an integer, which is then in the low bits.
pub(super) const ROUND: f32 = 12_582_912.0;

/// `ln 2` in two parts. The first has 9 bits.
pub(super) const LN_2_HIGH: f32 = 0.693_359_4;
pub(super) const LN_2_LOW: f32 = -2.121_944_4e-4;
/// The polynomial, from the highest power on.
pub(super) const COEFFICIENTS: [f32; 6] =
    [1.987_569_1e-4, 1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];

/// Returns `e^x`, within 2 units in the last place from -87.3 to 88; zero below, infinity above, NaN for NaN.
///
/// `x = n ln 2 + r` with `|r| <= ln 2 / 2`; `e^r` is the polynomial of Cephes' `expf` (Moshier, 1992), and
/// `2^n` is written into the bits of the exponent.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let clamped = if x > LARGEST { LARGEST } else { x };
    let clamped = if clamped < SMALLEST { SMALLEST } else { clamped };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = clamped - n * LN_2_HIGH - n * LN_2_LOW;
    let mut p = COEFFICIENTS[0];
    for coefficient in &COEFFICIENTS[1..] {
        p = p * r + coefficient;
    }
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(1f32.to_bits()));
    let result = (p * r * r + r + 1.0) * power;
    let result = if x > LARGEST { f32::INFINITY } else { result };
    if x < SMALLEST { 0.0 } else { result }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "takes minutes under Miri")]
    fn is_close_to_the_true_value() {
        for step in -8700..=8790 {
            let x = step as f32 / 100.0;
            let expected = f64::from(x).exp();
            let error = (f64::from(exp(x)) - expected).abs() / expected;
            assert!(error < 2.0 * f64::from(f32::EPSILON), "{x}: {error}");
        }
    }

    #[test]
    fn edges() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-1e4), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(1e4), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
    }
}
