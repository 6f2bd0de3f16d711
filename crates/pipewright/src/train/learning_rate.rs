//! The learning rate over time: a linear warm-up, then a constant rate or one that falls. A decay reaches its lowest
//! rate at the step after the last one, as in PyTorch and transformers, so the last step still learns.
//!
//! The rate is a pure function of the step, so a resumed run needs no state for it.
//!
//! ```
//! use pipewright::train::{Decay, LearningRate};
//!
//! let rate = LearningRate { decay: Decay::Linear, warmup_steps: 2, steps: 6, ..LearningRate::constant(0.4) };
//! let rates: Vec<f64> = (0..7).map(|step| rate.at(step)).collect();
//! assert_eq!(rates, [0.2, 0.4, 0.4, 0.30000000000000004, 0.2, 0.1, 0.0]);
//! ```

use serde::{Deserialize, Serialize};

/// The time scale of [`Decay::InverseSqrt`] without a warm-up, as in transformers.
const INVERSE_SQRT_STEPS: u64 = 10_000;

/// The decay of WSD takes the number of steps, divided by this, unless its steps are given.
const DEFAULT_DECAY: u64 = 10;

/// The fall of the learning rate after the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decay {
    /// The rate stays constant.
    #[default]
    Constant,
    /// Half a cosine from the peak to the lowest rate.
    Cosine,
    /// A line from the peak to the lowest rate.
    Linear,
    /// The peak, and a line to the lowest rate over the last steps ("warm-up, stable, decay").
    Wsd,
    /// The inverse square root of the step. It does not depend on the length of the run.
    InverseSqrt,
}

impl Decay {
    /// All decays.
    pub const ALL: [Self; 5] = [Self::Constant, Self::Cosine, Self::Linear, Self::Wsd, Self::InverseSqrt];

    /// Returns the name, such as `inverse_sqrt`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Constant => "constant",
            Self::Cosine => "cosine",
            Self::Linear => "linear",
            Self::Wsd => "wsd",
            Self::InverseSqrt => "inverse_sqrt",
        }
    }

    /// Returns whether the rate falls to the lowest rate at the end of the run.
    pub fn has_lowest(self) -> bool {
        match self {
            Self::Cosine | Self::Linear | Self::Wsd => true,
            Self::Constant | Self::InverseSqrt => false,
        }
    }
}

/// A learning rate for every step of a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LearningRate {
    /// The highest rate.
    pub peak: f64,
    /// The rate to which cosine, linear and WSD fall.
    pub lowest: f64,
    /// How the rate falls after the warm-up.
    pub decay: Decay,
    /// Steps over which the rate rises; 0 starts at the peak.
    pub warmup_steps: u64,
    /// WSD: the steps over which the rate falls at the end; `None` for a tenth of the steps, which are counted from
    /// the restart if there is one.
    pub decay_steps: Option<u64>,
    /// The step at which the warm-up and the decay begin again; 0 for none. The steps before it have the rates of
    /// a run that ends there.
    pub restart_at: u64,
    /// Steps of the whole run, warm-up included. The decay would reach its lowest rate at this step.
    pub steps: u64,
}

impl LearningRate {
    /// Returns a rate that stays at `peak`, without a warm-up.
    pub fn constant(peak: f64) -> Self {
        let (decay, steps) = (Decay::Constant, u64::MAX);
        Self { peak, lowest: 0.0, decay, warmup_steps: 0, decay_steps: None, restart_at: 0, steps }
    }

    /// Returns the rate of step `step`, counted from 0.
    ///
    /// With `w` warm-up steps of `n`, step `s < w` has `peak * (s + 1) / w`, so that no step is wasted on a
    /// rate of 0. From `s = w` on, the rate is `lowest + (peak - lowest) * f(x)`. For `x = (s - w) / (n - w)`, `f(x)`
    /// is `1 - x` or `(1 + cos(pi x)) / 2`; so the last step, `n - 1`, still learns. WSD has `f(x) = 1 - x` for
    /// `x = (s - (n - d)) / d` with `d` decay steps, and the peak before. From step `n` on, `x` stays 1.
    /// The inverse square root is `peak * sqrt(t / (s - w + t))`, where `t` is `w`, or 10,000 without a warm-up.
    pub fn at(&self, step: u64) -> f64 {
        let (step, steps) = match step.checked_sub(self.restart_at) {
            Some(since) => (since, self.steps.saturating_sub(self.restart_at)),
            None => (step, self.restart_at),
        };
        if step < self.warmup_steps {
            return self.peak * ((step + 1) as f64 / self.warmup_steps as f64);
        }
        let falls_from = match self.decay {
            Decay::Wsd => {
                let decay_steps = self.decay_steps.unwrap_or_else(|| steps.div_ceil(DEFAULT_DECAY));
                steps.saturating_sub(decay_steps).max(self.warmup_steps)
            }
            _ => self.warmup_steps,
        };
        let past = step.saturating_sub(falls_from) as f64;
        let span = steps.saturating_sub(falls_from).max(1) as f64;
        let progress = if step < steps { past / span } else { 1.0 };
        let share = match self.decay {
            Decay::Constant => return self.peak,
            Decay::Linear | Decay::Wsd => 1.0 - progress,
            Decay::Cosine => 0.5 * (1.0 + libm::cos(std::f64::consts::PI * progress)),
            Decay::InverseSqrt => return self.peak * self.inverse_sqrt(past),
        };
        self.lowest + (self.peak - self.lowest) * share
    }

