//! The size of a schedule, the checks that every generator shares, and the errors of generation.

use thiserror::Error;

use crate::generate::catalogue::catalogue;
use crate::placement::{Placement, PlacementError};

/// The largest number of compute actions that is generated. Lowering about triples it, which a program's
/// positions must still count.
pub const MAX_COMPUTE_ACTIONS: u128 = 1 << 30;

/// How large a schedule is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScheduleSpec {
    /// The number of ranks.
    pub ranks: u32,
    /// The number of stages on each rank; `None` for what the schedule needs.
    pub stages_per_rank: Option<u32>,
    /// The number of microbatches in a step.
    pub microbatches: u32,
}

/// Why a schedule cannot be generated.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum GenerateError {
    /// No schedule has the name.
    #[error("unknown schedule `{name}`; {}", suggest(.suggestion))]
    UnknownSchedule {
        /// The name, shortened where it is very long.
        name: String,
        /// The known name that is nearest, where one is near.
        suggestion: Option<&'static str>,
    },
    /// There is nothing to run.
    #[error("a schedule needs at least one microbatch")]
    NoMicrobatches,
    /// More compute actions than [`MAX_COMPUTE_ACTIONS`].
    #[error(
        "{stages} stages and {microbatches} microbatches make more than {MAX_COMPUTE_ACTIONS} actions; use fewer of either"
    )]
    TooLarge {
        /// The number of stages.
        stages: u32,
        /// The number of microbatches.
        microbatches: u32,
    },
    /// The pipeline cannot be filled.
    #[error(
        "{microbatches} microbatches cannot fill the {stages} stages of `{schedule}`; use at least {stages}"
    )]
    TooFewMicrobatches {
        /// The schedule.
        schedule: &'static str,
        /// The requested number of microbatches.
        microbatches: u32,
        /// The number of stages.
        stages: u32,
    },
    /// The schedule does not exist with so many stages on a rank.
    #[error("`{schedule}` runs {supported} stage(s) on each rank, not {requested}; leave the number out")]
    StagesPerRank {
        /// The schedule.
        schedule: &'static str,
        /// The requested number of stages on each rank.
        requested: u32,
        /// The number that the schedule runs.
        supported: u32,
    },
    /// The stages cannot be placed on the ranks.
    #[error(transparent)]
    Placement(#[from] PlacementError),
}

impl ScheduleSpec {
    /// The placement of a schedule with one stage on each rank, after all checks that such schedules share.
    pub(super) fn one_stage_a_rank(&self, schedule: &'static str) -> Result<Placement, GenerateError> {
        if let Some(requested) = self.stages_per_rank.filter(|&requested| requested != 1) {
            return Err(GenerateError::StagesPerRank { schedule, requested, supported: 1 });
        }
        self.check_size(1)?;
        Ok(Placement::looped(self.ranks, 1)?)
    }

    /// Refuses an empty schedule, and one too large to allocate, before anything is allocated.
    fn check_size(&self, stages_per_rank: u32) -> Result<(), GenerateError> {
        let Self { ranks, microbatches, .. } = *self;
        if microbatches == 0 {
            return Err(GenerateError::NoMicrobatches);
        }
        // A forward, and a backward that may be split in two.
        let actions = 3 * u128::from(ranks) * u128::from(stages_per_rank) * u128::from(microbatches);
        if actions > MAX_COMPUTE_ACTIONS {
            let stages = ranks.saturating_mul(stages_per_rank);
            return Err(GenerateError::TooLarge { stages, microbatches });
        }
        Ok(())
    }

    /// Refuses fewer microbatches than stages: the pipeline would never be full.
    pub(super) fn check_fills(
        &self,
        schedule: &'static str,
        placement: &Placement,
    ) -> Result<(), GenerateError> {
        let (microbatches, stages) = (self.microbatches, placement.stages());
        if microbatches < stages {
            return Err(GenerateError::TooFewMicrobatches { schedule, microbatches, stages });
        }
        Ok(())
    }
}

/// The end of the message for an unknown schedule.
fn suggest(suggestion: &Option<&'static str>) -> String {
    match suggestion {
        Some(name) => format!("did you mean `{name}`?"),
        None => {
            let names: Vec<&str> = catalogue().iter().map(|generator| generator.name).collect();
            format!("the schedules are {}", names.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::generate;

    fn check(name: &str, ranks: u32, stages_per_rank: Option<u32>, microbatches: u32, message: &str) {
        let found = generate(name, &ScheduleSpec { ranks, stages_per_rank, microbatches });
        assert_eq!(found.map_err(|error| error.to_string()).expect_err(name), message);
    }

    #[test]
    fn impossible_sizes_are_refused() {
        let empty = "a placement of 0 ranks with 1 stages each has no stage; use at least one of both";
        check("gpipe", 0, None, 4, empty);
        check("gpipe", 4, None, 0, "a schedule needs at least one microbatch");
        check("gpipe", 4, Some(2), 4, "`gpipe` runs 1 stage(s) on each rank, not 2; leave the number out");
        check("gpipe", 4, Some(0), 4, "`gpipe` runs 1 stage(s) on each rank, not 0; leave the number out");
    }

    #[test]
    fn absurd_sizes_are_refused_before_allocating() {
        let huge = "4000000000 stages and 4000000000 microbatches make more than 1073741824 actions; use fewer of either";
        for name in ["forwardonly", "gpipe", "1f1b"] {
            check(name, 4_000_000_000, None, 4_000_000_000, huge);
        }
        let wide =
            "4000000000 stages and 1 microbatches make more than 1073741824 actions; use fewer of either";
        check("forwardonly", 4_000_000_000, None, 1, wide);
    }

    #[test]
    fn an_unfilled_pipeline_is_refused() {
        for name in ["gpipe", "1f1b"] {
            let message = format!("3 microbatches cannot fill the 4 stages of `{name}`; use at least 4");
            check(name, 4, None, 3, &message);
        }
    }
}
