//! Functions of single numbers that have the same bits on every processor and system, and loops over them.
//!
//! The standard library's functions call the system's C library, whose last bits differ between libraries, and within one
//! library between processors. These consist of additions, multiplications and divisions in a fixed order, so that they have
//! one definition. Those with few calls are the `libm` crate's, which is written in Rust.
//!
//! Largest errors in units in the last place, for arguments from -87.3 to 87.3: [`exp`] 2, [`ln`] and [`ln_1p`] 1,
//! [`tanh`] 3, [`sigmoid`] 3, [`softplus`] 3, `ln σ(x)` 3, `x σ(x)` 4. The error of GELU is at most `4e-7 (1 + |result|)`, so
//! small results may have no correct digit. Beyond, [`exp`] is 0 below -87.3 and infinity above 88, [`softplus`] is 0 below -87.3, and
//! [`sigmoid`] and `x σ(x)` are 0 below -88; the true results, except those of [`exp`] above 88, are below 1e-36 there.

use std::mem::MaybeUninit;

use multiversion::multiversion;

pub use super::exp::exp;
use super::simd::{fresh, written};

/// Returns the natural logarithm.
pub fn ln(x: f32) -> f32 {
    libm::logf(x)
}

/// Returns `ln(1 + x)`, also for numbers near 0.
pub fn ln_1p(x: f32) -> f32 {
    libm::log1pf(x)
}

/// Returns the hyperbolic tangent. Near zero it is the polynomial of Cephes' `tanhf` (Moshier, 1992).
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    const SMALL: f32 = 0.625;
    let square = x * x;
    let mut p = -5.704_988_7e-3;
    for coefficient in [2.063_909e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328e-1] {
        p = p * square + coefficient;
    }
    let near = p * square * x + x;
    let far = (1.0 - 2.0 / (exp(2.0 * x.abs()) + 1.0)).copysign(x);
    if x.abs() < SMALL { near } else { far }
}

/// Returns `1 / (1 + e^-x)`.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Returns `ln(1 + e^x)`. NaN stays NaN, which [`f32::max`] would replace by 0.
#[inline(always)]
pub fn softplus(x: f32) -> f32 {
    (if x < 0.0 { 0.0 } else { x }) + ln_1p(exp(-x.abs()))
}

/// A function of each element of a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Function {
    /// `e^x`.
    Exp,
    /// The natural logarithm.
    Ln,
    /// The hyperbolic tangent.
    Tanh,
    /// `σ(x) = 1 / (1 + e^-x)`.
    Sigmoid,
    /// `1 / sqrt(x)`.
    InverseRoot,
    /// `ln(1 + e^x)`.
    Softplus,
    /// `ln σ(x)`.
    LogSigmoid,
    /// `x σ(x)`.
    Silu,
    /// `x σ(2u)` with `u = sqrt(2 / π) (x + 0.044715 x³)`, which is `x (1 + tanh u) / 2` (Hendrycks and Gimpel, 2016).
    GeluTanh,
}

impl Function {
    /// Returns whether [`slopes`] takes the results of the function instead of its arguments.
    pub fn has_slope_of_result(self) -> bool {
        matches!(self, Self::Exp | Self::Tanh | Self::Sigmoid | Self::InverseRoot)
    }
}

/// `2 sqrt(2 / π)`, and the factor of `x³`.
const GELU: [f32; 2] = [1.595_769, 0.044_715];

#[inline(always)]
fn gelu_share(x: f32) -> f32 {
    sigmoid(GELU[0] * (x + GELU[1] * x * x * x))
}

/// Returns the function of each element.
pub fn values(function: Function, x: &[f32]) -> Vec<f32> {
    let mut y = fresh(x.len());
    write_values(function, x, &mut y);
    // SAFETY: an element of `y` was written for each of `x`, which are as many.
    unsafe { written(y) }
}

/// The elements that [`replace`] computes at once.
const CHUNK: usize = 1024;

