//! The step of a plan whose parameters are delayed by one update ([`crate::delay`]).

use crate::delay::Delayed;
use crate::lower::{LowerError, TrainingLowering, for_training};
use crate::plan::predict::{PlanChoice, PredictError, predict};
use crate::plan::report::Plan;
use crate::plan::request::TrainingState;
use crate::profile::Profile;
use crate::simulate::{peak_memory, steady};
use crate::validate::ValidatedProgram;

/// The fewest batches in which a steady state is looked for.
const FEWEST: u32 = 8;

/// The predicted step of a plan whose batches overlap, once the pipeline is full.
#[derive(Debug, Clone, PartialEq)]
pub struct DelayedStep {
    /// The time from step to step, with the optimizer, which is assumed to overlap with nothing.
    pub step_s: f64,
    /// The mean share of the step without the optimizer in which a rank does not compute.
    pub bubble_fraction: f64,
    /// The peak bytes of each rank of a replica, with a second version of the parameters and the gradients of two batches.
    pub peak_bytes: Vec<u64>,
}

/// The programs whose batches were made to overlap, so that equal ones are searched once.
#[derive(Debug, Default)]
pub struct DelayedPrograms(Vec<(ValidatedProgram, Delayed)>);

impl DelayedPrograms {
    /// Returns `program`, which is of one batch, with overlapping batches. `ordered` makes it in the order of overlaps.
    fn of(
        &mut self,
        program: &ValidatedProgram,
        ordered: impl FnOnce() -> Result<ValidatedProgram, LowerError>,
    ) -> Result<&Delayed, PredictError> {
        let found = self.0.iter().position(|(searched, _)| searched == program);
        let index = match found {
            Some(index) => index,
            None => {
                self.0.push((program.clone(), Delayed::of_program(&ordered()?).map_err(refused)?));
                self.0.len() - 1
            }
        };
        Ok(&self.0[index].1)
    }
}

fn refused(error: impl ToString) -> PredictError {
    PredictError::Choice(error.to_string())
}

impl Plan {
    /// Predicts the step of this plan with parameters that are delayed by one update. `profile` and `state` come from the
    /// request, and `searched` is empty or from other plans.
    ///
    /// # Errors
    /// When the batches of the schedule cannot overlap.
    pub fn delayed_step(
        &self,
        profile: &Profile,
        state: TrainingState,
        searched: &mut DelayedPrograms,
    ) -> Result<DelayedStep, PredictError> {
        let profile = self.used_ranks_of(profile);
        let choice = PlanChoice {
            head_parts: Some(self.head_parts),
            boundaries: self.boundaries.clone(),
            recompute: self.recompute.clone(),
            mesh: self.mesh,
            microbatch_rows: self.microbatch_rows,
            batch_shares: self.batch_shares.clone(),
            state: state.delayed(),
            stream: None,
        };
        if self.stream.is_some() {
            return Err(refused("batches do not overlap while the base is read from its files"));
        }
        let alone = predict(&profile, &self.schedule, &choice)?;
        let lowering = TrainingLowering { delayed: true, ..choice.lowering(&profile) };
        // The rows with which training repeats. It refuses to overlap some programs, for example those that keep overlaps.
        let delayed = searched.of(&alone.program, || for_training(&self.schedule, &lowering))?;
        let batches = delayed.enough_batches().max(std::num::NonZeroU32::MIN.saturating_add(FEWEST - 1));
        let schedule = delayed.batches(batches).map_err(refused)?;
        let program = for_training(&schedule, &lowering)?;
        let steady = steady(program.as_program(), &alone.costs)?;
        let of_one = peak_memory(alone.run.timeline(), &alone.costs.sizes);
        let of_two = steady.peak_bytes.unwrap_or_default();
        let more = of_two.into_iter().zip(of_one).map(|(two, one)| two.saturating_sub(one));
        let peaks = alone.peak_bytes.into_iter().zip(more).map(|(peak, more)| peak.saturating_add(more));
        Ok(DelayedStep {
            step_s: steady.period + alone.optimizer_s,
            bubble_fraction: steady.bubble_fraction,
            peak_bytes: peaks.collect(),
        })
    }
}
