//! The size and the settings of a schedule, and the checks that several generators share.

use crate::costs::Costs;
use crate::generate::error::GenerateError;
use crate::generate::limits::MAX_COMPUTE_ACTIONS;
use crate::generate::memory_limit::PerStage;
use crate::generate::settings::Setting;
use crate::placement::Placement;
use crate::slices::Slices;

/// The requested size and settings of a schedule.
///
/// ```
/// use pipewright_schedule::ScheduleSpec;
/// let spec = ScheduleSpec { ranks: 4, microbatches: 8, ..ScheduleSpec::default() };
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ScheduleSpec {
    /// The number of ranks.
    pub ranks: u32,
    /// The number of stages on each rank; `None` for the number that the schedule needs.
    pub stages_per_rank: Option<u32>,
    /// The number of microbatches in a step.
    pub microbatches: u32,
    /// The number of microbatches that a chunk runs before the next chunk, for schedules with this setting; `None` for
    /// the number of ranks.
    pub group: Option<u32>,
    /// Whether to warm up with two forwards instead of one for each later rank, for schedules with this setting.
    pub wide_warmup: bool,
    /// The costs for which a schedule with this setting is optimised; `None` for [`Costs::default`].
    pub costs: Option<Costs>,
    /// The number of microbatches whose activations a stage may hold at once, for schedules with this setting; `None`
    /// for the number that the schedule has by itself, which its guide says.
    pub memory_limit: Option<PerStage<u32>>,
    /// The number of slices into which each microbatch is cut along its sequence, for schedules with this setting; `None`
    /// for two.
    pub slices: Option<Slices>,
}

impl ScheduleSpec {
    /// Returns whether `setting` has a value.
    pub fn gives(&self, setting: Setting) -> bool {
        match setting {
            Setting::Group => self.group.is_some(),
            Setting::WideWarmup => self.wide_warmup,
            Setting::Costs => self.costs.is_some(),
            Setting::MemoryLimit => self.memory_limit.is_some(),
            Setting::Slices => self.slices.is_some(),
        }
    }

    /// Removes the settings that are not in the list, for a schedule that would refuse them.
    pub fn keep_only(&mut self, settings: &[Setting]) {
        for setting in Setting::ALL.into_iter().filter(|setting| !settings.contains(setting)) {
            match setting {
                Setting::Group => self.group = None,
                Setting::WideWarmup => self.wide_warmup = false,
                Setting::Costs => self.costs = None,
                Setting::MemoryLimit => self.memory_limit = None,
                Setting::Slices => self.slices = None,
            }
        }
    }

    /// Returns the placement of a schedule with one stage on each rank, and checks the size.
    pub(super) fn one_stage_a_rank(&self, schedule: &'static str) -> Result<Placement, GenerateError> {
        self.check_stages_per_rank(schedule, 1)?;
        self.check_size(1, 0)?;
        Ok(Placement::looped(self.ranks, 1)?)
    }

    /// Returns the placement in a loop over the ranks, with the requested number of stages on each rank, or two if none
    /// is given, and checks the size.
    pub(super) fn looped(&self) -> Result<Placement, GenerateError> {
        let stages_per_rank = self.stages_per_rank.unwrap_or(2);
        self.check_size(stages_per_rank, 2 * u64::from(self.ranks))?;
        Ok(Placement::looped(self.ranks, stages_per_rank)?)
    }

    /// Returns the placement of two stages on each rank in a loop, and checks the size.
    pub(super) fn one_loop(&self, schedule: &'static str) -> Result<Placement, GenerateError> {
        self.check_stages_per_rank(schedule, 2)?;
        self.looped()
    }

    /// Returns the placement of two stages on each rank down the ranks and up again, and checks the size.
    pub(super) fn one_v(&self, schedule: &'static str) -> Result<Placement, GenerateError> {
        self.check_stages_per_rank(schedule, 2)?;
        self.check_size(2, 2 * u64::from(self.ranks))?;
        Ok(Placement::v(self.ranks, 2)?)
    }

    /// Returns the placement down the ranks and up again several times, or once if no number of stages is given, and
    /// checks the size.
    pub(super) fn several_vs(&self, schedule: &'static str) -> Result<Placement, GenerateError> {
        let requested = self.stages_per_rank.unwrap_or(2);
        if !requested.is_multiple_of(2) {
            return Err(GenerateError::OddStagesPerRank { schedule, requested });
        }
        self.check_size(requested, 2 * u64::from(self.ranks))?;
        Ok(Placement::v(self.ranks, requested)?)
    }

    fn check_stages_per_rank(&self, schedule: &'static str, supported: u32) -> Result<(), GenerateError> {
        match self.stages_per_rank {
            Some(requested) if requested != supported => {
                Err(GenerateError::StagesPerRank { schedule, requested, supported })
            }
            _ => Ok(()),
        }
    }

    /// Refuses a schedule that is empty or too large, before anything is allocated. Idle cells of a rank count as
    /// `idle` further microbatches.
    fn check_size(&self, stages_per_rank: u32, idle: u64) -> Result<(), GenerateError> {
        let Self { ranks, microbatches, .. } = *self;
        if microbatches == 0 {
            return Err(GenerateError::NoMicrobatches);
        }
        let slices = self.slices.unwrap_or_default();
        // A forward, and two halves of a backward.
        let length = 3 * (u128::from(microbatches) * u128::from(slices.get()) + u128::from(idle));
        let cells = u128::from(ranks) * u128::from(stages_per_rank) * length;
        if cells > MAX_COMPUTE_ACTIONS {
            let stages = ranks.saturating_mul(stages_per_rank);
            return Err(GenerateError::TooLarge { stages, microbatches, slices });
        }
        Ok(())
    }

