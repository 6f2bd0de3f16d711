//! The scaling of the rotary frequencies for longer sequences.

use std::f64::consts::TAU;

use crate::error::ConfigError;
use crate::key_check::{above_zero, require};

/// The scaling of Llama 3.1 and later, `rope_type = "llama3"`. Frequencies with many periods in the original
/// length stay, frequencies with few periods are divided by the factor, and the frequencies between them are
/// a mixture of both.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeScaling {
    /// The divisor of low frequencies.
    pub factor: f64,
    /// Frequencies with fewer periods than this in the original length are divided.
    pub low_freq_factor: f64,
    /// Frequencies with more periods than this in the original length stay.
    pub high_freq_factor: f64,
    /// The length of the sequences before the scaling.
    pub original_max_position_embeddings: usize,
}

impl RopeScaling {
    /// Returns the frequency that replaces `frequency`.
    pub(super) fn apply(&self, frequency: f64) -> f64 {
        let periods = self.original_max_position_embeddings as f64 * frequency / TAU;
        if periods > self.high_freq_factor {
            return frequency;
        }
        if periods < self.low_freq_factor {
            return frequency / self.factor;
        }
        let share = (periods - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor);
        (1.0 - share) * frequency / self.factor + share * frequency
    }

    /// Checks that the numbers define a scaling. `key` is the key of `config.json` that holds them.
    pub(super) fn validate(&self, key: &RopeKeys) -> Result<(), ConfigError> {
        let (low, high) = (self.low_freq_factor, self.high_freq_factor);
        above_zero(&[(key.factor, self.factor), (key.low, low)])?;
        require(high.is_finite() && high > low, key.high, high, "above `low_freq_factor`")?;
        let length = self.original_max_position_embeddings;
        require(length > 0, key.length, length, "at least 1")
    }
}

/// The full names of the keys of a scaling, which two places of `config.json` may hold.
#[derive(Debug)]
pub(super) struct RopeKeys {
    pub(super) table: &'static str,
    pub(super) rope_type: &'static str,
    pub(super) theta: &'static str,
    pub(super) factor: &'static str,
    pub(super) low: &'static str,
    pub(super) high: &'static str,
    pub(super) length: &'static str,
    pub(super) rotated: &'static str,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_three_ranges_of_frequencies() {
        let scaling = RopeScaling {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 32,
        };
        let frequency = |periods: f64| periods * TAU / 32.0;
        let check = |periods: f64, factor: f64| {
            let (found, expected) = (scaling.apply(frequency(periods)), frequency(periods) * factor);
            assert!((found - expected).abs() < 1e-12, "{periods}: {found} {expected}");
        };
        check(5.0, 1.0);
        check(4.0, 1.0);
        check(1.0, 0.125);
        check(0.01, 0.125);
        // A third of the way from 1 to 4.
        check(2.0, 2.0 / 3.0 / 8.0 + 1.0 / 3.0);
    }
}
