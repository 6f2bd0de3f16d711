//! Initial parameters. They depend only on the seed and on the parameter's path, not on the cut of the model,
//! the order of construction or the machine.
//!
//! The stream of a parameter is ChaCha8 keyed by the seed and the FNV-1a hash of the path. The polar method
//! (Marsaglia and Bray, 1964) makes normal numbers in plain IEEE arithmetic. It does not use the standard
//! library's logarithm, whose last bit may differ between systems.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::error::ModelError;
use crate::lora::{TABLE_MATRICES, layer_of_first, name_of};
use crate::parameter::{ParameterKind, ParameterSource, ParameterSpec};

/// Draws matrices and tables from a normal distribution around zero, and sets scales to one and biases to
/// zero.
#[derive(Debug, Clone)]
pub struct SeededInit {
    /// The run's seed.
    pub seed: u64,
    /// The standard deviation: Hugging Face's `initializer_range`.
    pub deviation: f64,
}

impl ParameterSource for SeededInit {
    fn parameter(&mut self, spec: &ParameterSpec) -> Result<Vec<f32>, ModelError> {
        let len = spec.shape.iter().product();
        Ok(match spec.kind {
            ParameterKind::Scale => vec![1.0; len],
            ParameterKind::Bias => vec![0.0; len],
            ParameterKind::Matrix | ParameterKind::Table => {
                let mut normal = Normal::new(self.seed, &spec.path);
                (0..len).map(|_| (normal.next() * self.deviation) as f32).collect()
            }
        })
    }
}

/// Returns the first values of a parameter of an adapter: zeros for the second matrix, so that the adapter
/// adds nothing, and uniform numbers for the first one. Their bound is as in PEFT, the root of
/// `1 / inputs`. The first matrix of a table is zeros, and the second one normal numbers. Magnitudes come from [`ParameterSource::magnitudes`].
pub(crate) fn adapter_values(seed: u64, spec: &ParameterSpec) -> Vec<f32> {
    let len = spec.shape.iter().product();
    let is_of_table = TABLE_MATRICES.contains(&name_of(&spec.path));
    if is_of_table && layer_of_first(&spec.path).is_none() {
        let mut normal = Normal::new(seed, &spec.path);
        return (0..len).map(|_| normal.next() as f32).collect();
    }
    if is_of_table || layer_of_first(&spec.path).is_none() {
        return vec![0.0; len];
    }
    let bound = (spec.shape[0] as f64).sqrt().recip();
    let mut random = stream(seed, &spec.path);
    (0..len).map(|_| (symmetric(random.next_u32()) * bound) as f32).collect()
}

/// Returns the random bits of a parameter.
fn stream(seed: u64, path: &str) -> ChaCha8Rng {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..16].copy_from_slice(&fnv1a(path.as_bytes()).to_le_bytes());
    ChaCha8Rng::from_seed(key)
}

/// A source of independent numbers between 0 and 1.
pub(crate) struct Uniform(ChaCha8Rng);

impl Uniform {
    pub(crate) fn new(seed: u64, path: &str) -> Self {
        Self(stream(seed, path))
    }

    pub(crate) fn next(&mut self) -> f64 {
        (symmetric(self.0.next_u32()) + 1.0) / 2.0
    }
}

/// A source of independent standard normal numbers.
struct Normal {
    stream: ChaCha8Rng,
    spare: Option<f64>,
}

impl Normal {
    fn new(seed: u64, path: &str) -> Self {
        Self { stream: stream(seed, path), spare: None }
    }

    fn next(&mut self) -> f64 {
        if let Some(spare) = self.spare.take() {
            return spare;
        }
        loop {
            let bits = self.stream.next_u64();
            let (x, y) = (symmetric(bits as u32), symmetric((bits >> 32) as u32));
            let square = x * x + y * y;
            if square < 1.0 {
                let factor = (-2.0 * ln(square) / square).sqrt();
                self.spare = Some(y * factor);
                return x * factor;
            }
        }
    }
}

