//! The scaling of the rotary frequencies for longer sequences.

use std::f64::consts::TAU;

/// The scaling of rotary positions: `rope_type` of `config.json`. The formulas are those of transformers'
/// `modeling_rope_utils.py`.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// `linear`: every frequency is divided by the factor (Chen et al., 2023,
    /// <https://arxiv.org/abs/2306.15595>).
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// `dynamic`: sequences longer than `max_position_embeddings` have a larger base, which depends on their
    /// length.
    Dynamic {
        /// How much the base grows.
        factor: f64,
    },
    /// `yarn`.
    Yarn(YarnScaling),
    /// `longrope`.
    LongRope(LongRopeScaling),
    /// `llama3`.
    Llama3(Llama3Scaling),
}

impl RopeScaling {
    /// Returns the name of the type.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Linear { .. } => "linear",
            Self::Dynamic { .. } => "dynamic",
            Self::Yarn(_) => "yarn",
            Self::LongRope(_) => "longrope",
            Self::Llama3(_) => "llama3",
        }
    }

    /// Returns whether the positions depend on the length of the sequence.
    pub fn depends_on_length(&self) -> bool {
        matches!(self, Self::Dynamic { .. } | Self::LongRope(_))
    }
}

/// The scaling of Llama 3.1 and later, `rope_type = "llama3"`. Frequencies with many periods in the original
/// length stay, frequencies with few periods are divided by the factor, and the frequencies between them are
/// a mixture of both.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Llama3Scaling {
    /// The divisor of low frequencies.
    pub factor: f64,
    /// Frequencies with fewer periods than this in the original length are divided.
    pub low_freq_factor: f64,
    /// Frequencies with more periods than this in the original length stay.
    pub high_freq_factor: f64,
    /// The length of the sequences before the scaling.
    pub original_max_position_embeddings: usize,
}

/// YaRN, `rope_type = "yarn"` (Peng et al., 2023, <https://arxiv.org/abs/2309.00071>). Pairs of elements with
/// many periods in the original length keep their frequencies, pairs with few periods have them divided by
/// the factor, and between them is a ramp.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct YarnScaling {
    /// The divisor of low frequencies.
    pub factor: f64,
    /// The factor of rotated elements; see [`YarnScaling::attention_factor`].
    pub attention_factor: Option<f64>,
    /// The number of periods at which the ramp begins.
    pub beta_fast: f64,
    /// The number of periods at which the ramp ends.
    pub beta_slow: f64,
    /// The numbers from which the factor of rotated elements follows in DeepSeek's models.
    pub mscale: Option<f64>,
    /// See [`YarnScaling::mscale`].
    pub mscale_all_dim: Option<f64>,
    /// Whether the ends of the ramp are whole numbers of pairs.
    pub truncate: bool,
    /// The length of the sequences before the scaling.
    pub original_max_position_embeddings: usize,
}

/// LongRoPE, `rope_type = "longrope"` (Ding et al., 2024, <https://arxiv.org/abs/2402.13753>): each frequency
/// has a divisor of its own, which depends on whether the sequence is longer than the original length.
#[derive(Debug, Clone, PartialEq)]
pub struct LongRopeScaling {
    /// The divisors for sequences up to the original length, one for each frequency.
    pub short_factor: Vec<f64>,
    /// The divisors for longer sequences.
    pub long_factor: Vec<f64>,
    /// The ratio of both lengths; `max_position_embeddings` divided by the original length when absent.
    pub factor: Option<f64>,
    /// The factor of rotated elements. It follows from the ratio when absent.
    pub attention_factor: Option<f64>,
    /// The length of the sequences before the scaling.
    pub original_max_position_embeddings: usize,
}

impl Llama3Scaling {
    /// Returns the frequency that replaces `frequency`.
    pub fn apply(&self, frequency: f64) -> f64 {
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
}

impl YarnScaling {
    /// Returns the frequencies that replace `frequencies`, whose base is `theta`.
    pub fn apply(&self, frequencies: &[f32], theta: f64) -> Vec<f32> {
        let width = 2.0 * frequencies.len() as f64;
        // The pair that turns so often in the original length.
        let pair = |periods: f64| {
            let length = self.original_max_position_embeddings as f64;
            width * libm::log(length / (periods * TAU)) / (2.0 * libm::log(theta))
        };
        let (mut first, mut last) = (pair(self.beta_fast), pair(self.beta_slow));
        if self.truncate {
            (first, last) = (first.floor(), last.ceil());
        }
        let (first, mut last) = (first.max(0.0), last.min(width - 1.0));
        if first == last {
            last += 0.001;
        }
        let scale = |(index, &frequency): (usize, &f32)| {
            let share = ((index as f64 - first) / (last - first)).clamp(0.0, 1.0);
            let frequency = f64::from(frequency);
            (share * frequency / self.factor + (1.0 - share) * frequency) as f32
        };
        frequencies.iter().enumerate().map(scale).collect()
    }

    /// Returns the factor of rotated elements: the one that is given, or `0.1 m ln(factor) + 1`, where `m` is
    /// 1, or the ratio of these numbers for `mscale` and `mscale_all_dim`.
    pub fn attention_factor(&self) -> f64 {
        self.attention_factor.unwrap_or_else(|| match (self.mscale, self.mscale_all_dim) {
            (Some(own), Some(all)) if own != 0.0 && all != 0.0 => self.factor_of(own) / self.factor_of(all),
            _ => self.factor_of(1.0),
        })
    }

    /// Returns the factor of the scores in DeepSeek's models: the square of `0.1 m ln(factor) + 1`, where `m`
    /// is `mscale_all_dim`; 1 without that number.
    pub fn score_factor(&self) -> f64 {
        let root = self.mscale_all_dim.map_or(1.0, |all| self.factor_of(all));
        root * root
    }

    fn factor_of(&self, m: f64) -> f64 {
        if self.factor <= 1.0 { 1.0 } else { 0.1 * m * libm::log(self.factor) + 1.0 }
    }
}

impl LongRopeScaling {
    /// Returns the divisors for a sequence of a length.
    pub fn divisors(&self, sequence: usize) -> &[f64] {
        let is_long = sequence > self.original_max_position_embeddings;
        if is_long { &self.long_factor } else { &self.short_factor }
    }

    /// Returns the factor of rotated elements of a model for sequences of up to `longest` tokens.
    pub fn attention_factor(&self, longest: Option<usize>) -> f64 {
        let original = self.original_max_position_embeddings as f64;
        let ratio = self.factor.unwrap_or_else(|| longest.map_or(1.0, |longest| longest as f64 / original));
        let usual = || if ratio <= 1.0 { 1.0 } else { (1.0 + libm::log(ratio) / libm::log(original)).sqrt() };
        self.attention_factor.unwrap_or_else(usual)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_three_ranges_of_frequencies() {
        let scaling = Llama3Scaling {
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
