//! A schedule whose batches overlap, because parameters are delayed by one update, for `simulate --delay 1` and `view --delay 1`.

use std::num::NonZeroU32;

use pipewright_schedule::delay::{Delayed, enough_batches};
use pipewright_schedule::lower::ProgramSource;
use pipewright_schedule::simulate::{Steady, steady};
use pipewright_schedule::{Costs, LowerConfig, Schedule};
use serde::Serialize;

use crate::failure::Failure;
use crate::schedules::simulation_text::{Lines, list, percent};
use crate::schedules::timed_program::{EngineTimes, TimedProgram, refused};

/// The number of batches in a picture: the pipeline fills in the first one and drains in the last.
const DRAWN: NonZeroU32 = NonZeroU32::MIN.saturating_add(2);

/// The fewest batches in which a steady state is looked for.
const FEWEST: NonZeroU32 = NonZeroU32::MIN.saturating_add(7);

/// The largest number of computations that are simulated.
const MOST_COMPUTATIONS: u64 = 20_000_000;

/// A schedule whose batches overlap, and its steady state.
pub struct DelayedRun<'a> {
    delayed: Delayed,
    costs: &'a Costs,
    passes: &'a LowerConfig,
    /// The program of as many batches as were simulated.
    simulated: TimedProgram,
    steady: Steady,
}

/// The output of `--format json`.
#[derive(Serialize)]
struct Report<'a> {
    /// The number of updates by which parameters are delayed.
    delay: u32,
    #[serde(flatten)]
    steady: &'a Steady,
    /// The number of batches that were simulated.
    batches: u32,
    engine_ms: &'a EngineTimes,
}

impl<'a> DelayedRun<'a> {
    /// Makes the batches of `schedule`, which is called `name`, overlap at `costs`, proves that any number of them is
    /// sound if lowered with `passes`, and simulates them.
    pub fn of(
        name: String,
        schedule: &Schedule,
        (costs, passes): (&'a Costs, &'a LowerConfig),
        mut times: EngineTimes,
    ) -> Result<Self, Failure> {
        let batches = enough_batches(schedule.ranks()).max(FEWEST);
        let computations: u64 = schedule.rows().iter().map(|row| row.len() as u64).sum();
        if computations * u64::from(batches.get()) > MOST_COMPUTATIONS {
            return Err(Failure::input(format!(
                "{batches} batches of {computations} computations prove that any number is sound, and at most \
                 {MOST_COMPUTATIONS} computations are simulated; use fewer ranks, stages or microbatches"
            )));
        }
        let alone = times.prove(&name, ProgramSource::Schedule(schedule.clone()), passes)?;
        let delayed = times.generate(|| Delayed::at_costs(&alone, costs)).map_err(Failure::input)?;
        let mut simulated = program(name, &delayed, batches, passes, times)?;
        let steady = simulated.times.simulate(|| steady(&simulated.program, costs)).map_err(refused)?;
        Ok(Self { delayed, costs, passes, simulated, steady })
    }

    /// Returns the program of three batches, for pictures and events, and its costs.
    pub fn drawn(&self) -> Result<(TimedProgram, &Costs), Failure> {
        let TimedProgram { name, times, .. } = &self.simulated;
        Ok((program(name.clone(), &self.delayed, DRAWN, self.passes, *times)?, self.costs))
    }

    /// Returns the steady state as JSON.
    pub(crate) fn json(&self) -> String {
        let TimedProgram { program, times, .. } = &self.simulated;
        let report = Report { delay: 1, steady: &self.steady, batches: program.batches(), engine_ms: times };
        serde_json::to_string(&report).expect("numbers can be written as JSON") + "\n"
    }

    /// Returns the steady state as text.
    pub(crate) fn text(&self) -> String {
        let Steady { period, bubble_fraction, bubble_per_rank, peak_activations, .. } = &self.steady;
        let mut lines = Lines::of(&self.simulated);
        lines.add("period", lines.time(*period) + " from batch to batch, once the pipeline is full");
        lines.add("bubble", format!("{} of the period", percent(*bubble_fraction)));
        lines.add("by rank", list(bubble_per_rank.iter().map(|&fraction| percent(fraction)), " "));
        let held = " activations at most, by rank, and two versions of the parameters";
        lines.add("memory", list(peak_activations.iter().map(u64::to_string), " ") + held);
        lines.add_engine(&self.simulated.times);
        lines.into_text()
    }
}

/// Lowers and proves so many batches.
fn program(
    name: String,
    delayed: &Delayed,
    batches: NonZeroU32,
    passes: &LowerConfig,
    mut times: EngineTimes,
) -> Result<TimedProgram, Failure> {
    let schedule = times.generate(|| delayed.batches(batches)).map_err(Failure::input)?;
    TimedProgram::made(name, ProgramSource::Schedule(schedule), passes, times)
}
