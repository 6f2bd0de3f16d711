//! Sizes in bytes, and other numbers with units, as people write them.

use std::ops::RangeInclusive;

use thiserror::Error;

/// A text that is not a size.
#[derive(Clone, PartialEq, Eq, Error)]
#[error("write a size such as 16GiB, 500MB or a number of bytes")]
pub struct ParseBytesError;

crate::error_text::message_as_debug!(ParseBytesError);

/// The units with their bytes. A unit that ends with another one comes before it.
const UNITS: [(&str, f64); 9] = [
    ("kib", 1024.0),
    ("mib", 1_048_576.0),
    ("gib", 1_073_741_824.0),
    ("tib", 1_099_511_627_776.0),
    ("kb", 1e3),
    ("mb", 1e6),
    ("gb", 1e9),
    ("tb", 1e12),
    ("b", 1.0),
];

/// Writes a size in the unit that leaves one to three digits before the decimal point.
///
/// ```
/// use pipewright_schedule::bytes::bytes_text;
/// assert_eq!((bytes_text(1536), bytes_text(80 << 30)), ("1.5 KiB".to_owned(), "80.0 GiB".to_owned()));
/// ```
pub fn bytes_text(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let (mut size, mut unit) = (bytes as f64, 0);
    while size >= 1000.0 && unit + 1 < UNITS.len() {
        size /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{size:.1} {}", UNITS[unit]) }
}

/// Reads a size such as `16GiB`, `500MB` or `1000`, from 1 byte to 10^18.
///
/// ```
/// use pipewright_schedule::bytes::parse_bytes;
/// assert_eq!(parse_bytes("16GiB"), Ok(16 << 30));
/// ```
///
/// # Errors
/// When the text is not a size.
pub fn parse_bytes(text: &str) -> Result<u64, ParseBytesError> {
    parse_with_unit(text, &UNITS, 1.0..=1e18).map(|value| value as u64).ok_or(ParseBytesError)
}

/// Reads a number in one of `units`, such as `1.5 GiB`, without regard to case. A number without a unit counts
/// as it is. The names of the units are in lower case, and a name that ends with another one comes before it.
///
/// Returns `None` for any other text, and for values outside `range`.
///
/// ```
/// use pipewright_schedule::bytes::parse_with_unit;
/// let units = [("ms", 1e-3), ("s", 1.0)];
/// assert_eq!(parse_with_unit("250 ms", &units, 0.0..=60.0), Some(0.25));
/// assert_eq!(parse_with_unit("2 minutes", &units, 0.0..=60.0), None);
/// ```
pub fn parse_with_unit(text: &str, units: &[(&str, f64)], range: RangeInclusive<f64>) -> Option<f64> {
    let lower = text.trim().to_lowercase();
    let unit = units.iter().find_map(|(name, factor)| Some((lower.strip_suffix(name)?, *factor)));
    let (number, factor) = unit.unwrap_or((&lower, 1.0));
    let value = number.trim().parse::<f64>().ok()? * factor;
    range.contains(&value).then_some(value)
}

/// The units of times with their seconds. A unit that ends with another one comes before it.
const TIMES: [(&str, f64); 5] = [("ms", 1e-3), ("s", 1.0), ("m", 60.0), ("h", 3600.0), ("d", 86_400.0)];

/// Reads a time such as `90s`, `30 m`, `12h` or `7d`, in seconds. A number without a unit is not a time.
///
/// Returns `None` for any other text, and for times outside `range`, in seconds.
///
/// ```
/// use pipewright_schedule::bytes::parse_time;
/// assert_eq!(parse_time("1.5h", 1.0..=1e9), Some(5400.0));
/// assert_eq!(parse_time("24", 1.0..=1e9), None);
/// ```
pub fn parse_time(text: &str, range: RangeInclusive<f64>) -> Option<f64> {
    let has_unit = text.trim_end().ends_with(|last: char| last.is_ascii_alphabetic());
    parse_with_unit(text, &TIMES, range).filter(|_| has_unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(parse_bytes("16GiB"), Ok(16 << 30));
        assert_eq!(parse_bytes("1.5 mb"), Ok(1_500_000));
        assert_eq!(parse_bytes("17179869184"), Ok(16 << 30));
        for wrong in ["", "-1GiB", "nan", "16 gigs", "inf"] {
            assert_eq!(parse_bytes(wrong), Err(ParseBytesError), "{wrong}");
        }
    }

    #[test]
    fn times() {
        let range = 1.0..=1e9;
        for (text, seconds) in [("90m", 5400.0), (" 1.5 H", 5400.0), ("7d", 604_800.0), ("1000ms", 1.0)] {
            assert_eq!(parse_time(text, range.clone()), Some(seconds), "{text}");
        }
        for wrong in ["", "24", "0s", "-1h", "nan d", "inf", "inf d", "1e300d", "1 week", "0.5s", "20000d"] {
            assert_eq!(parse_time(wrong, range.clone()), None, "{wrong}");
        }
    }
}
