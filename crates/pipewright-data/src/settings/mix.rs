//! The sources of a mixture, with their weights.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::DataError;

/// A source of a mixture.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MixSource {
    /// Files, as [`DataConfig::path`](crate::DataConfig::path) takes them.
    pub path: Vec<String>,
    /// The weight of the source. Its share of the rows is its part in the sum of all weights.
    pub weight: MixWeight,
}

impl MixSource {
    /// Returns the patterns in one line, which names the source.
    pub(crate) fn name(&self) -> String {
        self.path.join(", ")
    }
}

/// The weight of a source: a finite number above 0.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct MixWeight(f64);

// It is never NaN.
impl Eq for MixWeight {}

impl TryFrom<f64> for MixWeight {
    type Error = DataError;

    fn try_from(weight: f64) -> Result<Self, DataError> {
        if weight.is_finite() && weight > 0.0 {
            return Ok(Self(weight));
        }
        let problem =
            format!("the weight of a source is {weight:?}, where a finite number above 0 is expected");
        Err(DataError::new(problem))
    }
}

impl From<MixWeight> for f64 {
    fn from(MixWeight(weight): MixWeight) -> Self {
        weight
    }
}

impl fmt::Display for MixWeight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_weight_is_finite_and_above_0() {
        for weight in [f64::MIN_POSITIVE, 1.0, f64::MAX] {
            assert_eq!(MixWeight::try_from(weight).map(f64::from).ok(), Some(weight));
        }
        for weight in [0.0, -0.0, -1.0, f64::INFINITY, f64::NAN] {
            let error = MixWeight::try_from(weight).expect_err("not a weight").to_string();
            assert!(error.ends_with("where a finite number above 0 is expected"), "{error}");
        }
        assert!(serde_json::from_str::<MixWeight>("0.0").is_err());
    }
}
