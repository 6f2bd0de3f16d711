//! The note about a schedule with fewer microbatches than ranks, with which the pipeline is never full.
//!
//! It is for schedules with one stage on each rank. Schedules with several stages on each rank are for few
//! microbatches.

use std::fmt;

use crate::action::Action;
use crate::costs::Costs;
use crate::lower::{LowerConfig, TrainingLowering, lower};
use crate::schedule::Schedule;
use crate::simulate::summary::summarize;
use crate::words::counted;

/// The largest number of cells of a schedule that is simulated for the note.
const MAX_SIMULATED: usize = 1 << 16;

/// A schedule with one stage on each rank that trains with fewer microbatches, or slices of them, than it has
/// ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FewMicrobatches {
    /// The number of microbatches, or of all their slices.
    pub microbatches: u32,
    /// The number of ranks.
    pub ranks: u32,
    /// Whether microbatches are cut into slices.
    pub is_sliced: bool,
    /// The bubble of the program that `train` runs, as a share of the step from barrier to barrier, if `F`,
    /// `I` and `W` take equally long and messages take no time; `None` if the schedule is too large to
    /// simulate it.
    pub bubble: Option<f64>,
}

/// Returns the note if a schedule with backwards and one stage on each rank has fewer microbatches than
/// ranks.
///
/// ```
/// use pipewright_schedule::simulate::few_microbatches;
/// use pipewright_schedule::{ScheduleSpec, generate};
/// let schedule = generate("1f1b", &ScheduleSpec { ranks: 4, microbatches: 1, ..ScheduleSpec::default() })?;
/// let bubble = few_microbatches(&schedule).and_then(|note| note.bubble).expect("one microbatch on four ranks");
/// assert!((bubble - 2.0 / 3.0).abs() < 1e-9);
/// # Ok::<(), pipewright_schedule::GenerateError>(())
/// ```
pub fn few_microbatches(schedule: &Schedule) -> Option<FewMicrobatches> {
    let (microbatches, ranks) = (schedule.microbatches(), schedule.ranks());
    let mut actions = schedule.rows().iter().flatten().flatten();
    let has_one_stage = schedule.placement().stages() == ranks;
    if microbatches >= ranks
        || !has_one_stage
        || actions.all(|action| matches!(action, Action::Forward { .. }))
    {
        return None;
    }
    Some(FewMicrobatches {
        microbatches,
        ranks,
        is_sliced: !schedule.slices().is_one(),
        bubble: bubble(schedule),
    })
}

/// Returns the share of a step in which the ranks idle, if it is known or takes little time to simulate.
fn bubble(schedule: &Schedule) -> Option<f64> {
    let cells: usize = schedule.rows().iter().map(Vec::len).sum();
    if cells > MAX_SIMULATED {
        return None;
    }
    // The program that `train` runs, whose gradients leave before the weight gradients are computed.
    let program = lower(schedule, &LowerConfig::from(TrainingLowering::default())).ok()?;
    Some(summarize(&program, &Costs::default()).ok()?.bubble_fraction)
}

impl fmt::Display for FewMicrobatches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let noun = if self.is_sliced { "slice" } else { "microbatch" };
        write!(
            f,
            "{} cannot fill the pipeline of {}: ",
            counted(self.microbatches, noun),
            counted(self.ranks, "rank")
        )?;
        match self.bubble {
            Some(bubble) => write!(
                f,
                "the bubble is {:.0}% of a step if forwards and both halves of backwards take equally long",
                bubble * 100.0
            ),
            None => f.write_str("`pipewright simulate` says how large the bubble is"),
        }?;
        write!(f, "; with {} or more it is smaller", counted(self.ranks, noun))
    }
}
