//! Turns a schedule's name or file into a sound program, and measures the time of each step.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use pipewright_schedule::csv::parse_program;
use pipewright_schedule::footprint::Use;
use pipewright_schedule::lower::{Lowered, ProgramSource, SourceError};
use pipewright_schedule::picture::{TimeUnit, title};
use pipewright_schedule::plan::Prediction;
use pipewright_schedule::simulate::{SimulateError, timed};
use pipewright_schedule::{
    LowerConfig, LowerError, Program, ScheduleSpec, Slices, ValidatedProgram, generate,
};
use pipewright_system::schedule_file::{locate, read};
use pipewright_system::schedule_memory::{check_named, check_text};
use serde::{Serialize, Serializer};

use crate::failure::{Exit, Failure, sentence};
use crate::schedules::size::{own_name, say_few_microbatches};

/// The source of a program.
pub enum Source {
    /// A schedule by its name.
    Named(String, Box<ScheduleSpec>),
    /// A schedule in a file, and the number of slices that its actions number.
    File(PathBuf, Slices),
}

/// A sound program with communication, and the times of the steps that made it.
pub struct TimedProgram {
    /// The name by which the user refers to the schedule.
    pub name: String,
    /// The unit of its simulated times.
    pub unit: TimeUnit,
    /// The program.
    pub program: Program,
    /// How long each part took.
    pub times: EngineTimes,
}

/// The time of each step of the engine. It is written in milliseconds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct EngineTimes {
    /// The time to generate the schedule, or to parse its file.
    #[serde(serialize_with = "milliseconds")]
    pub generate: Duration,
    /// The time to lower it.
    #[serde(serialize_with = "milliseconds")]
    pub lower: Duration,
    /// The time to prove it.
    #[serde(serialize_with = "milliseconds")]
    pub validate: Duration,
    /// The time to simulate it.
    #[serde(serialize_with = "milliseconds")]
    pub simulate: Duration,
}

impl TimedProgram {
    /// Generates or reads a schedule, lowers it with `passes` unless it communicates, and validates the
    /// program.
    pub fn of(source: Source, passes: &LowerConfig) -> Result<Self, Failure> {
        let mut times = EngineTimes::default();
        let name = source.name();
        let source = source.read(Use::Simulate, &mut times)?;
        Self::made(name, source, passes, times)
    }

    /// Lowers a schedule that is called `name` with `passes` unless it communicates, and validates the
    /// program. `times` has the time to make the schedule.
    pub fn made(
        name: String,
        source: ProgramSource,
        passes: &LowerConfig,
        mut times: EngineTimes,
    ) -> Result<Self, Failure> {
        let program = times.prove(&name, source, passes)?.into_program();
        Ok(Self { name, unit: TimeUnit::Costs, program, times })
    }

    /// Does the same, but leaves the proof to the transports on which the program is simulated.
    pub fn unproved(
        name: String,
        source: ProgramSource,
        passes: &LowerConfig,
        mut times: EngineTimes,
    ) -> Result<Self, Failure> {
        let program = times.lower(&name, source, passes)?.into_program();
        Ok(Self { name, unit: TimeUnit::Costs, program, times })
    }

    /// Returns the program of a prediction for a profile, and simulates it again at its costs, to measure the
    /// engine. `times` has the times of the steps that made it.
    pub fn of_prediction(
        name: String,
        prediction: &Prediction,
        mut times: EngineTimes,
    ) -> Result<Self, Failure> {
        let program = prediction.program.as_program().clone();
        times.simulate(|| timed(&program, &prediction.costs)).map_err(refused)?;
        Ok(Self { name, unit: TimeUnit::Seconds, program, times })
    }

    /// Returns the name of the schedule and its size, on one line.
    pub fn title(&self) -> String {
        title(&self.name, &self.program)
    }
}

impl Source {
    /// Returns the name by which the user refers to the schedule.
    pub fn name(&self) -> String {
        match self {
            Self::Named(name, _) => own_name(name),
            Self::File(file, _) => file.display().to_string(),
        }
    }

    /// Generates the schedule, or reads the rows of the file, and adds the time. `work` is what is made of
    /// it.
    pub fn read(self, work: Use, times: &mut EngineTimes) -> Result<ProgramSource, Failure> {
        match self {
            Self::Named(name, spec) => {
                check_named(&name, &spec, work)?;
                let made = times.generate(|| generate(&name, &spec)).map_err(Failure::input)?;
                say_few_microbatches(&made);
                Ok(ProgramSource::Schedule(made))
            }
            Self::File(file, slices) => {
                let text = read(&file).map_err(Failure::input)?;
                check_text(&text, work)?;
                let rows = times.generate(|| parse_program(&text));
                let rows = rows.map_err(|error| Failure::input(locate(&file, &error)))?;
                let uneven = |error| Failure::input(format!("{}: {error}", file.display()));
                Ok(ProgramSource::Rows(rows.with_slices(slices).map_err(uneven)?))
            }
        }
    }
}

impl EngineTimes {
    /// Lowers and validates the program of a source that is called `name`, and adds the times.
    pub fn prove(
        &mut self,
        name: &str,
        source: ProgramSource,
        passes: &LowerConfig,
    ) -> Result<ValidatedProgram, Failure> {
        let exit = exit_of(&source);
        let lowered = self.lower(name, source, passes)?;
        let proved = clocked(&mut self.validate, || lowered.validated());
        proved.map_err(|violations| unsound(name, exit, &LowerError::from(violations).into()))
    }

    /// Lowers a source that is called `name`, and adds the time.
    fn lower(&mut self, name: &str, source: ProgramSource, passes: &LowerConfig) -> Result<Lowered, Failure> {
        let exit = exit_of(&source);
        clocked(&mut self.lower, || source.lowered(passes)).map_err(|error| unsound(name, exit, &error))
    }

    /// Generates or parses a schedule, and adds the time.
    pub fn generate<T>(&mut self, generation: impl FnOnce() -> T) -> T {
        clocked(&mut self.generate, generation)
    }

    /// Runs a simulation and measures its time.
    pub fn simulate<T>(&mut self, simulation: impl FnOnce() -> T) -> T {
        clocked(&mut self.simulate, simulation)
    }

    /// Returns the time of all steps together.
    pub fn total(&self) -> Duration {
        self.generate + self.lower + self.validate + self.simulate
    }
}

/// Returns the exit code if a source is unsound: only rows are the user's own.
fn exit_of(source: &ProgramSource) -> Exit {
    if matches!(source, ProgramSource::Rows(_)) { Exit::CheckFailed } else { Exit::Bug }
}

fn unsound(name: &str, exit: Exit, error: &SourceError) -> Failure {
    Failure::new(exit, format!("{name}: {}", sentence(error)))
}

/// Returns the failure for an error of the simulation. Only costs for another number of stages are a user's
/// mistake: a sound program always runs to its end.
pub fn refused(error: SimulateError) -> Failure {
    match error {
        SimulateError::Costs(error) => Failure::input(error),
        error => Failure::new(Exit::Bug, error),
    }
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