/// Replaces each element by its function, with the bits of [`values`].
pub fn replace(function: Function, x: &mut [f32]) {
    let mut memory = [MaybeUninit::<f32>::uninit(); CHUNK];
    for part in x.chunks_mut(CHUNK) {
        let y = &mut memory[..part.len()];
        write_values(function, part, y);
        // SAFETY: `write_values` has written all elements.
        part.copy_from_slice(unsafe { std::slice::from_raw_parts(y.as_ptr().cast(), y.len()) });
    }
}

#[multiversion(targets = "simd")]
fn write_values(function: Function, x: &[f32], y: &mut [MaybeUninit<f32>]) {
    match function {
        Function::Exp => each(x, y, exp),
        Function::Ln => each(x, y, ln),
        Function::Tanh => each(x, y, tanh),
        Function::Sigmoid => each(x, y, sigmoid),
        Function::InverseRoot => each(x, y, |x| 1.0 / x.sqrt()),
        Function::Softplus => each(x, y, softplus),
        Function::LogSigmoid => each(x, y, |x| -softplus(-x)),
        Function::Silu => each(x, y, |x| x * sigmoid(x)),
        Function::GeluTanh => each(x, y, |x| x * gelu_share(x)),
    }
}

#[inline(always)]
fn each(x: &[f32], y: &mut [MaybeUninit<f32>], value: impl Fn(f32) -> f32) {
    for (y, &x) in y.iter_mut().zip(x) {
        y.write(value(x));
    }
}

/// Returns the gradient of the arguments from the `gradient` of the results. `kept` has the results if the function
/// [has its slope from them](Function::has_slope_of_result), and the arguments if not.
///
/// # Panics
/// When the slices have different lengths.
pub fn slopes(function: Function, kept: &[f32], gradient: &[f32]) -> Vec<f32> {
    assert_eq!(kept.len(), gradient.len(), "each element has a gradient");
    let mut d = fresh(kept.len());
    write_slopes(function, kept, gradient, &mut d);
    // SAFETY: an element of `d` was written for each of `kept`, which are as many.
    unsafe { written(d) }
}

#[multiversion(targets = "simd")]
fn write_slopes(function: Function, kept: &[f32], g: &[f32], d: &mut [MaybeUninit<f32>]) {
    match function {
        Function::Exp => each_slope(kept, g, d, |y| y),
        Function::Ln => each_slope(kept, g, d, |x| 1.0 / x),
        Function::Tanh => each_slope(kept, g, d, |y| 1.0 - y * y),
        Function::Sigmoid => each_slope(kept, g, d, |y| y * (1.0 - y)),
        Function::InverseRoot => each_slope(kept, g, d, |y| -0.5 * y * y * y),
        Function::Softplus => each_slope(kept, g, d, sigmoid),
        Function::LogSigmoid => each_slope(kept, g, d, |x| sigmoid(-x)),
        Function::Silu => each_slope(kept, g, d, |x| {
            let share = sigmoid(x);
            share * (1.0 + x * (1.0 - share))
        }),
        Function::GeluTanh => each_slope(kept, g, d, |x| {
            // The slope of larger numbers is 0 or 1, and their squares may be infinite.
            let x = x.clamp(-1e6, 1e6);
            let share = gelu_share(x);
            share * (1.0 + x * (1.0 - share) * GELU[0] * (1.0 + 3.0 * GELU[1] * x * x))
        }),
    }
}

#[inline(always)]
fn each_slope(kept: &[f32], g: &[f32], d: &mut [MaybeUninit<f32>], slope: impl Fn(f32) -> f32) {
    for ((d, &kept), &g) in d.iter_mut().zip(kept).zip(g) {
        d.write(g * slope(kept));
    }
}

#[cfg(test)]
mod tests {
    use super::Function::*;
    use super::*;
    use crate::exp::LARGEST;

    const ALL: [Function; 9] = [Exp, Ln, Tanh, Sigmoid, InverseRoot, Softplus, LogSigmoid, Silu, GeluTanh];

