//! The errors of generating a schedule.

use thiserror::Error;

use crate::costs::CostsError;
use crate::generate::limits::MAX_COMPUTE_ACTIONS;
use crate::generate::settings::Setting;
use crate::ids::StageIndex;
use crate::overlap::{MAX_OVERLAPPED_MICROBATCH, MAX_OVERLAPPED_STAGE};
use crate::placement::PlacementError;
use crate::slices::Slices;

/// The errors of generating a schedule.
#[derive(Clone, PartialEq, Eq, Error)]
pub enum GenerateError {
    /// There is no schedule of this name.
    #[error("unknown schedule `{name}`; {}", suggest(.suggestion, .known))]
    UnknownSchedule {
        /// The name, shortened if it is very long.
        name: String,
        /// The nearest known name, if one is similar.
        suggestion: Option<&'static str>,
        /// The names of all schedules.
        known: Vec<&'static str>,
    },
    /// There is nothing to run.
    #[error("a schedule needs at least one microbatch")]
    NoMicrobatches,
    /// More cells than [`MAX_COMPUTE_ACTIONS`].
    #[error(
        "{stages} stages and {microbatches} microbatches{} make more than {MAX_COMPUTE_ACTIONS} actions; use fewer of either",
        of_slices(*.slices)
    )]
    TooLarge {
        /// The number of stages.
        stages: u32,
        /// The number of microbatches.
        microbatches: u32,
        /// The number of slices of each microbatch.
        slices: Slices,
    },
    /// There are more stages or microbatches than an overlap can name.
    #[error(
        "`{schedule}` runs at most {} stages and {} microbatches; use fewer",
        MAX_OVERLAPPED_STAGE + 1,
        MAX_OVERLAPPED_MICROBATCH + 1
    )]
    TooManyToOverlap {
        /// The schedule.
        schedule: &'static str,
    },
    /// The search would take too long.
    #[error(
        "`{schedule}` tries out a dozen orders, which takes too long at this size; use at most {most} microbatches, \
         or {other}"
    )]
    TooLargeToSearch {
        /// The schedule.
        schedule: &'static str,
        /// The most microbatches at this number of ranks.
        most: u64,
        /// A similar schedule that does not search.
        other: &'static str,
    },
    /// There are too few microbatches to fill the pipeline.
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
    /// The schedule needs another number of stages on each rank.
    #[error("`{schedule}` runs {supported} stage(s) on each rank, not {requested}; use {supported}")]
    StagesPerRank {
        /// The schedule.
        schedule: &'static str,
        /// The requested number of stages on each rank.
        requested: u32,
        /// The number that the schedule runs.
        supported: u32,
    },
    /// The schedule runs down and up the ranks, so every rank has an even number of stages.
    #[error("`{schedule}` runs an even number of stages on each rank, not {requested}; use {}", requested.saturating_add(1))]
    OddStagesPerRank {
        /// The schedule.
        schedule: &'static str,
        /// The requested number of stages on each rank.
        requested: u32,
    },
    /// The microbatches cannot be divided into rounds of equal size.
    #[error(
        "`{schedule}` runs {microbatches} microbatches in {rounds} rounds of equal size, which {rounds} does not \
         divide; use a multiple of {rounds}"
    )]
    UnevenRounds {
        /// The schedule.
        schedule: &'static str,
        /// The requested number of microbatches.
        microbatches: u32,
        /// The number of rounds: the number of microbatches divided by the number of ranks.
        rounds: u32,
    },
    /// The group size does not fit the number of ranks. A group is the microbatches that a chunk runs before the next
    /// chunk.
    #[error("a group of {group} microbatches does not fit {ranks} ranks; use one from {smallest} to {ranks}")]
    Group {
        /// The requested group size.
        group: u32,
        /// The number of ranks.
        ranks: u32,
        /// The smallest group size for this number of ranks.
        smallest: u32,
    },
    /// The microbatches cannot be divided into groups of equal size.
    #[error("{microbatches} microbatches do not fall into groups of {group}; use a multiple of {group}")]
    UnevenGroups {
        /// The requested number of microbatches.
        microbatches: u32,
        /// The size of a group.
        group: u32,
    },
    /// A setting that the schedule does not have.
    #[error("`{schedule}` has no setting `{setting}`; leave it out")]
    UnusedSetting {
        /// The schedule.
        schedule: &'static str,
        /// The setting.
        setting: Setting,
    },
    /// A list with one entry for each stage has the wrong length.
    #[error("the setting `{setting}` has {found} entries for {stages} stages; give one to each stage")]
    EntryCount {
        /// The setting.
        setting: Setting,
        /// The number of entries.
        found: usize,
        /// The number of stages.
        stages: u32,
    },
    /// The memory limit of a stage is 0.
    #[error("the memory limit of stage {stage} is 0 microbatches; a stage needs room for at least one")]
    NoMemory {
        /// The stage.
        stage: StageIndex,
    },
    /// The costs do not fit the stages, or are out of range.
    #[error(transparent)]
    Costs(#[from] CostsError),
    /// The stages cannot be placed on the ranks.
    #[error(transparent)]
    Placement(#[from] PlacementError),
}

crate::message_as_debug!(GenerateError);

/// Returns the number of slices for an error message; nothing if microbatches are not cut.
fn of_slices(slices: Slices) -> String {
    if slices.is_one() { String::new() } else { format!(" of {slices} slices") }
}

/// Returns the end of the message for an unknown schedule.
fn suggest(suggestion: &Option<&'static str>, known: &[&str]) -> String {
    match suggestion {
        Some(name) => format!("did you mean `{name}`?"),
        None => format!("the schedules are {}", known.join(", ")),
    }
}
