//! Minimum, median and maximum of a few measurements.

use std::fmt;

/// A few measurements, sorted.
pub(crate) struct Spread(Vec<f64>);

impl Spread {
    pub(crate) fn new(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        Self(values)
    }

    pub(crate) fn median(&self) -> f64 {
        self.0.get(self.0.len() / 2).copied().unwrap_or(f64::NAN)
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (first, last) = (self.0.first().unwrap_or(&f64::NAN), self.0.last().unwrap_or(&f64::NAN));
        let digits = f.precision().unwrap_or(3);
        write!(
            f,
            "{:.digits$} (min {first:.digits$}, max {last:.digits$}, n {})",
            self.median(),
            self.0.len()
        )
    }
}
