//! Measures the schedule engine: generate, lower, validate and simulate, each by itself and together, and the
//! time per action as schedules grow.
//!
//! The engine is judged by 64 ranks with 2 chunks each and 256 microbatches, all steps together. The
//! allocator is the command line's, which puts large tables on huge pages. The system's allocator would
//! return them to the system after each iteration, and the figures would include the time in which the system
//! clears the pages again.

use std::hint::black_box;

use pipewright_schedule::simulate::{logical, timed};
use pipewright_schedule::{
    Costs, Level, LowerConfig, Program, Schedule, ScheduleSpec, generate, lower, validate,
};

use crate::harness::{Outcome, Spread, seconds};

/// Size of the measurement.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Runs of each step that count.
    #[arg(long, default_value_t = 10)]
    runs: usize,
    /// Also measures 1,024 ranks with 4 chunks and 4,096 microbatches, which takes one and a half gigabytes
    /// and minutes.
    #[arg(long)]
    largest: bool,
}

/// Ranks, chunks of a rank, microbatches.
type Size = (u32, u32, u32);

/// The size by which the engine is judged.
const PLANNING: Size = (64, 2, 256);

pub(crate) fn run(options: &Options) -> Outcome {
    planning(options.runs)?;
    let mut sizes = vec![(16, 2, 64), PLANNING, (256, 2, 1024)];
    sizes.extend(options.largest.then_some((1024, 4, 4096)));
    println!("nanoseconds per action for generate, lower and validate together");
    for size in sizes {
        let (ranks, chunks, microbatches) = size;
        let actions = actions(&lowered(&schedule(size)?)?) as f64;
        let times =
            times(options.runs, || validate(lowered(&schedule(size)?)?, Level::Comms).map_err(Into::into))?;
        let per_action = times.into_iter().map(|seconds| seconds * 1e9 / actions).collect();
        println!(
            "  {ranks} ranks x {chunks} chunks x {microbatches} microbatches: {}",
            Spread::new(per_action)
        );
    }
    Ok(())
}

/// Measures each step of the engine at the size by which it is judged.
fn planning(runs: usize) -> Outcome {
    let made = schedule(PLANNING)?;
    let program = lowered(&made)?;
    let costs = Costs::default();
    println!("milliseconds for {PLANNING:?}, {} actions", actions(&program));
    show("generate", times(runs, || schedule(PLANNING))?);
    show("lower", times(runs, || lowered(black_box(&made)))?);
    show("validate", times_with(runs, || program.clone(), |program| Ok(validate(program, Level::Comms)?))?);
    show("simulate, logical", times(runs, || Ok(logical(black_box(&program))?.steps()))?);
    show("simulate, timed", times(runs, || Ok(timed(black_box(&program), &costs)?))?);
    let whole = || {
        let program = validate(lowered(&schedule(PLANNING)?)?, Level::Comms)?;
        Ok(logical(program.as_program())?.steps())
    };
    show("generate, lower, validate, simulate", times(runs, whole)?);
    Ok(())
}

fn show(name: &str, times: Vec<f64>) {
    println!("  {name}: {}", Spread::new(times.into_iter().map(|seconds| seconds * 1e3).collect()));
}

/// Returns the seconds of each run of `work`, after one that does not count.
fn times<T>(runs: usize, mut work: impl FnMut() -> Outcome<T>) -> Outcome<Vec<f64>> {
    times_with(runs, || (), |()| work())
}

/// Like [`times`], but each run has an input, and the time to make it does not count.
fn times_with<I, T>(
    runs: usize,
    mut input: impl FnMut() -> I,
    mut work: impl FnMut(I) -> Outcome<T>,
) -> Outcome<Vec<f64>> {
    drop(work(input())?);
    let timed = |_| {
        let input = input();
        seconds(|| work(input).map(black_box))
    };
    (0..runs).map(timed).collect()
}

fn schedule((ranks, chunks, microbatches): Size) -> Outcome<Schedule> {
    let spec = ScheduleSpec { ranks, stages_per_rank: Some(chunks), microbatches, ..ScheduleSpec::default() };
    Ok(generate("interleaved1f1b", &spec)?)
}

fn lowered(schedule: &Schedule) -> Outcome<Program> {
    Ok(lower(schedule, &LowerConfig::from(Level::Comms))?)
}

fn actions(program: &Program) -> u64 {
    program.rows().iter().map(|row| row.len() as u64).sum()
}
