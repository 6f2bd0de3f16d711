//! Numbers with units.
//!
//! A key names its unit, such as `memory_gb`. Its value is a number in this unit, or text with a unit of the
//! same dimension, such as `"80 GiB"`. A unit of another dimension is an error.
//!
//! A plain number of `memory_gb` counts gigabytes as they are sold, of 2^30 bytes: 80 is 80 GiB. In text, a
//! GB is 10^9 bytes: `"80 GB"` is 7% less than 80.

use crate::value::Value;

/// The dimension of a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dimension {
    /// Operations per second.
    Rate,
    /// Bytes.
    Size,
    /// Bytes per second.
    Bandwidth,
    /// Seconds.
    Time,
    /// Watts.
    Power,
    /// A whole number without a unit.
    Count,
    /// A number without a unit.
    Share,
}

impl Dimension {
    fn noun(self) -> &'static str {
        match self {
            Self::Rate => "operations per second, such as `989 TFLOP/s`",
            Self::Size => "bytes, such as `80 GB`",
            Self::Bandwidth => "bytes per second, such as `50 GB/s` or `400 Gbit/s`",
            Self::Time => "seconds, such as `5 us`",
            Self::Power => "watts, such as `700 W`",
            Self::Count | Self::Share => "a number without a unit",
        }
    }

    fn expected(self) -> String {
        match self {
            Self::Count => "a whole number, such as 8".into(),
            Self::Share => "a number without a unit, such as 0.7".into(),
            _ => format!("a number, or a number and a unit of {}", self.noun()),
        }
    }
}

/// The key of a quantity, and the values that it may have.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measure {
    /// The key in files.
    pub key: &'static str,
    /// The dimension.
    pub dimension: Dimension,
    /// The factor of a plain number in operations, bytes, seconds and watts.
    pub unit: f64,
    /// The smallest plausible value, as a plain number.
    pub least: f64,
    /// The largest plausible value, as a plain number.
    pub most: f64,
}

/// The bytes of a GiB.
pub const GIB: f64 = 1_073_741_824.0;

/// The units, their dimension and their factor in operations, bytes, seconds and watts.
const UNITS: &[(&str, Dimension, f64)] = &[
    ("TFLOP/s", Dimension::Rate, 1e12),
    ("TFLOPS", Dimension::Rate, 1e12),
    ("PFLOP/s", Dimension::Rate, 1e15),
    ("PFLOPS", Dimension::Rate, 1e15),
    ("GFLOP/s", Dimension::Rate, 1e9),
    ("GFLOPS", Dimension::Rate, 1e9),
    ("B", Dimension::Size, 1.0),
    ("MB", Dimension::Size, 1e6),
    ("MiB", Dimension::Size, 1_048_576.0),
    ("GB", Dimension::Size, 1e9),
    ("GiB", Dimension::Size, GIB),
    ("TB", Dimension::Size, 1e12),
    ("TiB", Dimension::Size, 1_099_511_627_776.0),
    ("MB/s", Dimension::Bandwidth, 1e6),
    ("GB/s", Dimension::Bandwidth, 1e9),
    ("GiB/s", Dimension::Bandwidth, GIB),
    ("TB/s", Dimension::Bandwidth, 1e12),
    ("Gbit/s", Dimension::Bandwidth, 1.25e8),
    ("Gb/s", Dimension::Bandwidth, 1.25e8),
    ("Tbit/s", Dimension::Bandwidth, 1.25e11),
    ("s", Dimension::Time, 1.0),
    ("h", Dimension::Time, 3600.0),
    ("ms", Dimension::Time, 1e-3),
    ("us", Dimension::Time, 1e-6),
    ("ns", Dimension::Time, 1e-9),
    ("W", Dimension::Power, 1.0),
    ("kW", Dimension::Power, 1e3),
];

/// Why a value is refused.
#[derive(Debug, PartialEq)]
pub(crate) enum Refusal {
    /// The value is not what these words describe.
    Expected(String),
    /// The value has a unit of another dimension.
    Dimension { found: &'static str, expected: &'static str },
}

/// The most characters of a number that are read.
const LONGEST: usize = 64;

