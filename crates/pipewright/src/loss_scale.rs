//! The loss scale of a pipeline in f16, whose numbers begin at 6e-8: gradients are often smaller and would be
//! rounded to zero. Losses are multiplied by the scale before their backward, and the sums of gradients,
//! which have single precision, are divided by it. A scale is a power of two, so it changes the exponent of a
//! gradient and not its mantissa.
//!
//! If a scaled gradient is too large for f16, its sum is not finite. All ranks then skip the update, and the
//! scale is halved. After enough updates in a row it is doubled. The gradient norm decides, which is the same
//! on all ranks.
//!
//! If parameters are delayed by one update, the scale of a step follows from the steps up to the one two before it, like its
//! parameters: the step may begin before the one before it has ended. So a scale that is too large is used twice, and halved
//! once.

use std::fmt;

/// How the loss scale of a pipeline in f16 changes ([`Precision::F16`](crate::tensor::Precision::F16)).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScaling {
    /// The scale of the first step: a power of two, at least 1.
    pub initial: f64,
    /// The number of updates after which the scale is doubled, unless one of them is skipped; at least 1.
    pub interval: u32,
}

impl Default for LossScaling {
    fn default() -> Self {
        Self { initial: 65_536.0, interval: 2000 }
    }
}

impl LossScaling {
    /// The smallest scale. A gradient that is not finite with this scale is an error, as in the other
    /// precisions.
    pub const SMALLEST: f64 = 1.0;

    /// Returns whether the settings are within their bounds.
    pub fn is_valid(&self) -> bool {
        // A power of two has no bit of mantissa.
        let mantissa = self.initial.to_bits() << 12;
        self.initial.is_finite() && self.initial >= Self::SMALLEST && mantissa == 0 && self.interval > 0
    }
}

impl fmt::Display for LossScaling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, doubled after {} updates", self.initial, self.interval)
    }
}

/// The loss scale between two steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LossScale {
    /// The scale that follows from all steps.
    pub(crate) factor: f64,
    /// The number of updates since it changed.
    pub(crate) updates: u32,
    /// The scale of the next step: `factor`, or if parameters are delayed, the one before the last step.
    pub(crate) next: f64,
}

impl LossScale {
    /// Returns the scale before the first step.
    pub(crate) fn new(settings: LossScaling) -> Self {
        Self { factor: settings.initial, updates: 0, next: settings.initial }
    }

    /// Returns the scale after an update, or after a step whose update was skipped.
    pub(crate) fn after(self, skipped: bool, delayed: bool, settings: LossScaling) -> Self {
        let Self { factor, updates, next: used } = self;
        let (now, updates) = if skipped {
            // A step before may have halved the scale that this one has used.
            ((used / 2.0).max(LossScaling::SMALLEST).min(factor), 0)
        } else if updates + 1 >= settings.interval {
            (factor * 2.0, 0)
        } else {
            (factor, updates + 1)
        };
        Self { factor: now, updates, next: if delayed { factor } else { now } }
    }

    /// Returns the scale of a step while `open` steps before it have not ended. There are at most two, and none if parameters
    /// are not delayed.
    pub(crate) fn of_step(self, open: usize, settings: LossScaling) -> StepScale {
        match open {
            0 => StepScale { factor: self.next, if_skipped: self.next },
            1 => StepScale { factor: self.factor, if_skipped: self.factor },
            _ => {
                let [factor, if_skipped] =
                    [false, true].map(|skipped| self.after(skipped, true, settings).factor);
                StepScale { factor, if_skipped }
            }
        }
    }
}

/// The scale of a step's losses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct StepScale {
    pub(crate) factor: f64,
    /// The scale if the update of the step two before this one is skipped, which only the ranks know if that one has not ended
    /// when they get the batch.
    pub(crate) if_skipped: f64,
}

impl Default for StepScale {
    /// Losses that are not scaled.
    fn default() -> Self {
        Self { factor: 1.0, if_skipped: 1.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_is_halved_at_once_and_doubled_after_its_interval() {
        let settings = LossScaling { initial: 4.0, interval: 2 };
        let mut scale = LossScale::new(settings);
        let mut seen = Vec::new();
        for skipped in [true, false, true, true, false, false, false, false] {
            scale = scale.after(skipped, false, settings);
            seen.push(scale.factor);
        }
        assert_eq!(seen, [2.0, 2.0, 1.0, 1.0, 1.0, 2.0, 2.0, 4.0]);
    }

    /// Two steps that overflow at one scale halve it once. The scale of a step is the same however many steps before it are open.
    #[test]
    fn a_delayed_scale_is_halved_once() {
        let settings = LossScaling { initial: 8.0, interval: 2 };
        let skipped = [true, true, false, false, true, false, false, true];
        let (mut scales, mut seen) = (vec![LossScale::new(settings)], Vec::new());
        for index in 0..skipped.len() {
            let last = scales[index];
            seen.push(last.next);
            for open in 1..=index.min(2) {
                let StepScale { factor, if_skipped } = scales[index - open].of_step(open, settings);
                let is_skipped = open == 2 && skipped[index - 2];
                assert_eq!(if is_skipped { if_skipped } else { factor }, last.next, "{index}, {open} open");
            }
            scales.push(last.after(skipped[index], true, settings));
        }
        assert_eq!(seen, [8.0, 8.0, 4.0, 4.0, 4.0, 8.0, 2.0, 2.0]);
    }

    #[test]
    fn only_powers_of_two_are_scales() {
        let is_valid = |initial, interval| LossScaling { initial, interval }.is_valid();
        assert!(LossScaling::default().is_valid() && is_valid(1.0, 1) && is_valid(8.0, 3));
        for initial in [0.0, 0.5, 3.0, -2.0, f64::INFINITY, f64::NAN] {
            assert!(!is_valid(initial, 1), "{initial}");
        }
        assert!(!is_valid(2.0, 0));
    }
}
