//! When a run saves checkpoints: after a fixed number of steps, or after a number that it chooses.
//!
//! Each process measures its own steps. The first rank's process announces its choice with the report of the
//! next step, or of the one after it if the next one has begun already. All processes follow the number in that
//! report from the step after it on, so they save after the same steps.

use std::time::Duration;

use pipewright::pipeline::StepSummary;
use pipewright::train::{CheckpointChoice, CheckpointPace, Metrics, Trainer};

use crate::settings::Settings;
use crate::settings::checkpoints::{CheckpointEvery, FailureEvery};

/// The steps after which checkpoints are saved.
pub(crate) enum CheckpointTiming {
    /// After each multiple of a number of steps; never if it is 0.
    Fixed(u64),
    /// After a number of steps that is chosen from measurements.
    Auto(Box<Auto>),
}

/// The state of a choice.
pub(crate) struct Auto {
    pace: CheckpointPace,
    /// The steps between two checkpoints that all processes have agreed on; 0 before the first step.
    agreed: u64,
    /// The number that counted for the last step: it was agreed before that step, except for the first one.
    used: u64,
    /// The choice that was shown last.
    shown: Option<CheckpointChoice>,
}

impl CheckpointTiming {
    /// Returns the timing of a run.
    pub(crate) fn new(settings: &Settings) -> Self {
        let run = &settings.run;
        match run.checkpoint_every {
            CheckpointEvery::Steps(steps) => Self::Fixed(steps),
            CheckpointEvery::Auto => {
                let mesh = settings.mesh.mesh(settings.pipeline.ranks);
                let assumed = || FailureEvery::assumed(mesh.ranks().unwrap_or(u32::MAX));
                let between = run.failure_every.map_or_else(assumed, FailureEvery::time);
                Self::Auto(Box::new(Auto {
                    pace: CheckpointPace::new(between),
                    agreed: 0,
                    used: 0,
                    shown: None,
                }))
            }
        }
    }

    /// Returns whether a checkpoint is due after `done` steps, if the last one is of step `saved`.
    pub(crate) fn is_due(&self, done: u64, saved: u64) -> bool {
        match self {
            // Steps are counted from 1, so no step is a multiple of 0.
            Self::Fixed(steps) => done.is_multiple_of(*steps),
            Self::Auto(auto) => auto.agreed > 0 && done - saved >= auto.agreed,
        }
    }

    /// Returns whether there is a checkpoint only at the end of the run.
    pub(crate) fn is_only_at_end(&self) -> bool {
        matches!(self, Self::Fixed(0))
    }

    /// Announces this process's choice to all processes: with the report of the next step, unless the ranks
    /// have already updated in it, and then with the report of the step after it.
    pub(crate) fn announce(&self, trainer: &mut Trainer) {
        if let Self::Auto(auto) = self {
            trainer.pipeline().announce(auto.pace.interval());
        }
    }

    /// Records a finished step.
    pub(crate) fn step(&mut self, report: &StepSummary) {
        if let Self::Auto(auto) = self {
            auto.used = if auto.agreed > 0 { auto.agreed } else { report.announced };
            auto.agreed = report.announced;
            auto.pace.step(report.wall);
        }
    }

    /// Records that a checkpoint was requested, for which the run waited so long.
    pub(crate) fn begin(&mut self, waited: Duration) {
        if let Self::Auto(auto) = self {
            auto.pace.begin(waited);
        }
    }

    /// Records that the checkpoint is complete.
    pub(crate) fn complete(&mut self) {
        if let Self::Auto(auto) = self {
            auto.pace.complete();
        }
    }

    /// Puts the choice into the metrics, and returns it if it has changed.
    pub(crate) fn describe(&mut self, metrics: &mut Metrics) -> Option<CheckpointChoice> {
        let Self::Auto(auto) = self else { return None };
        let choice = auto.pace.choice();
        metrics.checkpoint_interval = (auto.used > 0).then_some(auto.used);
        metrics.checkpoint_cost_ms = choice.map(|choice| choice.cost.as_secs_f64() * 1e3);
        if choice == auto.shown {
            return None;
        }
        auto.shown = choice;
        choice
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_processes_follow_the_announced_number() {
        let timing = |agreed| {
            let pace = CheckpointPace::new(Duration::from_secs(60));
            CheckpointTiming::Auto(Box::new(Auto { pace, agreed, used: 0, shown: None }))
        };
        assert!(!timing(0).is_due(100, 0));
        assert!(!timing(4).is_due(3, 0) && timing(4).is_due(4, 0));
        assert!(!timing(4).is_due(9, 6) && timing(4).is_due(11, 6));
        assert!(CheckpointTiming::Fixed(3).is_due(6, 5) && !CheckpointTiming::Fixed(3).is_due(7, 0));
        assert!(!CheckpointTiming::Fixed(0).is_due(7, 0));
        assert!(CheckpointTiming::Fixed(0).is_only_at_end() && !CheckpointTiming::Fixed(3).is_only_at_end());
    }
}