/// Makes a number in (-1, 1) from 32 random bits. The numbers are symmetric around zero, and not zero.
fn symmetric(bits: u32) -> f64 {
    (f64::from(bits as i32) + 0.5) / 2_147_483_648.0
}

/// Returns the natural logarithm of a positive normal number, with a relative error of about 1e-13.
///
/// With `x = m 2^e` and `m` near one, `ln m = 2 artanh t` for `t = (m - 1) / (m + 1)`, where `|t| < 0.172`.
/// The function sums the series of `artanh`.
fn ln(x: f64) -> f64 {
    const MANTISSA: u64 = (1 << 52) - 1;
    let bits = x.to_bits();
    let mut exponent = (bits >> 52) as i32 - 1023;
    let mut mantissa = f64::from_bits((bits & MANTISSA) | (1023 << 52));
    if mantissa > std::f64::consts::SQRT_2 {
        mantissa *= 0.5;
        exponent += 1;
    }
    let t = (mantissa - 1.0) / (mantissa + 1.0);
    let square = t * t;
    let series = (0..8).rev().fold(0.0, |sum, k| sum * square + 1.0 / f64::from(2 * k + 1));
    2.0 * t * series + f64::from(exponent) * std::f64::consts::LN_2
}

/// Returns the 64-bit FNV-1a hash (Fowler, Noll and Vo), which is the same on every platform and in every
/// release.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_is_the_published_one() {
        assert_eq!(fnv1a(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a(b"foobar"), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn logarithm_agrees_with_the_system() {
        for x in [1e-18, 1e-3, 0.1, 0.5, 0.707, 0.708, 0.999_999, 1.0, 1.5, 7.0] {
            assert!((ln(x) - f64::ln(x)).abs() <= 2e-13 * f64::ln(x).abs().max(1.0), "ln {x}");
        }
    }

    #[test]
    fn numbers_are_standard_normal() {
        let mut normal = Normal::new(7, "model.norm.weight");
        let numbers: Vec<f64> = (0..200_000).map(|_| normal.next()).collect();
        let moment = |power: i32| numbers.iter().map(|x| x.powi(power)).sum::<f64>() / numbers.len() as f64;
        let check =
            |got: f64, want: f64, tolerance: f64| assert!((got - want).abs() < tolerance, "{got} for {want}");
        check(moment(1), 0.0, 0.01);
        check(moment(2), 1.0, 0.02);
        check(moment(3), 0.0, 0.05);
        check(moment(4), 3.0, 0.15);
        let inside = numbers.iter().filter(|x| x.abs() < 1.0).count() as f64 / numbers.len() as f64;
        check(inside, 0.6827, 0.005);
    }

    #[test]
    fn an_adapter_starts_with_uniform_numbers_and_zeros() {
        let of = |name: &str, shape: [usize; 2]| {
            let (path, kind) = (format!("model.layers.0.mlp.up_proj.{name}.weight"), ParameterKind::Matrix);
            adapter_values(3, &ParameterSpec::new(path, shape.to_vec(), kind))
        };
        assert_eq!(of("lora_B", [4, 9]), [0.0; 36]);
        let first = of("lora_A", [400, 50]);
        let bound = 0.05;
        assert!(first.iter().all(|x| x.abs() <= bound));
        let variance = first.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / first.len() as f64;
        let expected = f64::from(bound).powi(2) / 3.0;
        assert!((variance / expected - 1.0).abs() < 0.02, "{variance} for {expected}");
    }

    #[test]
    fn streams_differ_by_seed_and_by_path_and_repeat() {
        let first = |seed, path| Normal::new(seed, path).next();
        assert_eq!(first(1, "a"), first(1, "a"));
        assert_ne!(first(1, "a"), first(2, "a"));
        assert_ne!(first(1, "a"), first(1, "b"));
    }
}
