//! Minimum, median and maximum of a few measurements, and where the true median is.

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

    /// Returns two of the measurements. With a probability of at least 95%, the true median is between them.
    /// Returns `None` for fewer than six measurements: it may be outside all of them with more than 5%.
    pub(crate) fn interval(&self) -> Option<[f64; 2]> {
        let n = self.0.len();
        let low = index_of_bound(n);
        (n >= 6).then(|| [self.0[low], self.0[n - 1 - low]])
    }
}

/// Returns the greatest index below the middle of `n` sorted measurements whose measurement is above the true
/// median with a probability of at most 2.5%. That is the probability that at most `index` of them are below
/// the median.
fn index_of_bound(n: usize) -> usize {
    // A logarithm, because the first terms of a binomial distribution with many measurements are rounded to
    // 0.
    let mut term = n as f64 * 0.5_f64.ln();
    let (mut sum, mut index) = (term.exp(), 0);
    while 2 * (index + 1) < n {
        term += ((n - index) as f64 / (index + 1) as f64).ln();
        sum += term.exp();
        if sum > 0.025 {
            break;
        }
        index += 1;
    }
    index
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The indexes of published tables for the confidence interval of a median, from 0.
    #[test]
    fn the_true_median_is_between_two_measurements() {
        let indexes = [(0, 0), (1, 0), (5, 0), (6, 0), (8, 0), (9, 1), (12, 2), (20, 5), (40, 13), (60, 21)];
        // One half to the power of 2000 is rounded to 0.
        for (n, expected) in indexes.into_iter().chain([(2000, 955)]) {
            assert_eq!(index_of_bound(n), expected, "{n} measurements");
        }
        let spread = Spread::new((0..20).rev().map(f64::from).collect());
        assert_eq!(spread.interval(), Some([5.0, 14.0]));
        assert_eq!(Spread::new(vec![1.0; 6]).interval(), Some([1.0; 2]));
        assert_eq!(Spread::new(vec![1.0; 5]).interval(), None);
    }
}
