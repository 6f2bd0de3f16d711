//! Schedules that never drain: batches that overlap, because parameters are delayed by one update.
//!
//! Synchronous training computes batch `t` with the parameters that the update with batch `t - 1` has made, so the
//! pipeline drains at every update. Here batch `t` reads the parameters before that update: with `W(-1) = W(0)`,
//! `W(t + 1) = update(W(t), gradient of batch t at W(t - 1))`. The forwards of batch `t + 1` may then follow the forwards of
//! batch `t` while its backwards still run. The delay is one update for every number of stages, and two versions of the
//! parameters exist (PipeDream-2BW, [Narayanan et al., 2021](https://arxiv.org/abs/2006.09503), whose delay this is).
//!
//! A [`Delayed`] schedule has one row per rank, which repeats once per batch: the rest of the older batch mixed with
//! the first actions of the next one. [`Delayed::batches`] writes it out for a number of batches, with the
//! microbatches numbered through: microbatch `i` of batch `t` has the number `t m + i` ([`Schedule::batches`]).
//! Lowering, validation and the timed simulation work on that as on any other schedule, and follow two rules more: a rank
//! computes batch `t + 2` after batch `t` (`validate/batches.rs`), and once all ranks have ended batch `t`, because the
//! update needs the gradient norm over all ranks (`batch_gate.rs`).
//!
//! # Any number of batches
//! If [`Delayed::enough_batches`] batches have no deadlock, no number of batches has one. The cause of a wait is at most
//! one repetition later than what waits: a tensor of the same batch is made at most one repetition later, and the update
//! that a batch needs is in an earlier one. The actions of a rank are in one order, so a shortest cycle of waits visits each
//! rank at most once: if it visits a rank twice, the order of that rank makes a shortcut. Only waits between ranks lead to
//! later repetitions, so the cycle spans at most `p + 1` repetitions, for `p` ranks. Of `p + 3` batches, `p + 2` repetitions
//! are complete. Messages add no cycle: the pass that adds them places each send and its receive at one moment of a run of
//! all ranks.
//!
//! ```
//! use pipewright_schedule::delay::Delayed;
//! use pipewright_schedule::{Costs, ScheduleSpec, generate};
//! let schedule = generate("1f1b", &ScheduleSpec { ranks: 2, microbatches: 4, ..ScheduleSpec::default() })?;
//! let delayed = Delayed::of(&schedule, &Costs::default())?;
//! let row: Vec<String> = delayed.row(0.into()).iter().map(|cell| cell.to_string()).collect();
//! assert_eq!(row.join(" "), "0F1 0B0 0F2 0B1 0F3 0B2 0F0' 0B3");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod delayed_action;
mod taken;
mod weaver;
mod due;
mod stream;
mod weave;

use std::num::NonZeroU32;

pub use self::delayed_action::{DelayError, DelayedAction};
use self::weave::{BatchOrder, weave};
use self::weaver::in_order;
use crate::action::Action;
use crate::costs::Costs;
use crate::ids::{Microbatch, Rank};
use crate::level::Level;
use crate::placement::Placement;
use crate::schedule::{Numbering, Program, Schedule, check_sizes};
use crate::trained::TrainedStages;
use crate::validate::{ValidatedProgram, check};

/// Returns a number of batches whose soundness proves any number sound, for so many ranks (see the [module](self)).
pub fn enough_batches(ranks: u32) -> NonZeroU32 {
    NonZeroU32::MIN.saturating_add(ranks).saturating_add(2)
}

/// The largest number of computations of a batch.
const MOST_ACTIONS: u64 = 2_000_000;

/// A schedule whose batches overlap. See the [module](self).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delayed {
    placement: Placement,
    /// The numbering of one batch.
    numbering: Numbering,
    trained: TrainedStages,
    rows: Vec<Vec<DelayedAction>>,
}

/// Returns `program` with each batch in the order in which batches overlap best at equal costs
/// of all stages. It has only computations, and does not change if its batches cannot overlap.
pub(crate) fn for_overlaps(program: Program) -> Program {
    match Delayed::of(&program.computation(), &Costs::default()) {
        Ok(delayed) => program.map_rows(|rank, _| in_order(delayed.row(rank)).collect()),
        Err(_) => program,
    }
}

impl Delayed {
    /// Makes batches of `schedule` overlap, for the times of `costs`: each rank starts the next batch where it
    /// would wait. It keeps about as many activations as `schedule` itself if that suffices for a full pipeline, and up to
    /// as many more as the largest peak of a rank if it does not. Each rank computes a batch in the order of `schedule`, or as a
    /// stream of microbatches if that fills the pipeline better (see `weave.rs`). Costs of exchanges, recomputation and slices
    /// do not count here, and an overlap is two computations.
    ///
    /// # Errors
    /// When `schedule` has several batches or too many actions, when the costs do not fit, or when its ranks wait for
    /// each other.
    pub fn of(schedule: &Schedule, costs: &Costs) -> Result<Self, DelayError> {
        Self::woven(schedule, costs, BatchOrder::Free)
    }

