//! [`RateSchedule`]: the learning rate of every step, as the trainer asks for it.
//!
//! ```
//! use burn::lr_scheduler::step::StepLrSchedulerConfig;
//! use pipewright::train::{BurnSchedule, RateSchedule};
//!
//! let halved = |step: u64| if step < 100 { 1e-3 } else { 5e-4 };
//! assert_eq!(halved.at(100), 5e-4);
//!
//! let burns = BurnSchedule::new(StepLrSchedulerConfig::new(1e-3, 2).with_gamma(0.5).init()?);
//! assert_eq!([0, 1, 2].map(|step| burns.at(step)), [1e-3, 1e-3, 5e-4]);
//! # Ok::<(), String>(())
//! ```

use std::sync::{Mutex, PoisonError};

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;

use crate::train::learning_rate::LearningRate;

/// A learning rate for every step of a run. A function of the step is a schedule.
pub trait RateSchedule: Send {
    /// Returns the rate of step `step`, counted from 0. It depends on the step alone: a resumed run asks for
    /// the steps from the checkpoint on.
    fn at(&self, step: u64) -> f64;
}

impl<F: Fn(u64) -> f64 + Send> RateSchedule for F {
    fn at(&self, step: u64) -> f64 {
        self(step)
    }
}

impl RateSchedule for LearningRate {
    fn at(&self, step: u64) -> f64 {
        Self::at(self, step)
    }
}

/// One of Burn's schedulers as a schedule. Burn's compute a rate from the one before it, so the first rate of
/// a resumed run takes as many steps of the scheduler as the run has taken. Groups of the scheduler are not
/// used: see
/// [`OptimizerGroup::rate`](crate::optimizer::OptimizerGroup::rate).
pub struct BurnSchedule {
    initial: ModuleLrScheduler,
    current: Mutex<Reached>,
}

/// A scheduler that has been asked for some rates.
struct Reached {
    scheduler: ModuleLrScheduler,
    /// The number of rates so far, and the last of them.
    steps: u64,
    last: f64,
}

impl BurnSchedule {
    /// Makes a schedule of a scheduler that has not been asked for a rate.
    pub fn new(scheduler: impl Into<ModuleLrScheduler>) -> Self {
        let scheduler = scheduler.into();
        let current = Mutex::new(Reached::new(scheduler.clone()));
        Self { initial: scheduler, current }
    }
}

impl Reached {
    fn new(scheduler: ModuleLrScheduler) -> Self {
        Self { scheduler, steps: 0, last: 0.0 }
    }
}

impl RateSchedule for BurnSchedule {
    fn at(&self, step: u64) -> f64 {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if step + 1 < current.steps {
            *current = Reached::new(self.initial.clone());
        }
        while current.steps <= step {
            current.last = current.scheduler.step().base();
            current.steps += 1;
        }
        current.last
    }
}

impl std::fmt::Debug for BurnSchedule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BurnSchedule").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use burn::lr_scheduler::exponential::ExponentialLrSchedulerConfig;

    use super::*;

    #[test]
    fn a_scheduler_of_burns_can_be_asked_for_any_step() {
        let make = || ExponentialLrSchedulerConfig::new(1.0, 0.5).init().expect("it is valid");
        let mut expected = make();
        let expected: Vec<f64> = (0..6).map(|_| expected.step().base()).collect();
        let schedule = BurnSchedule::new(make());
        for step in [0, 1, 2, 2, 5, 1, 0, 3] {
            assert_eq!(schedule.at(step), expected[step as usize], "step {step}");
        }
    }
}
