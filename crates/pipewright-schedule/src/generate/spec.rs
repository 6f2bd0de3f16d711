//! The size and the settings of a schedule, and the checks that several generators share.

use crate::costs::Costs;
use crate::generate::error::GenerateErrorKind;
use crate::generate::interleaving::Interleaving;
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
    /// The number of microbatches that a chunk runs before the next chunk, for schedules with this setting;
    /// `None` for rounds of equal size (interleaved schedules), or for the number of ranks
    /// (`group-interleaved`).
    pub group_size: Option<u32>,
    /// Whether to warm up with two forwards instead of one for each later rank, for schedules with this
    /// setting.
    pub wide_warmup: bool,
    /// The costs for which a schedule with this setting is optimised; `None` for [`Costs::default`].
    pub costs: Option<Costs>,
    /// The number of microbatches whose activations a stage may hold at once, for schedules with this
    /// setting; `None` for the number that the schedule has by itself, which its guide says.
    pub memory_limit: Option<PerStage<u32>>,
    /// The number of slices into which each microbatch is cut along its sequence, for schedules with this
    /// setting; `None` for two.
    pub slices: Option<Slices>,
    /// Whether forwards and backwards of different stages that follow each other on a rank become overlaps
    /// ([`pair_overlaps`](crate::pairing::pair_overlaps)), for schedules with this setting. Set it if ranks
    /// exchange tokens inside their stages. Otherwise a run takes overlaps apart, and the forward of each
    /// runs first.
    pub overlap: bool,
}

impl ScheduleSpec {
    /// Returns whether `setting` has a value.
    pub fn gives(&self, setting: Setting) -> bool {
        match setting {
            Setting::GroupSize => self.group_size.is_some(),
            Setting::WideWarmup => self.wide_warmup,
            Setting::Costs => self.costs.is_some(),
            Setting::MemoryLimit => self.memory_limit.is_some(),
            Setting::Slices => self.slices.is_some(),
            Setting::Overlap => self.overlap,
        }
    }

    /// Returns the same specification without `setting`.
    pub(super) fn without(&self, setting: Setting) -> Self {
        let mut spec = self.clone();
        match setting {
            Setting::GroupSize => spec.group_size = None,
            Setting::WideWarmup => spec.wide_warmup = false,
            Setting::Costs => spec.costs = None,
            Setting::MemoryLimit => spec.memory_limit = None,
            Setting::Slices => spec.slices = None,
            Setting::Overlap => spec.overlap = false,
        }
        spec
    }

    /// Removes the settings that are not in the list, for a schedule that would refuse them.
    pub fn keep_only(&mut self, settings: &[Setting]) {
        for setting in Setting::ALL.into_iter().filter(|setting| !settings.contains(setting)) {
            *self = self.without(setting);
        }
    }

    /// Returns the order of the chunks of an interleaved schedule with `chunks` stages on each rank.
    pub(super) fn interleaving(
        &self,
        schedule: &'static str,
        chunks: u32,
    ) -> Result<Interleaving, GenerateErrorKind> {
        let microbatches = self.microbatches;
        let group = match self.group_size {
            Some(group_size) => {
                self.group_size_from(group_size, self.ranks.min(microbatches), microbatches)?
            }
            None => self.microbatches_per_round(schedule)?,
        };
        Ok(Interleaving { chunks, group, microbatches })
    }

    /// Returns the order of the chunks of an interleaved schedule whose size was checked.
    pub(super) fn checked_interleaving(&self, placement: &Placement) -> Interleaving {
        self.interleaving("", placement.stages_per_rank()).expect("the size was checked")
    }

    /// Returns a group size, which must not be below `smallest` or above `largest`.
    pub(super) fn group_size_from(
        &self,
        group_size: u32,
        smallest: u32,
        largest: u32,
    ) -> Result<u32, GenerateErrorKind> {
        let Self { ranks, microbatches, .. } = *self;
        if (smallest..=largest).contains(&group_size) {
            Ok(group_size)
        } else {
            Err(GenerateErrorKind::GroupSize { group_size, ranks, microbatches, smallest, largest })
        }
    }

    /// Returns the number of microbatches in a round. There is one round for each full number of ranks, and
    /// rounds have equal size.
    fn microbatches_per_round(&self, schedule: &'static str) -> Result<u32, GenerateErrorKind> {
        let Self { ranks, microbatches, .. } = *self;
        let rounds = rounds(ranks, microbatches);
        if !microbatches.is_multiple_of(rounds) {
            return Err(GenerateErrorKind::UnevenRounds { schedule, microbatches, rounds });
        }
        Ok(microbatches / rounds)
    }
}

/// Refuses a number of microbatches that does not divide into the groups or rounds of an interleaved schedule.
pub(super) fn check_interleaving(
    schedule: &'static str,
    spec: &ScheduleSpec,
    stages_per_rank: u32,
) -> Result<(), GenerateErrorKind> {
    spec.interleaving(schedule, stages_per_rank).map(drop)
}

/// Returns the number of rounds of an interleaved schedule: one for each full number of ranks.
pub(crate) fn rounds(ranks: u32, microbatches: u32) -> u32 {
    microbatches.checked_div(ranks).unwrap_or(1).max(1)
}

/// One value for all stages, or one for each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PerStage<T> {
    /// The same value for all stages.
    Same(T),
    /// The values of the stages, in order.
    Each(Vec<T>),
}