    /// Returns the function and its slope in double precision.
    fn true_values(function: Function, x: f64) -> [f64; 2] {
        let share = |x: f64| 1.0 / (1.0 + (-x).exp());
        let softplus = |x: f64| x.max(0.0) + (-x.abs()).exp().ln_1p();
        match function {
            Exp => [x.exp(); 2],
            Ln => [x.ln(), 1.0 / x],
            Tanh => [x.tanh(), x.cosh().powi(-2)],
            Sigmoid => [share(x), share(x) * share(-x)],
            InverseRoot => [x.sqrt().recip(), -0.5 * x.powf(-1.5)],
            Softplus => [softplus(x), share(x)],
            LogSigmoid => [-softplus(-x), share(-x)],
            Silu => [x * share(x), share(x) * (1.0 + x * share(-x))],
            GeluTanh => {
                let [factor, cubic] = [2.0 * (2.0 / std::f64::consts::PI).sqrt(), 0.044_715];
                let share_x = share(factor * (x + cubic * x.powi(3)));
                let inner = factor * (1.0 + 3.0 * cubic * x * x);
                [x * share_x, share_x + x * share_x * (1.0 - share_x) * inner]
            }
        }
    }

    /// Numbers of both signs, the larger ones farther apart.
    fn arguments() -> Vec<f32> {
        let mut x: Vec<f32> = (-40_000..40_000).map(|i| i as f32 / 2000.0).collect();
        x.extend((-9_500..9_500).map(|i| i as f32 / 100.0));
        x.extend((0..4_000).flat_map(|i| {
            let small = (1.0 + i as f32 / 4_000.0) * 2f32.powi(-(i % 100));
            [small, -small]
        }));
        x
    }

    fn check(function: Function, ulps: f64, slope_bound: f64) {
        let has_value = |x: &f32| match function {
            Ln => *x > 0.0,
            Exp => *x <= LARGEST,
            // The slope of smaller ones is too large for single precision.
            InverseRoot => *x > 1e-20,
            _ => true,
        };
        let x: Vec<f32> = arguments().into_iter().filter(has_value).collect();
        let y = values(function, &x);
        let kept = if function.has_slope_of_result() { &y } else { &x };
        let d = slopes(function, kept, &vec![1.0; x.len()]);
        for ((&x, &y), d) in x.iter().zip(&y).zip(d) {
            let [value, slope] = true_values(function, f64::from(x));
            if x.abs() > 87.3 && value.abs() < 1e-36 {
                assert!(y.abs() < 1e-36, "{function:?} of {x}: {y}, and {value} is true");
            } else if value.abs() >= f64::from(f32::MIN_POSITIVE) {
                let ulp = 2f64.powi(value.abs().log2().floor() as i32 - 23);
                let error = (f64::from(y) - value).abs() / ulp;
                assert!(error <= ulps, "{function:?} of {x}: {y}, {error} units from {value}");
            }
            let error = (f64::from(d) - slope).abs() / slope.abs().max(1.0);
            assert!(error <= slope_bound, "slope of {function:?} at {x}: {d}, and {slope} is true");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "takes minutes under Miri")]
    fn values_and_slopes_are_close_to_the_true_ones() {
        check(Exp, 2.0, 3e-7);
        check(Ln, 1.0, 1e-7);
        check(Tanh, 3.0, 6e-7);
        check(Sigmoid, 3.0, 3e-7);
        check(InverseRoot, 2.0, 4e-7);
        check(Softplus, 3.0, 3e-7);
        check(LogSigmoid, 3.0, 3e-7);
        check(Silu, 4.0, 3e-6);
    }

    /// For numbers far below 0, the slope is small, but not 0.
    #[test]
    fn small_slopes_of_softplus_are_not_lost() {
        let x: Vec<f32> = (0..800).map(|i| i as f32 / -10.0).collect();
        let d = slopes(Softplus, &x, &vec![1.0; x.len()]);
        for (&x, d) in x.iter().zip(d) {
            let [_, slope] = true_values(Softplus, f64::from(x));
            assert!((f64::from(d) - slope).abs() <= 4e-7 * slope, "{x}: {d}, and {slope} is true");
        }
    }

