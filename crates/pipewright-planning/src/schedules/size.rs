//! The arguments that specify a schedule: its size, and the settings of particular schedules.

use std::path::Path;

use clap::Args;
use pipewright_schedule::generate::{PerStage, depends_on_costs, find};
use pipewright_schedule::simulate::few_microbatches;
use pipewright_schedule::{Costs, Schedule, ScheduleSpec, Slices};
use pipewright_system::schedule_file;

use crate::failure::Failure;
use crate::screen::say;

/// The size and the settings of a schedule.
#[derive(Debug, Args)]
pub struct ScheduleSize {
    /// The number of ranks in the pipeline
    #[arg(long, value_name = "P")]
    ranks: Option<u32>,
    /// The number of stages on each rank; by default, the number that the schedule needs
    #[arg(long, value_name = "V")]
    stages_per_rank: Option<u32>,
    /// The number of microbatches in a step
    #[arg(long, value_name = "M")]
    microbatches: Option<u32>,
    /// The number of microbatches that a chunk runs before the next chunk: from the ranks to the microbatches
    /// for interleaved1f1b, interleavedzerobubble and interleaved-zb-h1, by default rounds of equal size; up
    /// to the ranks for group-interleaved, by default the ranks
    #[arg(long, alias = "group", value_name = "G")]
    group_size: Option<u32>,
    /// Warm up with two more forwards for each later rank, for interleaved-zb-h1
    #[arg(long)]
    wide_warmup: bool,
    /// The number of activations that a stage may hold, one for all stages or one for each, for zb-greedy, by
    /// default the number of ranks, and for vocab1f1b, by default two more
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    memory_limit: Vec<u32>,
    /// The number of slices into which each microbatch is cut along its sequence, for seq1f1b, by default 2;
    /// for a schedule from a file whose actions number slices, by default 1
    #[arg(long, value_name = "K", value_parser = slices)]
    slices: Option<Slices>,
    /// Let forwards and backwards that follow each other overlap, so that exchanges of experts are hidden, for
    /// interleaved1f1b and zbvzerobubble
    #[arg(long)]
    overlap: bool,
}

impl ScheduleSize {
    /// Returns the specification for the schedule called `name`, which must exist. It includes `costs` if the
    /// schedule depends on them.
    pub fn spec(&self, name: &str, costs: Option<&Costs>) -> Result<ScheduleSpec, Failure> {
        find(name).map_err(Failure::input)?;
        let missing = |flag: &str| {
            Failure::input(format!("{flag} is missing; give a size, such as --ranks 4 --microbatches 8"))
        };
        Ok(ScheduleSpec {
            ranks: self.ranks.ok_or_else(|| missing("--ranks"))?,
            stages_per_rank: self.stages_per_rank,
            microbatches: self.microbatches.ok_or_else(|| missing("--microbatches"))?,
            group_size: self.group_size,
            wide_warmup: self.wide_warmup,
            costs: costs.filter(|_| depends_on_costs(name)).cloned(),
            memory_limit: match self.memory_limit.as_slice() {
                [] => None,
                &[limit] => Some(PerStage::Same(limit)),
                limits => Some(PerStage::Each(limits.to_vec())),
            },
            slices: self.slices,
            overlap: self.overlap,
        })
    }

    /// Returns the number of slices that is given, if any.
    pub fn slices(&self) -> Option<Slices> {
        self.slices
    }

    /// Returns a flag that is given, if any, except `--slices`. A schedule from a file does not accept these
    /// flags.
    pub fn any_flag(&self) -> Option<&'static str> {
        let flags = [
            ("--ranks", self.ranks.is_some()),
            ("--stages-per-rank", self.stages_per_rank.is_some()),
            ("--microbatches", self.microbatches.is_some()),
            ("--group-size", self.group_size.is_some()),
            ("--wide-warmup", self.wide_warmup),
            ("--memory-limit", !self.memory_limit.is_empty()),
            ("--overlap", self.overlap),
        ];
        flags.into_iter().find(|(_, is_given)| *is_given).map(|(flag, _)| flag)
    }
}

/// Reads a number of slices.
pub fn slices(text: &str) -> Result<Slices, String> {
    text.parse().ok().and_then(Slices::new).ok_or_else(|| "use a whole number, at least 1".to_owned())
}

/// Says what the bubble of a schedule is if it has fewer microbatches than ranks.
pub fn say_few_microbatches(schedule: &Schedule) {
    if let Some(note) = few_microbatches(schedule) {
        say(&note.to_string());
    }
}

/// Returns whether a schedule's name is the name of a file.
pub fn is_file_name(name: &str) -> bool {
    schedule_file::is_file(name, Path::new(name))
}

/// Returns the generator's own name of the schedule called `name`, which may be an alias.
pub fn own_name(name: &str) -> String {
    find(name).map_or_else(|_unknown| name.to_ascii_lowercase(), |generator| generator.name.to_owned())
}
