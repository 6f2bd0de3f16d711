//! Turns a schedule's name or file into a sound program, and measures the time of each step.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pipewright_schedule::csv::{parse_program, parse_schedule};
use pipewright_schedule::lower::TrainingLowering;
use pipewright_schedule::simulate::{SimulateError, timed};
use pipewright_schedule::{
    Costs, Level, LowerConfig, LowerError, Program, Schedule, ScheduleSpec, Slices, generate, lower, validate,
};
use serde::{Serialize, Serializer};

use crate::commands::schedule_level::{implied_level, locate, read};
use crate::commands::schedule_size::{microbatches, own_name};
use crate::failure::{Exit, Failure};

/// The source of a program.
pub(super) enum Source {
    /// A schedule by its name.
    Named(String, Box<ScheduleSpec>),
    /// A schedule in a file, and the number of slices that its actions number.
    File(PathBuf, Slices),
}

/// A sound program with communication, and the times of the steps that made it.
pub(super) struct TimedProgram {
    /// The name by which the user refers to the schedule.
    name: String,
    pub(super) program: Program,
    pub(super) times: EngineTimes,
}

/// The time of each step of the engine. It is written in milliseconds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct EngineTimes {
    /// The time to generate the schedule, or to parse its file.
    #[serde(serialize_with = "milliseconds")]
    pub(super) generate: Duration,
    #[serde(serialize_with = "milliseconds")]
    pub(super) lower: Duration,
    #[serde(serialize_with = "milliseconds")]
    pub(super) validate: Duration,
    #[serde(serialize_with = "milliseconds")]
    pub(super) simulate: Duration,
}

impl TimedProgram {
    /// Generates or reads a schedule, lowers it, and validates the program.
    pub(super) fn of(source: Source) -> Result<Self, Failure> {
        let mut times = EngineTimes::default();
        let (name, program) = match &source {
            Source::Named(name, spec) => {
                let made = clocked(&mut times.generate, || generate(name, spec)).map_err(Failure::input)?;
                let lowered = clocked(&mut times.lower, || lower_to_comms(&made));
                (own_name(name), lowered.map_err(|error| Failure::new(Exit::Bug, error))?)
            }
            Source::File(file, slices) => (file.display().to_string(), from_file(file, *slices, &mut times)?),
        };
        let proved = clocked(&mut times.validate, || validate(program, Level::Comms));
        let program = proved.map_err(|violations| unsound(&name, violations))?.into_program();
        Ok(Self { name, program, times })
    }

    /// Makes the program of a prediction for a profile, and simulates it at its `costs`, to measure each step of the
    /// engine. `times` has the time to generate the schedule.
    pub(super) fn of_prediction(
        name: String,
        schedule: &Schedule,
        costs: &Costs,
        mut times: EngineTimes,
    ) -> Result<Self, Failure> {
        let passes = LowerConfig::from(TrainingLowering::default());
        let lowered = clocked(&mut times.lower, || lower(schedule, &passes));
        let lowered = lowered.map_err(|error| unsound(&name, error))?;
        let proved = clocked(&mut times.validate, || validate(lowered, Level::Comms));
        let program = proved.map_err(|violations| unsound(&name, violations))?.into_program();
        times.simulate(|| timed(&program, costs)).map_err(refused)?;
        Ok(Self { name, program, times })
    }

    /// Returns the name of the schedule and its size, on one line.
    pub(super) fn title(&self) -> String {
        let (program, name) = (&self.program, &self.name);
        let (ranks, stages) = (program.ranks(), program.placement().stages());
        let microbatches = microbatches(program.microbatches(), program.slices());
        format!("{name}: {ranks} ranks, {stages} stages, {microbatches}")
    }
}

impl EngineTimes {
    /// Generates or parses a schedule, and adds the time.
    pub(super) fn generate<T>(&mut self, generation: impl FnOnce() -> T) -> T {
        clocked(&mut self.generate, generation)
    }

    /// Runs a simulation and measures its time.
    pub(super) fn simulate<T>(&mut self, simulation: impl FnOnce() -> T) -> T {
        clocked(&mut self.simulate, simulation)
    }

    /// Returns the time of all steps together.
    pub(super) fn total(&self) -> Duration {
        self.generate + self.lower + self.validate + self.simulate
    }
}

/// Returns the program of a file. Communication is added if the file does not contain any.
fn from_file(file: &Path, slices: Slices, times: &mut EngineTimes) -> Result<Program, Failure> {
    let located = |error| Failure::input(locate(file, &error));
    let uneven = |error| Failure::input(format!("{}: {error}", file.display()));
    let text = read(file)?;
    let program = clocked(&mut times.generate, || parse_program(&text)).map_err(located)?;
    let program = program.with_slices(slices).map_err(uneven)?;
    if implied_level(&program) > Level::Compute {
        return Ok(program);
    }
    let name = file.display().to_string();
    validate(program, Level::Compute).map_err(|violations| unsound(&name, violations))?;
    let schedule = parse_schedule(&text).map_err(located)?.with_slices(slices).map_err(uneven)?;
    clocked(&mut times.lower, || lower_to_comms(&schedule)).map_err(|error| unsound(&name, error))
}

fn lower_to_comms(schedule: &Schedule) -> Result<Program, LowerError> {
    lower(schedule, &LowerConfig::from(Level::Comms))
}

/// Returns the failure for an error of the simulation. Only costs for another number of stages are a user's mistake: a
/// sound program always runs to its end.
pub(super) fn refused(error: SimulateError) -> Failure {
    match error {
        SimulateError::Costs(error) => Failure::input(error),
        error => Failure::new(Exit::Bug, error),
    }
}

fn unsound(name: &str, error: impl std::error::Error) -> Failure {
    Failure::new(Exit::CheckFailed, format!("{name}: {error}"))
}

fn clocked<T>(clock: &mut Duration, step: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let made = step();
    *clock += start.elapsed();
    made
}

fn milliseconds<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(duration.as_secs_f64() * 1e3)
}
