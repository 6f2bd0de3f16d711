//! A generator: the function that makes one schedule, with its name and its settings.
//!
//! Each generator's file declares one. The list of them is in [`super::catalogue`].

use crate::generate::error::{GenerateErrorKind, MAX_COMPUTE_ACTIONS};
use crate::generate::guide::Guide;
use crate::generate::settings::Setting;
use crate::generate::spec::ScheduleSpec;
use crate::generate::stage_rule::StageRule;
use crate::placement::{MAX_STAGES, Placement};
use crate::schedule::Schedule;
use crate::slices::Slices;

/// A generator, found by the name of its schedule.
#[derive(Debug, Clone, Copy)]
pub struct Generator {
    /// The name, in lower case.
    pub name: &'static str,
    /// Other names for it, in lower case. Spellings that differ only in hyphens need no entry.
    pub aliases: &'static [&'static str],
    /// The use of the schedule, in one line.
    pub summary: &'static str,
    /// The settings that it takes besides the size.
    pub settings: &'static [Setting],
    /// Whether every model can train with the schedule: it runs whole microbatches, forward and backward.
    pub trains: bool,
    /// The description for readers who choose a schedule.
    pub guide: Guide,
    /// The numbers of stages on each rank, and their placement.
    pub stages: StageRule,
    /// The most actions of a stage for each microbatch or slice: 1 for a forward, 2 with a backward, 3 with a
    /// backward in two halves.
    pub(super) actions: u32,
    /// The number of slices of each microbatch by default.
    pub(super) slices: Slices,
    /// Refuses sizes and settings that the schedule does not have, for a number of stages on each rank. It
    /// allocates nothing.
    pub(super) check: fn(&ScheduleSpec, u32) -> Result<(), GenerateErrorKind>,
    /// Makes the schedule for a size and settings that were checked.
    pub(super) generate: fn(&ScheduleSpec, Placement) -> Schedule,
}

/// The limits of a schedule in addition to its own rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The number of layers of the model, which limits the number of stages; `None` if it is not known.
    pub layers: Option<u32>,
    /// The number of replicas that share the microbatches. A specification counts the microbatches of one
    /// replica, and messages name the numbers of all of them.
    pub replicas: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { layers: None, replicas: 1 }
    }
}

impl Generator {
    /// Returns whether the schedule has backwards, without which no model trains.
    pub fn has_backward(&self) -> bool {
        self.actions > 1
    }

    /// Returns the number of slices into which the schedule cuts each microbatch.
    pub fn slices_of(&self, spec: &ScheduleSpec) -> Slices {
        spec.slices.unwrap_or(self.slices)
    }

    /// Returns the name and the aliases.
    pub(super) fn names(&self) -> impl Iterator<Item = &'static str> {
        [self.name].into_iter().chain(self.aliases.iter().copied())
    }

    /// Refuses a size or a setting that the schedule does not have, and returns the number of stages on each
    /// rank. It allocates nothing and takes no time. The checks follow the order of causes: stages that the
    /// model cannot fill are found before microbatches that such stages could not use.
    pub(super) fn check(&self, spec: &ScheduleSpec, layers: Option<u32>) -> Result<u32, GenerateErrorKind> {
        let schedule = self.name;
        let unused = Setting::ALL.into_iter().find(|it| spec.gives(*it) && !self.settings.contains(it));
        if let Some(setting) = unused {
            return Err(GenerateErrorKind::UnusedSetting { schedule, setting });
        }
        let stages_per_rank = self.stages.stages_per_rank(schedule, spec.stages_per_rank)?;
        let ScheduleSpec { ranks, microbatches, .. } = *spec;
        if ranks == 0 || stages_per_rank == 0 {
            return Err(GenerateErrorKind::NoStages { ranks, stages_per_rank });
        }
        let stages = u64::from(ranks) * u64::from(stages_per_rank);
        if let Some(layers) = layers.filter(|layers| stages > u64::from(*layers)) {
            return Err(GenerateErrorKind::TooManyStages { ranks, stages_per_rank, stages, layers });
        }
        if microbatches == 0 {
            return Err(GenerateErrorKind::NoMicrobatches);
        }
        if stages > MAX_STAGES || self.most_cells(spec, stages_per_rank, 3) > MAX_COMPUTE_ACTIONS {
            let slices = self.slices_of(spec);
            return Err(GenerateErrorKind::TooLarge { stages, microbatches, slices });
        }
        (self.check)(spec, stages_per_rank)?;
        Ok(stages_per_rank)
    }

    /// Returns the most cells of all ranks, idle ones included, with `actions` for each stage and microbatch.
    pub(super) fn most_cells(&self, spec: &ScheduleSpec, stages_per_rank: u32, actions: u32) -> u128 {
        let slices = self.slices_of(spec).get();
        let length =
            u128::from(spec.microbatches) * u128::from(slices) + u128::from(self.stages.idle(spec.ranks));
        u128::from(actions) * u128::from(spec.ranks) * u128::from(stages_per_rank) * length
    }
}