    fn woven(schedule: &Schedule, costs: &Costs, order: BatchOrder) -> Result<Self, DelayError> {
        if schedule.batches() > 1 {
            return Err(DelayError(
                "the batches of the schedule overlap already; give a schedule of one batch".to_owned(),
            ));
        }
        costs.check(schedule.placement().stages()).map_err(|error| DelayError(error.to_string()))?;
        let actions: u64 = schedule.rows().iter().map(|row| row.len() as u64).sum();
        if actions > MOST_ACTIONS {
            return Err(DelayError(format!(
                "the schedule has {actions} computations, and at most {MOST_ACTIONS} can be made to overlap; use fewer ranks, stages or \
                 microbatches"
            )));
        }
        let alone = Program::without_bubbles(schedule);
        let report = check(&alone, Level::Compute);
        if report.total() > 0 {
            return Err(DelayError(report.into_violations(alone).to_string()));
        }
        let rows = weave(schedule, costs, enough_batches(schedule.ranks()), order)?;
        let (placement, trained) = (schedule.placement().clone(), schedule.trained().clone());
        Ok(Self { placement, numbering: schedule.numbering(), trained, rows })
    }

    /// Makes batches of `program` overlap at `costs`, as [`Delayed::of`] does for a schedule. In a program for training, a
    /// gradient leaves before the gradients of the weights, so batches overlap better.
    ///
    /// # Errors
    /// As [`Delayed::of`].
    pub fn at_costs(program: &ValidatedProgram, costs: &Costs) -> Result<Self, DelayError> {
        Self::of(&program.as_program().computation(), costs)
    }

    /// Makes batches of `program` overlap, for equal costs of all stages, and proves any number of them sound. A rank
    /// computes each batch in the order of its row of the program. The program of a run was lowered for this
    /// ([`LowerConfig::delayed`](crate::LowerConfig::delayed)).
    ///
    /// Collectives among replicas add no deadlock: all replicas run the same rows, and each sends its part at a place before the
    /// one where another one waits for it. So each wait is for an earlier place in the order of a rank, which the proof has.
    ///
    /// # Errors
    /// When actions of the program depend on more than their batch: it moves tensors out of memory or keeps overlaps; or
    /// as [`Delayed::of`].
    pub fn of_program(program: &ValidatedProgram) -> Result<Self, DelayError> {
        let is_refused =
            |action: &&Action| matches!(action, Action::Overlap(_)) || action.kind().is_offload();
        let rows = program.as_program().rows();
        if let Some(action) = rows.iter().flatten().find(is_refused) {
            return Err(DelayError(format!("{action} depends on more than its batch")));
        }
        let delayed = Self::woven(&program.as_program().computation(), &Costs::default(), BatchOrder::Kept)?;
        let batches = Program::without_bubbles(&delayed.batches(delayed.enough_batches())?);
        let report = check(&batches, Level::Compute);
        if report.total() > 0 {
            return Err(DelayError(report.into_violations(batches).to_string()));
        }
        Ok(delayed)
    }

    /// Returns, for each rank, whether each computation of its repeating row belongs to the next batch. The ones of the next
    /// batch are the first computations of a batch, and the others are the rest of it.
    pub fn turns(&self) -> Vec<Vec<bool>> {
        self.rows.iter().map(|row| row.iter().map(|cell| cell.is_next).collect()).collect()
    }

    /// Returns the row of `rank` that repeats; empty if there is no such rank.
    pub fn row(&self, rank: Rank) -> &[DelayedAction] {
        self.rows.get(rank.index()).map_or(&[], Vec::as_slice)
    }

    /// Returns the number of microbatches of a batch; of all their slices, if they are cut.
    pub fn microbatches(&self) -> u32 {
        self.numbering.microbatches
    }

    /// Returns a number of batches whose soundness proves any number sound (see the [module](self)).
    pub fn enough_batches(&self) -> NonZeroU32 {
        enough_batches(self.placement.ranks())
    }

    /// Writes out the rows for `batches` batches: a repetition with the first actions of the first batch alone,
    /// one for each batch, and the last one without a next batch.
    ///
    /// # Errors
    /// When a program does not hold so many actions.
    pub fn batches(&self, batches: NonZeroU32) -> Result<Schedule, DelayError> {
        let too_many = || {
            DelayError(format!(
                "{batches} batches of {} microbatches are more than a schedule holds; use fewer",
                self.microbatches()
            ))
        };
        let microbatches = self.microbatches().checked_mul(batches.get()).ok_or_else(too_many)?;
        let actions: u64 = self.rows.iter().map(|row| row.len() as u64).sum();
        check_sizes(&self.placement, microbatches, self.rows.len(), actions * u64::from(batches.get()))
            .map_err(|_| too_many())?;
        let row = |row: &Vec<DelayedAction>| {
            let mut actions = Vec::with_capacity(row.len() * batches.get() as usize);
            for older in -1..i64::from(batches.get()) {
                for cell in row {
                    let batch = older + i64::from(cell.is_next);
                    if (0..i64::from(batches.get())).contains(&batch) {
                        actions.push(self.numbered(cell.action, batch as u32));
                    }
                }
            }
            actions
        };
        let rows = self.rows.iter().map(row).collect();
        let numbering = Numbering { microbatches, batches, ..self.numbering };
        Ok(Schedule::made(self.placement.clone(), numbering, rows).with_trained(self.trained.clone()))
    }

    /// Returns `action` with the number of its microbatch among all batches.
    fn numbered(&self, action: Action, batch: u32) -> Option<Action> {
        let number = action.microbatch()?.get() + batch * self.microbatches();
        Action::of_microbatch(action.kind(), action.stage(), Microbatch::new(number))
    }
}
