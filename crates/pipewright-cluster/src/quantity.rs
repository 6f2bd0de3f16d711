//! Numbers of data sheets with their units.
//!
//! A key of a cluster file names its unit, such as `memory_gb`. Its value is a number in this unit, or text
//! with a unit of the same dimension, such as `"80 GiB"`. A unit of another dimension is an error.
//!
//! A plain number of `memory_gb` counts gigabytes as they are sold, of 2^30 bytes: 80 is 80 GiB. In text, a
//! GB is 10^9 bytes: `"80 GB"` is 7% less than 80.

use serde::Deserialize;
use thiserror::Error;

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
}

impl Dimension {
    fn noun(self) -> &'static str {
        match self {
            Self::Rate => "operations per second, such as `989 TFLOP/s`",
            Self::Size => "bytes, such as `80 GB`",
            Self::Bandwidth => "bytes per second, such as `50 GB/s` or `400 Gbit/s`",
            Self::Time => "seconds, such as `5 us`",
            Self::Power => "watts, such as `700 W`",
        }
    }
}

/// A number in the unit of its key, or text with a unit.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(untagged)]
pub(crate) enum Quantity {
    /// A number in the unit of the key.
    Number(f64),
    /// A number with its unit.
    Text(String),
}

/// The errors of quantities.
#[derive(Clone, PartialEq, Eq, Error)]
pub enum QuantityError {
    /// The unit is unknown, or there is no number.
    #[error("`{key}` is `{text}`; write a number, or a number and a unit of {}", .dimension.noun())]
    Unreadable {
        /// The key.
        key: &'static str,
        /// The value.
        text: String,
        /// The dimension of the key.
        dimension: Dimension,
    },
    /// The unit measures something else.
    #[error("`{key}` is `{text}`, which measures {}; it must measure {}", .found.noun(), .dimension.noun())]
    WrongDimension {
        /// The key.
        key: &'static str,
        /// The value.
        text: String,
        /// The dimension of the value.
        found: Dimension,
        /// The dimension of the key.
        dimension: Dimension,
    },
    /// The number is not positive and finite.
    #[error("`{key}` is {value}; use a number above 0")]
    OutOfRange {
        /// The key.
        key: &'static str,
        /// The value, as it is written.
        value: String,
    },
}

pipewright_schedule::message_as_debug!(QuantityError);

/// The units, their dimension and their factor in operations, bytes and seconds.
const UNITS: &[(&str, Dimension, f64)] = &[
    ("TFLOP/s", Dimension::Rate, 1e12),
    ("PFLOP/s", Dimension::Rate, 1e15),
    ("GFLOP/s", Dimension::Rate, 1e9),
    ("GB", Dimension::Size, 1e9),
    ("GiB", Dimension::Size, 1_073_741_824.0),
    ("TB", Dimension::Size, 1e12),
    ("MB", Dimension::Size, 1e6),
    ("GB/s", Dimension::Bandwidth, 1e9),
    ("TB/s", Dimension::Bandwidth, 1e12),
    ("MB/s", Dimension::Bandwidth, 1e6),
    ("Gbit/s", Dimension::Bandwidth, 1.25e8),
    ("s", Dimension::Time, 1.0),
    ("ms", Dimension::Time, 1e-3),
    ("us", Dimension::Time, 1e-6),
    ("W", Dimension::Power, 1.0),
    ("kW", Dimension::Power, 1e3),
];

impl Quantity {
    /// Returns the value in operations, bytes, seconds, watts, or one of the first two per second. `unit` is the
    /// factor of a plain number.
    ///
    /// # Errors
    /// When the text is not a number with a unit of `dimension`, or the number is not above 0.
    pub(crate) fn value(
        &self,
        key: &'static str,
        dimension: Dimension,
        unit: f64,
    ) -> Result<f64, QuantityError> {
        let value = match self {
            Self::Number(number) => number * unit,
            Self::Text(text) => parse(key, dimension, text)?,
        };
        if value.is_finite() && value > 0.0 {
            Ok(value)
        } else {
            Err(QuantityError::OutOfRange { key, value: self.written() })
        }
    }

    /// Returns the number as a file has it, without the factor of its unit.
    fn written(&self) -> String {
        match self {
            Self::Number(number) => number.to_string(),
            Self::Text(text) => text.chars().take(64).collect(),
        }
    }
}

fn parse(key: &'static str, dimension: Dimension, text: &str) -> Result<f64, QuantityError> {
    let unreadable = || QuantityError::Unreadable { key, text: text.chars().take(64).collect(), dimension };
    let (number, unit) = text.trim().split_once(' ').ok_or_else(unreadable)?;
    let number: f64 = number.parse().map_err(|_not_a_number| unreadable())?;
    let &(_, found, factor) = UNITS.iter().find(|(name, ..)| *name == unit.trim()).ok_or_else(unreadable)?;
    if found != dimension {
        return Err(QuantityError::WrongDimension { key, text: text.into(), found, dimension });
    }
    Ok(number * factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, dimension: Dimension) -> Result<f64, String> {
        let value = Quantity::Text(text.into()).value("key", dimension, 1.0);
        value.map_err(|error| error.to_string())
    }

    #[test]
    fn text_has_a_unit_of_the_dimension() {
        assert_eq!(check("80 GB", Dimension::Size), Ok(80e9));
        assert_eq!(check("400 Gbit/s", Dimension::Bandwidth), Ok(50e9));
        assert_eq!(check("0.989 PFLOP/s", Dimension::Rate), Ok(989e12));
    }

    #[test]
    fn a_size_is_not_a_bandwidth() {
        let error = check("80 GB/s", Dimension::Size).unwrap_err();
        assert!(error.starts_with("`key` is `80 GB/s`, which measures bytes per second"), "{error}");
    }

    #[test]
    fn unknown_units_and_bad_numbers_are_refused() {
        for text in ["80", "80 GBs", "eighty GB", "-1 GB", "0 GB", "inf GB"] {
            assert!(check(text, Dimension::Size).is_err(), "{text}");
        }
    }
}