    /// Refuses fewer microbatches than stages, with which the pipeline would never be full.
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

    /// Returns the number of microbatches in a round. There is one round for each full number of ranks, and rounds have
    /// equal size.
    pub(super) fn microbatches_per_round(&self, schedule: &'static str) -> Result<u32, GenerateError> {
        let Self { ranks, microbatches, .. } = *self;
        let rounds = microbatches.checked_div(ranks).unwrap_or(1).max(1);
        if !microbatches.is_multiple_of(rounds) {
            return Err(GenerateError::UnevenRounds { schedule, microbatches, rounds });
        }
        Ok(microbatches / rounds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::{catalogue, generate};

    fn check(name: &str, ranks: u32, stages_per_rank: Option<u32>, microbatches: u32, message: &str) {
        let spec = ScheduleSpec { ranks, stages_per_rank, microbatches, ..ScheduleSpec::default() };
        let found = generate(name, &spec);
        assert_eq!(found.map_err(|error| error.to_string()).expect_err(name), message);
    }

    #[test]
    fn impossible_sizes_are_refused() {
        let empty = |stages| {
            format!("a placement of 0 ranks with {stages} stages each has no stage; use at least one of both")
        };
        check("gpipe", 0, None, 4, &empty(1));
        for name in ["loopedbfs", "interleaved1f1b", "zbvzerobubble", "dualpipev", "v-half", "hanayo"] {
            check(name, 0, None, 4, &empty(2));
        }
        for generator in catalogue() {
            check(generator.name, 4, None, 0, "a schedule needs at least one microbatch");
        }
    }

    #[test]
    fn stages_that_a_schedule_cannot_run_are_refused() {
        check("gpipe", 4, Some(2), 4, "`gpipe` runs 1 stage(s) on each rank, not 2; use 1");
        check("gpipe", 4, Some(0), 4, "`gpipe` runs 1 stage(s) on each rank, not 0; use 1");
        check("v-min", 4, Some(3), 8, "`v-min` runs 2 stage(s) on each rank, not 3; use 2");
        let none = "a placement of 4 ranks with 0 stages each has no stage; use at least one of both";
        check("loopedbfs", 4, Some(0), 4, none);
        check("hanayo", 4, Some(0), 4, none);
        check("hanayo", 4, Some(3), 4, "`hanayo` runs an even number of stages on each rank, not 3; use 4");
    }

    #[test]
    fn absurd_sizes_are_refused_before_allocating() {
        for generator in catalogue() {
            for (ranks, stages, microbatches) in [
                (4_000_000_000, None, 4_000_000_000),
                (4_000_000_000, None, 1),
                (4_000_000_000, Some(4_000_000_000), 4_000_000_000),
                (1, Some(4_000_000_000), 1),
                (1, None, 4_000_000_000),
            ] {
                let spec =
                    ScheduleSpec { ranks, stages_per_rank: stages, microbatches, ..ScheduleSpec::default() };
                let error = generate(generator.name, &spec).expect_err(generator.name);
                let expected =
                    matches!(error, GenerateError::TooLarge { .. } | GenerateError::StagesPerRank { .. });
                assert!(expected, "{} {spec:?}: {error}", generator.name);
            }
        }
    }

    #[test]
    fn long_searches_are_refused() {
        let message = "`zb-greedy` tries out a dozen orders, which takes too long at this size; \
                       use at most 5461 microbatches, or zb-h1";
        check("zb-greedy", 1024, None, 5462, message);
    }

    #[test]
    fn idle_cells_count() {
        // Otherwise a million ranks with one microbatch would be accepted, and each row would have a million idle
        // cells.
        let huge = "2000000 stages and 1 microbatches make more than 268435456 actions; use fewer of either";
        check("loopedbfs", 1_000_000, None, 1, huge);
        check("zbvzerobubble", 1_000_000, None, 1, huge);
    }

    #[test]
    fn an_unfilled_pipeline_is_refused() {
        for name in ["gpipe", "1f1b"] {
            let message = format!("3 microbatches cannot fill the 4 stages of `{name}`; use at least 4");
            check(name, 4, None, 3, &message);
        }
        let message = "7 microbatches cannot fill the 8 stages of `dualpipev`; use at least 8";
        check("dualpipev", 4, None, 7, message);
    }

    #[test]
    fn more_than_an_overlap_can_name_is_refused() {
        let message = "`dualpipev` runs at most 4096 stages and 65536 microbatches; use fewer";
        check("dualpipev", 2, None, 65_537, message);
        check("dualpipev", 2049, None, 4_098, message);
        let spec = ScheduleSpec { ranks: 1, microbatches: 65_536, ..ScheduleSpec::default() };
        assert!(generate("dualpipev", &spec).is_ok());
    }

    #[test]
    fn uneven_rounds_are_refused() {
        let message = "`interleaved1f1b` runs 9 microbatches in 2 rounds of equal size, which 2 does not divide; \
                       use a multiple of 2";
        check("interleaved1f1b", 4, None, 9, message);
        assert_eq!(
            ScheduleSpec { ranks: 4, microbatches: 10, ..ScheduleSpec::default() }.microbatches_per_round(""),
            Ok(5)
        );
        assert_eq!(
            ScheduleSpec { ranks: 4, microbatches: 3, ..ScheduleSpec::default() }.microbatches_per_round(""),
            Ok(3)
        );
    }
}
