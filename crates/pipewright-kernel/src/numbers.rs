//! Numbers for tests.

/// Returns `count` numbers from -1 to 1. Each of them is a number of bfloat16, and most fill its mantissa.
pub(crate) fn numbers(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 37 + seed * 11) % 257) as f32 / 128.0 - 1.0).collect()
}
