//! The median of several measurements, and how far they are apart.

use serde::{Deserialize, Serialize};

/// The median of several measurements, with their quartiles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Quartiles {
    /// A quarter of the measurements is below it.
    pub low: f64,
    /// The median.
    pub median: f64,
    /// A quarter of the measurements is above it.
    pub high: f64,
    /// The number of measurements.
    pub count: usize,
}

impl Quartiles {
    /// Returns the quartiles of some measurements; `None` if there is none.
    pub fn of(mut values: Vec<f64>) -> Option<Self> {
        values.sort_by(f64::total_cmp);
        let count = values.len();
        let at = |quarters: usize| values.get((count * quarters / 4).min(count.checked_sub(1)?)).copied();
        Some(Self { low: at(1)?, median: at(2)?, high: at(3)?, count })
    }

    /// Returns half the distance of the quartiles, as a share of the median.
    pub fn relative(&self) -> f64 {
        if self.median > 0.0 { (self.high - self.low) / 2.0 / self.median } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quartiles_are_about_the_median() {
        let quartiles = Quartiles::of(vec![5.0, 1.0, 3.0, 2.0, 4.0]).expect("five values");
        assert_eq!(quartiles, Quartiles { low: 2.0, median: 3.0, high: 4.0, count: 5 });
        assert_eq!(quartiles.relative(), 1.0 / 3.0);
        assert_eq!(Quartiles::of(Vec::new()), None);
    }
}
