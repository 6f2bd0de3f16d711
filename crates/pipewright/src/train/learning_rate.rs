//! The learning rate over time: a linear warm-up, then constant, or a linear or cosine decay towards 0, which
//! the step after the last one would have, as in PyTorch and transformers. So the last step still learns.
//!
//! The rate is a pure function of the step, so a resumed run needs no state for it.
//!
//! ```
//! use pipewright::train::{Decay, LearningRate};
//!
//! let rate = LearningRate { peak: 0.4, decay: Decay::Linear, warmup_steps: 2, steps: 6 };
//! let rates: Vec<f64> = (0..7).map(|step| rate.at(step)).collect();
//! assert_eq!(rates, [0.2, 0.4, 0.4, 0.30000000000000004, 0.2, 0.1, 0.0]);
//! ```

use serde::{Deserialize, Serialize};

/// The fall of the learning rate after the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Decay {
    /// The rate stays constant.
    #[default]
    Constant,
    /// Half a cosine from the peak to 0.
    Cosine,
    /// A line from the peak to 0.
    Linear,
}

/// A learning rate for every step of a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LearningRate {
    /// The highest rate.
    pub peak: f64,
    /// How the rate falls after the warm-up.
    pub decay: Decay,
    /// Steps over which the rate rises; 0 starts at the peak.
    pub warmup_steps: u64,
    /// Steps of the whole run, warm-up included. The decay would reach 0 at this step.
    pub steps: u64,
}

impl LearningRate {
    /// Returns the rate of step `step`, counted from 0.
    ///
    /// With `w` warm-up steps of `n`, step `s < w` has `peak * (s + 1) / w`, so that no step is wasted on a
    /// rate of 0. From `s = w` the rate is `peak * f((s - w) / (n - w))` with `f(x) = 1`, `1 - x` or
    /// `(1 + cos(pi x)) / 2`; so the last step, `n - 1`, still learns. From step `n` on, `x` stays 1.
    pub fn at(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return self.peak * ((step + 1) as f64 / self.warmup_steps as f64);
        }
        let past = (step - self.warmup_steps) as f64;
        let span = self.steps.saturating_sub(self.warmup_steps) as f64;
        let progress = if past < span { past / span } else { 1.0 };
        match self.decay {
            Decay::Constant => self.peak,
            Decay::Linear => self.peak * (1.0 - progress),
            Decay::Cosine => self.peak * 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(decay: Decay, warmup_steps: u64, steps: u64, expected: &[f64]) {
        let rate = LearningRate { peak: 1.0, decay, warmup_steps, steps };
        for (step, expected) in (0..).zip(expected) {
            let found = rate.at(step);
            assert!((found - expected).abs() < 1e-12, "{rate:?} at {step}: {found}, not {expected}");
        }
    }

    #[test]
    fn constant() {
        check(Decay::Constant, 0, 2, &[1.0, 1.0, 1.0]);
        check(Decay::Constant, 4, 5, &[0.25, 0.5, 0.75, 1.0, 1.0, 1.0]);
    }

    #[test]
    fn cosine() {
        check(Decay::Cosine, 0, 2, &[1.0, 0.5, 0.0, 0.0]);
        check(Decay::Cosine, 1, 4, &[1.0, 1.0, 0.75, 0.25, 0.0]);
    }

    #[test]
    fn linear() {
        check(Decay::Linear, 2, 6, &[0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]);
    }

    #[test]
    fn a_run_shorter_than_its_warmup() {
        check(Decay::Cosine, 4, 2, &[0.25, 0.5, 0.75, 1.0, 0.0]);
    }

    #[test]
    fn the_largest_numbers() {
        check(Decay::Linear, u64::MAX, u64::MAX, &[1.0 / u64::MAX as f64]);
        assert_eq!(
            LearningRate { peak: 1.0, decay: Decay::Cosine, warmup_steps: 0, steps: 0 }.at(u64::MAX),
            0.0
        );
    }
}
