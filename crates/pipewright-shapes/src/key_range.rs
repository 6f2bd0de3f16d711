//! Checks of the values of a configuration's keys. All families use them.

use crate::error::ShapeError;

/// The most blocks of a model.
pub(crate) const MAX_BLOCKS: u64 = 10_000;
/// The largest width of a layer, and the largest number of heads or rows of a kind. Larger ones are mistakes,
/// and products of several sizes could overflow.
const LARGEST: usize = 1 << 20;
/// The largest product of two sizes that make a width, such as heads and the width of a head.
const LARGEST_PRODUCT: usize = 1 << 24;
/// The largest number of rows of a table.
const MOST_ROWS: usize = 1 << 31;

/// Returns an error unless the value of `key` is in its range. `range` completes "it must be".
pub fn require(holds: bool, key: &str, value: impl ToString, range: &str) -> Result<(), ShapeError> {
    if holds {
        return Ok(());
    }
    // The width of a head follows from two other keys if it is absent.
    let others: &[&str] = if key == "head_dim" { &["hidden_size", "num_attention_heads"] } else { &[] };
    let message = format!("`{key} = {}` is out of range: it must be {range}", value.to_string());
    Err(ShapeError::new(&[&[key], others].concat(), message))
}

/// Requires sizes from 1 to 1048576.
pub fn sizes(sizes: &[(&str, usize)]) -> Result<(), ShapeError> {
    sizes.iter().try_for_each(|&(key, value)| {
        require(value > 0, key, value, "at least 1")?;
        require(value <= LARGEST, key, value, "at most 1048576")
    })
}

/// Requires numbers of rows from 1 to 2147483648.
pub fn rows(rows: &[(&str, usize)]) -> Result<(), ShapeError> {
    rows.iter().try_for_each(|&(key, value)| {
        require(value > 0, key, value, "at least 1")?;
        require(value <= MOST_ROWS, key, value, "at most 2147483648")
    })
}

/// Requires that two sizes make a width of at most 16777216.
pub fn width((key, value): (&str, usize), (by, factor): (&str, usize)) -> Result<(), ShapeError> {
    if value.checked_mul(factor).is_some_and(|product| product <= LARGEST_PRODUCT) {
        return Ok(());
    }
    let message = format!(
        "`{key} = {value}` times `{by} = {factor}` is too wide: it must be at most {LARGEST_PRODUCT}"
    );
    Err(ShapeError::new(&[key], message))
}

/// Returns the error of a block whose kind is not known.
pub(crate) fn unknown_block(key: &str, index: usize, found: &str, known: &str) -> ShapeError {
    let message =
        format!("`{key}`: block {index} is `{found}`, counted from 0; the kinds of blocks are {known}");
    ShapeError::new(&[key], message)
}

/// Requires finite numbers above 0.
pub fn above_zero(numbers: &[(&str, f64)]) -> Result<(), ShapeError> {
    let mut numbers = numbers.iter();
    numbers.try_for_each(|&(key, value)| require(value.is_finite() && value > 0.0, key, value, "positive"))
}

/// Requires finite numbers that are not below 0.
pub fn not_below_zero(numbers: &[(&str, f64)]) -> Result<(), ShapeError> {
    let mut numbers = numbers.iter();
    numbers.try_for_each(|&(key, value)| {
        require(value.is_finite() && value >= 0.0, key, value, "zero or positive")
    })
}

/// Requires that a value is a multiple of another one, which is not 0.
pub fn divisible((key, value): (&str, usize), (by, divisor): (&str, usize)) -> Result<(), ShapeError> {
    if value.is_multiple_of(divisor) {
        return Ok(());
    }
    let message = format!("`{key} = {value}` is not divisible by `{by} = {divisor}`");
    Err(ShapeError::new(&[by, key], message))
}
