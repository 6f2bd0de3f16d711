//! [`StepFailure`]: where a step failed, in the schedule and on each rank.

use std::fmt;

use pipewright_schedule::error_text::with_causes;
use pipewright_schedule::picture::grid_around;
use pipewright_schedule::simulate::logical;
use pipewright_schedule::{Rank, Timeline, ValidatedProgram};

use crate::driver::FailedRank;
use crate::failure::{Cause, StepError};
use crate::ids::WorldRank;
use crate::mesh::{Mesh, RankGroups};
use crate::progress::ProgressBoard;
use crate::verification::{Difference, Suspicion};

/// A failed step, as [`Pipeline::step_failure`](super::Pipeline::step_failure) returns it. Its text shows the
/// schedule around the action that failed, and the last actions of each rank:
///
/// ```text
/// the schedule around the failure, which has the mark `!`; each action takes one tick:
///         0    1         2         3     4         5
/// rank 0  0F0  0SEND_F0  0F1       ...
/// rank 1  .    .         1RECV_F0  1F0!  1B0       1SEND_B0
/// the last actions of each rank:
///   rank 0: 4 of 8 done (0F0 0SEND_F0 0F1 0SEND_F1), is at 0RECV_B0, computes
///   rank 1: 1 of 8 done (1RECV_F0), is at 1F0, computes
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StepFailure {
    /// The first error.
    pub error: StepError,
    /// The schedule around the action that failed, which has a mark. Each action takes one tick. A failure
    /// after the program, such as a loss that is not finite, has its mark after the last action.
    pub grid: String,
    /// One line per rank: its last actions, and what it did when the step failed.
    pub report: String,
    /// The actions of this process's ranks until the failure. The last event of the rank that failed is the
    /// action that failed. A rank that had finished the step has no events.
    pub timeline: Timeline,
    /// Why the step was repeated before it failed
    /// ([`PipelineConfig::verify`](super::PipelineConfig::verify)); `None` if it was not.
    pub suspicion: Option<Suspicion>,
    /// The number of computations of the step after the first one.
    pub repetitions: u32,
    /// The first result that was computed with different bits, if the last repetition has confirmed bits and
    /// fails nevertheless, for example because a gradient is not finite in every computation; `None`
    /// otherwise. [`Cause::Unconfirmed`] has the difference of a repetition without confirmed bits.
    pub difference: Option<Difference>,
    /// The error of a rank that did not stop in the next step, which had begun already. The pipeline takes no
    /// further step then. `None` if all ranks have stopped.
    pub lost: Option<StepError>,
}

impl StepFailure {
    pub(super) fn new(
        error: StepError,
        mut ranks: Vec<FailedRank>,
        board: &ProgressBoard,
        mesh: &Mesh,
    ) -> Self {
        let report = ranks.iter_mut().find_map(|rank| rank.report.take()).unwrap_or_else(|| board.report());
        // On the board the rank may be in the next step. Ranks of other processes are only there.
        let own = ranks.iter().find(|rank| rank.rank == error.rank).map(|rank| rank.position);
        let grid = board.position_of(error.rank).map(|(program, done)| {
            grid_of(&program, board.row_of(error.rank, &program), &error, own.unwrap_or(done))
        });
        // A tensor group has one row, for the rank that failed or for its first rank.
        let is_shown = |rank: WorldRank| {
            if mesh.timeline_row(rank) == mesh.timeline_row(error.rank) {
                rank == error.rank
            } else {
                rank.get().is_multiple_of(mesh.tensor)
            }
        };
        let difference = ranks.iter_mut().find_map(|rank| rank.difference.take());
        let shown = ranks.into_iter().filter(|failed| is_shown(failed.rank));
        let events = shown.flat_map(|failed| failed.events).collect();
        let timeline = Timeline::new(mesh.pipeline * mesh.data, events);
        let grid = grid.unwrap_or_default();
        let (suspicion, repetitions, lost) = (None, 0, None);
        Self { error, grid, report, timeline, suspicion, repetitions, difference, lost }
    }
}

/// Draws the schedule around the error on the row `rank`. `done` is the number of actions that its rank has
/// done.
fn grid_of(program: &ValidatedProgram, rank: Rank, error: &StepError, done: usize) -> String {
    let row = program.row(rank);
    // A row may have equal actions, which gather and release a stage several times.
    let failed = error.action.and_then(|action| {
        if row.get(done) == Some(&action) {
            Some(done)
        } else {
            row.iter().position(|&other| other == action)
        }
    });
    let Ok(run) = logical(program.as_program()) else { return String::new() };
    let ticks = run.ticks(rank);
    let after = ticks.last().map_or(0, |&last| last + 1);
    let tick = ticks.get(failed.unwrap_or(done)).copied().unwrap_or(after);
    grid_around(program.placement().all_ranks().map(|rank| run.row(rank)), rank, tick as usize)
}

impl fmt::Display for StepFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "the schedule around the failure, which has the mark `!`; each action takes one tick:\n",
        )?;
        f.write_str(self.grid.trim_end())?;
        // The message of these causes has the report.
        if !matches!(self.error.cause, Cause::Deadline { .. } | Cause::SilentPeer { .. }) {
            write!(f, "\nthe last actions of each rank:\n{}", self.report)?;
        }
        if let Some(lost) = &self.lost {
            let error = with_causes(lost);
            write!(
                f,
                "\na rank did not stop in the next step, so the pipeline takes no further one: {error}"
            )?;
        }
        Ok(())
    }
}
