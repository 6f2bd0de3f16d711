//! Numbers for tests.

/// Returns `count` numbers from -1 to 1. Each of them is a number of bfloat16, and most fill its mantissa.
pub(crate) fn numbers(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 37 + seed * 11) % 257) as f32 / 128.0 - 1.0).collect()
}

/// Which numbers operands have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    /// From -1 to 1, with all bits of the mantissa.
    Usual,
    /// Sums and products are near the least normal number.
    Tiny,
    /// Sums are rounded to the least normal number.
    Least,
    /// Some are infinite, NaN, subnormal, zeros of both signs, or the largest.
    Any,
}

const SPECIAL: [f32; 10] = [
    f32::NAN,
    f32::INFINITY,
    f32::NEG_INFINITY,
    0.0,
    -0.0,
    1e-40,
    -1e-45,
    f32::MIN_POSITIVE,
    3.0e38,
    -3.0e38,
];

/// A generator of numbers with 64 bits of state, by Marsaglia's shifts.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(88_172_645_463_325_252 + seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        for shift in [13, -7, 17] {
            self.0 ^= if shift > 0 { self.0 << shift } else { self.0 >> -shift };
        }
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    pub(crate) fn number(&mut self, kind: Kind) -> f32 {
        let bits = self.next() as u32;
        match kind {
            Kind::Any if bits.is_multiple_of(61) => SPECIAL[(self.next() % SPECIAL.len() as u64) as usize],
            // Exponents from -66 to -59, so that products are from 2^-132 to 2^-117.
            Kind::Tiny => f32::from_bits((bits & 0x807f_ffff) | ((61 + (self.next() % 8) as u32) << 23)),
            // Products are about 2^-126, 2^-139, 2^-138, 2^-151 and 2^-150.
            Kind::Least => f32::from_bits((bits & 0x8003_0000) | [64, 64, 51, 52][bits as usize % 4] << 23),
            _ => (bits as f32 / 2f32.powi(31) - 1.0) * [1.0, 0.01, 30.0][(self.next() % 3) as usize],
        }
    }
}
