//! A generator: the function that makes one schedule, with its name and its settings.
//!
//! Each generator's file declares one. The list of them is in [`super::catalogue`]. `tools/book` prints the guides as a
//! chapter of the book, and its tests compare every formula with the simulation.

use crate::action::Action;
use crate::generate::error::{GenerateErrorKind, MAX_COMPUTE_ACTIONS};
use crate::generate::settings::Setting;
use crate::generate::spec::ScheduleSpec;
use crate::placement::{MAX_STAGES, Placement, PlacementError};
use crate::slices::Slices;

/// The cells of all ranks, with bubbles.
pub(super) type Grid = Vec<Vec<Option<Action>>>;

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
    /// Refuses sizes and settings that the schedule of this name does not have, for a number of stages on each
    /// rank. It allocates nothing.
    pub(super) check: fn(&'static str, &ScheduleSpec, u32) -> Result<(), GenerateErrorKind>,
    /// Makes the cells for a size and settings that were checked.
    pub(super) generate: fn(&ScheduleSpec, &Placement) -> Grid,
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
    /// What most schedules have: one stage on each rank, a whole backward, and no settings. Every generator has a
    /// name, a summary, a guide and a function of its own.
    pub(super) const USUAL: Self = Self {
        name: "",
        aliases: &[],
        summary: "",
        settings: &[],
        trains: true,
        guide: Guide { source: "", order: "", choice: "", bubble: &[], peak: &[] },
        stages: StageRule::One,
        actions: 2,
        slices: Slices::ONE,
        check: |_, _, _| Ok(()),
        generate: |_, _| Vec::new(),
    };

    /// Returns whether the schedule has backwards, without which no model trains.
    pub fn has_backward(&self) -> bool {
        self.actions > 1
    }

    /// Returns whether the schedule has gradients of weights apart from gradients of inputs.
    pub fn splits_backward(&self) -> bool {
        self.actions > 2
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
        (self.check)(schedule, spec, stages_per_rank)?;
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

/// The description of a schedule.
///
/// The formulas hold if `F`, `I` and `W` take equally long on every stage, `B` takes as long as `I` and `W`
/// together, and messages take no time and are sent after whole actions
/// ([`Level::Comms`](crate::Level::Comms)).
#[derive(Debug, Clone, Copy)]
pub struct Guide {
    /// The paper that describes the schedule.
    pub source: &'static str,
    /// The placement of the stages, and the order of a rank's actions.
    pub order: &'static str,
    /// When to choose the schedule, and what it costs.
    pub choice: &'static str,
    /// The share of a step in which a rank idles, from barrier to barrier.
    pub bubble: &'static [Formula],
    /// The largest number of activations that any rank holds. An activation belongs to one stage and one
    /// microbatch, and a slice has its share of it.
    pub peak: &'static [Formula],
}

/// A formula, as text that people and the tests read.
///
/// `p` is the number of ranks, `m` of microbatches, `v` of stages on a rank, `g` the group size, and `k` the
/// number of slices. Factors stand side by side: `(p - 1) / (v m + p - 1)`. There are `+`, `-`, `/`,
/// parentheses and `min(a, b)`.
#[derive(Debug, Clone, Copy)]
pub struct Formula {
    /// The value.
    pub value: &'static str,
    /// The sizes for which the formula holds: conditions such as `m >= 2 p`, `p is even` or
    /// `m is a multiple of p`, with `and` between them. If it is empty, the formula is valid for all sizes
    /// that the generator accepts.
    pub sizes: &'static str,
    /// Whether the value is an upper bound. Otherwise it is exact.
    pub is_bound: bool,
}

impl Formula {
    /// Makes a formula for all sizes.
    pub(super) const fn always(value: &'static str) -> Self {
        Self { value, sizes: "", is_bound: false }
    }

    /// Makes a formula for some sizes.
    pub(super) const fn with(sizes: &'static str, value: &'static str) -> Self {
        Self { value, sizes, is_bound: false }
    }

    /// Makes an upper bound for some sizes.
    pub(super) const fn at_most(sizes: &'static str, value: &'static str) -> Self {
        Self { value, sizes, is_bound: true }
    }
}

/// The numbers of stages on each rank that a schedule runs, and the placement of the stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StageRule {
    /// One stage on each rank.
    One,
    /// Any number of stages on each rank, placed in a loop over the ranks; two by default.
    Loops,
    /// Two stages on each rank, placed in a loop over the ranks.
    TwoLoops,
    /// Two stages on each rank, placed down the ranks and up again.
    V,
    /// An even number of stages on each rank, placed down the ranks and up again several times; two by
    /// default.
    Vs,
}

impl StageRule {
    /// Returns the number of stages on each rank of a schedule for which `requested` are requested.
    pub(super) fn stages_per_rank(
        self,
        schedule: &'static str,
        requested: Option<u32>,
    ) -> Result<u32, GenerateErrorKind> {
        let usual = if self == Self::One { 1 } else { 2 };
        let requested = requested.unwrap_or(usual);
        match self {
            Self::Loops => Ok(requested),
            Self::Vs if requested.is_multiple_of(2) => Ok(requested),
            Self::Vs => Err(GenerateErrorKind::OddStagesPerRank { schedule, requested }),
            Self::One | Self::TwoLoops | Self::V if requested == usual => Ok(requested),
            Self::One | Self::TwoLoops | Self::V => {
                Err(GenerateErrorKind::StagesPerRank { schedule, requested, supported: usual })
            }
        }
    }

    /// Returns the placement.
    pub(super) fn placement(self, ranks: u32, stages_per_rank: u32) -> Result<Placement, PlacementError> {
        match self {
            Self::One | Self::Loops | Self::TwoLoops => Placement::looped(ranks, stages_per_rank),
            Self::V | Self::Vs => Placement::v(ranks, stages_per_rank),
        }
    }

    /// Returns the most idle cells of a rank, as a number of microbatches of one of its stages.
    pub(super) fn idle(self, ranks: u32) -> u64 {
        if self == Self::One { 0 } else { 2 * u64::from(ranks) }
    }
}
