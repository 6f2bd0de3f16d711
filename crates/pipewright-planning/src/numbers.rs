//! Formats numbers for people.

pub use pipewright_schedule::bytes::bytes_text as bytes;

/// Divides a size by 1000 until it is shown as less than that, at most until the last of `units` units.
/// Returns the rest and the number of divisions.
pub fn below_1000(mut size: f64, units: usize) -> (f64, usize) {
    let mut unit = 0;
    while size >= 999.5 && unit + 1 < units {
        size /= 1000.0;
        unit += 1;
    }
    (size, unit)
}

/// Returns the decimals with which a size has three significant digits, from 1 on.
pub fn decimals(size: f64) -> usize {
    match size {
        99.95.. => 0,
        9.995.. => 1,
        _ => 2,
    }
}

/// Formats a count with at least three significant digits, such as `950`, `1.05M` or `70.6B`.
pub fn short_count(count: u64) -> String {
    const UNITS: [&str; 5] = ["", "k", "M", "B", "T"];
    let (size, unit) = below_1000(count as f64, UNITS.len());
    let decimals = if unit == 0 { 0 } else { decimals(size) };
    format!("{size:.decimals$}{}", UNITS[unit])
}