impl Measure {
    /// Returns a value in operations, bytes, seconds, watts, or one of the first two per second.
    ///
    /// # Errors
    /// When it is not a number with a unit of the dimension, or not plausible.
    pub(crate) fn read(self, value: &Value) -> Result<f64, Refusal> {
        let unreadable = || Refusal::Expected(self.dimension.expected());
        let number = match value.as_text() {
            Some(text) => self.with_unit(text)?,
            None => self.in_base_units(value.as_number().ok_or_else(unreadable)?),
        };
        if self.dimension == Dimension::Count && number.fract() != 0.0 {
            return Err(unreadable());
        }
        let (least, most) = (self.least * self.unit, self.most * self.unit);
        // The product with the unit may be off by one bit at both ends.
        let slack = 1.0 + 1e-12;
        let is_plausible = (least / slack..=most * slack).contains(&number);
        is_plausible
            .then_some(number)
            .ok_or_else(|| Refusal::Expected(format!("a number from {} to {}", self.least, self.most)))
    }

    /// Returns a plain number in operations, bytes, seconds and watts. Small units divide, because 5 / 10^6 is
    /// the number nearest to 5 us and 5 * 10^-6 is not.
    fn in_base_units(self, number: f64) -> f64 {
        if self.unit < 1.0 { number / (1.0 / self.unit).round() } else { number * self.unit }
    }

    fn with_unit(self, text: &str) -> Result<f64, Refusal> {
        let unreadable = || Refusal::Expected(self.dimension.expected());
        if matches!(self.dimension, Dimension::Count | Dimension::Share) {
            return Err(unreadable());
        }
        let trimmed = text.trim();
        // The longest number, because an exponent has a letter: `1e3 GB`.
        let ends = trimmed.char_indices().map(|(start, letter)| start + letter.len_utf8()).take(LONGEST);
        let split = |end: usize| {
            let (number, unit) = trimmed.split_at(end);
            Some((number.trim_end().parse::<f64>().ok()?, unit.trim()))
        };
        let (number, unit) =
            ends.collect::<Vec<_>>().into_iter().rev().find_map(split).ok_or_else(unreadable)?;
        let &(_, found, factor) = UNITS.iter().find(|(name, ..)| *name == unit).ok_or_else(unreadable)?;
        if found != self.dimension {
            return Err(Refusal::Dimension { found: found.noun(), expected: self.dimension.noun() });
        }
        Ok(number * factor)
    }

    /// Returns a value as a plain number of the key, with at most 12 digits.
    pub fn plain(self, value: f64) -> f64 {
        let plain = value / self.unit;
        format!("{plain:.11e}").parse().unwrap_or(plain)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::place::Place;

    fn check(text: &str, dimension: Dimension) -> Result<f64, Refusal> {
        let measure = Measure { key: "key", dimension, unit: 1.0, least: 1.0, most: 1e18 };
        let quoted = format!("'{text}'");
        let value = Value::of_argument("key", &quoted, &Place::Default, &mut Vec::new()).expect("a text");
        measure.read(&value)
    }

    #[test]
    fn text_has_a_unit_of_the_dimension() {
        assert_eq!(check("80 GB", Dimension::Size), Ok(80e9));
        assert_eq!(check("1e3 GB", Dimension::Size), Ok(1e12));
        assert_eq!(check("1.5E+1GB", Dimension::Size), Ok(15e9));
        assert_eq!(check("80GiB", Dimension::Size), Ok(80.0 * GIB));
        assert_eq!(check("400 Gbit/s", Dimension::Bandwidth), Ok(50e9));
        assert_eq!(check("0.989 PFLOP/s", Dimension::Rate), Ok(989e12));
        assert_eq!(check("10.2 kW", Dimension::Power), Ok(10_200.0));
    }

    #[test]
    fn a_unit_of_another_dimension_is_refused() {
        let Err(Refusal::Dimension { found, .. }) = check("80 GB/s", Dimension::Size) else {
            panic!("a bandwidth")
        };
        assert!(found.starts_with("bytes per second"), "{found}");
        let expected = Refusal::Expected("a whole number, such as 8".to_owned());
        assert_eq!(check("8 GB", Dimension::Count), Err(expected));
    }

    #[test]
    fn unknown_units_and_bad_numbers_are_refused() {
        for text in ["80", "80 GBs", "eighty GB", "-1 GB", "0 GB", "inf GB", "1e30 GB", ""] {
            assert!(check(text, Dimension::Size).is_err(), "{text}");
        }
    }

    #[test]
    fn plain_numbers_have_no_rounding_errors() {
        let time = Measure { key: "t", dimension: Dimension::Time, unit: 1e-6, least: 0.0, most: 1.0 };
        assert_eq!(time.plain(5e-6).to_string(), "5");
        let rate = Measure { key: "r", dimension: Dimension::Rate, unit: 1e12, least: 0.0, most: 1.0 };
        assert_eq!(rate.plain(1307.4 * 1e12).to_string(), "1307.4");
    }
}