    /// Returns the share of the peak `past` steps after the warm-up.
    fn inverse_sqrt(&self, past: f64) -> f64 {
        let scale = if self.warmup_steps == 0 { INVERSE_SQRT_STEPS } else { self.warmup_steps } as f64;
        (scale / (past + scale)).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(decay: Decay, warmup_steps: u64, steps: u64) -> LearningRate {
        LearningRate { decay, warmup_steps, steps, ..LearningRate::constant(1.0) }
    }

    #[track_caller]
    fn check(rate: LearningRate, expected: &[f64]) {
        for (step, expected) in (0..).zip(expected) {
            let found = rate.at(step);
            assert!((found - expected).abs() < 1e-12, "{rate:?} at {step}: {found}, not {expected}");
        }
    }

    #[test]
    fn constant() {
        check(rate(Decay::Constant, 0, 2), &[1.0, 1.0, 1.0]);
        check(rate(Decay::Constant, 4, 5), &[0.25, 0.5, 0.75, 1.0, 1.0, 1.0]);
        check(LearningRate::constant(0.5), &[0.5; 4]);
    }

    #[test]
    fn cosine() {
        check(rate(Decay::Cosine, 0, 2), &[1.0, 0.5, 0.0, 0.0]);
        check(rate(Decay::Cosine, 1, 4), &[1.0, 1.0, 0.75, 0.25, 0.0]);
        let lowest = LearningRate { lowest: 0.2, ..rate(Decay::Cosine, 1, 4) };
        check(lowest, &[1.0, 1.0, 0.8, 0.4, 0.2, 0.2]);
    }

    #[test]
    fn linear() {
        check(rate(Decay::Linear, 2, 6), &[0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]);
        let lowest = LearningRate { lowest: 0.5, ..rate(Decay::Linear, 0, 2) };
        check(lowest, &[1.0, 0.75, 0.5, 0.5]);
    }

    /// Transformers' `get_wsd_schedule` with a linear decay has the same rates after the warm-up.
    #[test]
    fn wsd() {
        let wsd = |decay_steps, lowest| {
            let decay_steps = Some(decay_steps);
            LearningRate { decay_steps, lowest, ..rate(Decay::Wsd, 2, 8) }
        };
        check(wsd(4, 0.0), &[0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]);
        check(wsd(2, 0.1), &[0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.55, 0.1, 0.1]);
        // More steps of decay than follow the warm-up.
        check(wsd(100, 0.0), &[0.5, 1.0, 1.0, 5.0 / 6.0, 4.0 / 6.0]);
        // Without steps of decay, the rate falls after the run.
        check(wsd(0, 0.0), &[0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0]);
        // A tenth of 18 steps, and of the 8 steps after a restart.
        let default = LearningRate { restart_at: 18, ..rate(Decay::Wsd, 0, 26) };
        let rates = [15, 16, 17, 18, 24, 25, 26].map(|step| default.at(step));
        assert_eq!(rates, [1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 0.0]);
    }

    /// Transformers' `get_inverse_sqrt_schedule` has the same rates after the warm-up.
    #[test]
    fn inverse_sqrt() {
        check(
            rate(Decay::InverseSqrt, 2, 4),
            &[0.5, 1.0, 1.0, 0.816_496_580_927_726, std::f64::consts::FRAC_1_SQRT_2, 0.632_455_532_033_676],
        );
        let long = rate(Decay::InverseSqrt, 0, 4);
        assert!((long.at(30_000) - 0.5).abs() < 1e-12, "{}", long.at(30_000));
    }

    #[test]
    fn a_restart_begins_the_warmup_and_the_decay_again() {
        let restarted = LearningRate { restart_at: 3, ..rate(Decay::Linear, 1, 6) };
        check(restarted, &[1.0, 1.0, 0.5, 1.0, 1.0, 0.5, 0.0]);
        // The steps before it have the rates of a run that ends there.
        let first = rate(Decay::Linear, 1, 3);
        assert!((0..3).all(|step| first.at(step) == restarted.at(step)));
    }

    #[test]
    fn a_run_shorter_than_its_warmup() {
        check(rate(Decay::Cosine, 4, 2), &[0.25, 0.5, 0.75, 1.0, 0.0]);
    }

    #[test]
    fn the_largest_numbers() {
        check(rate(Decay::Linear, u64::MAX, u64::MAX), &[1.0 / u64::MAX as f64]);
        for decay in Decay::ALL {
            let most =
                LearningRate { decay_steps: Some(u64::MAX), restart_at: u64::MAX, ..rate(decay, 0, 0) };
            for step in [0, 1, u64::MAX - 1, u64::MAX] {
                assert!((0.0..=1.0).contains(&most.at(step)), "{decay:?} at {step}: {}", most.at(step));
            }
        }
        assert_eq!(rate(Decay::Cosine, 0, 0).at(u64::MAX), 0.0);
    }
}