    /// The sum in the argument of the sigmoid has an error that grows with the argument, so the bound is absolute.
    #[test]
    #[cfg_attr(miri, ignore = "takes minutes under Miri")]
    fn gelu_is_close_to_the_true_function() {
        let x = arguments();
        let (y, d) = (values(GeluTanh, &x), slopes(GeluTanh, &x, &vec![1.0; x.len()]));
        for ((&x, &y), d) in x.iter().zip(&y).zip(d) {
            let [value, slope] = true_values(GeluTanh, f64::from(x));
            let bound = |value: f64| 4e-7 * (1.0 + value.abs());
            assert!((f64::from(y) - value).abs() <= bound(value), "{x}: {y}, and {value} is true");
            assert!((f64::from(d) - slope).abs() <= 4.0 * bound(slope), "{x}: {d}, and {slope} is true");
        }
    }

    #[test]
    fn limits_are_exact_and_nan_stays() {
        let infinity = f32::INFINITY;
        let expected = [
            (Exp, [0.0, 1.0, infinity]),
            (Tanh, [-1.0, 0.0, 1.0]),
            (Sigmoid, [0.0, 0.5, 1.0]),
            (Softplus, [0.0, std::f32::consts::LN_2, infinity]),
            (LogSigmoid, [-infinity, -std::f32::consts::LN_2, 0.0]),
        ];
        for (function, expected) in expected {
            assert_eq!(values(function, &[-infinity, 0.0, infinity]), expected, "{function:?}");
        }
        assert_eq!(values(Ln, &[0.0, 1.0, infinity]), [-infinity, 0.0, infinity]);
        assert_eq!(values(InverseRoot, &[0.0, 4.0, infinity]), [infinity, 0.5, 0.0]);
        assert!(ALL.into_iter().all(|function| values(function, &[f32::NAN])[0].is_nan()));
        let large = [-infinity, -6e19, 6e19, infinity];
        assert_eq!(slopes(GeluTanh, &large, &[1.0; 4]), [0.0, 0.0, 1.0, 1.0]);
        assert!(ln(-1.0).is_nan() && ln_1p(-2.0).is_nan());
        assert_eq!(ln_1p(-1.0), -infinity);
    }

    /// The vector units of this processor give the bits of the scalar functions. Any NaN is like another.
    #[test]
    fn vectors_have_the_bits_of_single_numbers() {
        let mut x = arguments();
        x.extend([
            f32::NAN,
            f32::INFINITY,
            -0.0,
            f32::MAX,
            f32::MIN_POSITIVE,
            f32::from_bits(0x7f_ffff),
            f32::from_bits(1),
        ]);
        x.extend(x.clone().into_iter().map(|x| -x));
        x.extend((87_000..89_000).map(|i| i as f32 / 1000.0));
        let bits = |y: f32| if y.is_nan() { f32::NAN.to_bits() } else { y.to_bits() };
        let same = |function, single: &dyn Fn(f32) -> f32| {
            for (&x, y) in x.iter().zip(values(function, &x)) {
                assert_eq!(bits(single(x)), bits(y), "{function:?} of {x:e}");
            }
        };
        for function in ALL {
            same(function, &|x| values(function, &[x])[0]);
        }
        for function in ALL {
            let mut replaced = x.clone();
            replace(function, &mut replaced);
            let expected = values(function, &x);
            assert!(
                replaced.iter().zip(&expected).all(|(&y, &value)| bits(y) == bits(value)),
                "{function:?}"
            );
        }
        same(Exp, &exp);
        same(Ln, &ln);
        same(Tanh, &tanh);
        same(Sigmoid, &sigmoid);
        same(Softplus, &softplus);
    }
}
