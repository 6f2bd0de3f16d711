//! Checks of the values of a configuration's keys. All families use them.

use crate::error::ConfigError;

/// The largest width of a layer, and the largest number of heads or rows of a kind. Larger ones are mistakes,
/// and products of several sizes could overflow.
const LARGEST: usize = 1 << 20;
/// The largest product of two sizes that make a width, such as heads and the width of a head.
const LARGEST_PRODUCT: usize = 1 << 24;
/// The largest number of rows of a table.
const MOST_ROWS: usize = 1 << 31;

/// Returns an error unless the value of `key` is in its range. `range` completes "it must be".
pub(crate) fn require(
    holds: bool,
    key: &'static str,
    value: impl ToString,
    range: &'static str,
) -> Result<(), ConfigError> {
    if holds { Ok(()) } else { Err(ConfigError::OutOfRange { key, value: value.to_string(), range }) }
}

/// Requires sizes from 1 to 1048576.
pub(crate) fn sizes(sizes: &[(&'static str, usize)]) -> Result<(), ConfigError> {
    sizes.iter().try_for_each(|&(key, value)| {
        require(value > 0, key, value, "at least 1")?;
        require(value <= LARGEST, key, value, "at most 1048576")
    })
}

/// Requires numbers of rows from 1 to 2147483648.
pub(crate) fn rows(rows: &[(&'static str, usize)]) -> Result<(), ConfigError> {
    rows.iter().try_for_each(|&(key, value)| {
        require(value > 0, key, value, "at least 1")?;
        require(value <= MOST_ROWS, key, value, "at most 2147483648")
    })
}

/// Requires that two sizes make a width of at most 16777216.
pub(crate) fn width(
    (key, value): (&'static str, usize),
    (by, factor): (&'static str, usize),
) -> Result<(), ConfigError> {
    if value.checked_mul(factor).is_some_and(|product| product <= LARGEST_PRODUCT) {
        return Ok(());
    }
    Err(ConfigError::TooWide { key, value, by, factor, largest: LARGEST_PRODUCT })
}

/// Requires finite numbers above 0.
pub(crate) fn above_zero(numbers: &[(&'static str, f64)]) -> Result<(), ConfigError> {
    let mut numbers = numbers.iter();
    numbers.try_for_each(|&(key, value)| require(value.is_finite() && value > 0.0, key, value, "positive"))
}

/// Requires finite numbers that are not below 0.
pub(crate) fn not_below_zero(numbers: &[(&'static str, f64)]) -> Result<(), ConfigError> {
    let mut numbers = numbers.iter();
    numbers.try_for_each(|&(key, value)| {
        require(value.is_finite() && value >= 0.0, key, value, "zero or positive")
    })
}

/// Requires that a value is a multiple of another one, which is not 0.
pub(crate) fn divisible(
    (key, value): (&'static str, usize),
    (by, divisor): (&'static str, usize),
) -> Result<(), ConfigError> {
    if value.is_multiple_of(divisor) {
        return Ok(());
    }
    Err(ConfigError::NotDivisible { key, value, by, divisor })
}
