//! The sources of a builder's program, and the lowering of a schedule to a program that trains.

use std::borrow::Cow;

use pipewright_schedule::lower::{TrainingLowering, UnshardConfig, drop_bubbles};
use pipewright_schedule::{Level, LowerConfig, Program, Schedule, ValidatedProgram, lower, validate};

use super::build_error::BuildError;
use super::config::PipelineConfig;

/// The source of a program: the name of a schedule, a schedule, or a program that is already lowered and validated.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum ScheduleSource {
    /// A schedule of the [`catalogue`](pipewright_schedule::generate::catalogue), by its name.
    Named(String),
    /// A schedule without communication that the user made or read.
    Made(Schedule),
    /// A program, which is run unchanged.
    Program(ValidatedProgram),
}

impl From<&str> for ScheduleSource {
    fn from(name: &str) -> Self {
        Self::Named(name.to_owned())
    }
}

impl From<&String> for ScheduleSource {
    fn from(name: &String) -> Self {
        Self::Named(name.clone())
    }
}

impl From<Cow<'_, str>> for ScheduleSource {
    fn from(name: Cow<'_, str>) -> Self {
        Self::Named(name.into_owned())
    }
}

impl From<String> for ScheduleSource {
    fn from(name: String) -> Self {
        Self::Named(name)
    }
}

impl From<Schedule> for ScheduleSource {
    fn from(schedule: Schedule) -> Self {
        Self::Made(schedule)
    }
}

impl From<ValidatedProgram> for ScheduleSource {
    fn from(program: ValidatedProgram) -> Self {
        Self::Program(program)
    }
}

/// Lowers a schedule with these passes, or with the passes that training needs, and validates the program.
pub(super) fn lower_to_run(
    schedule: &Schedule,
    passes: Option<LowerConfig>,
    config: &PipelineConfig,
) -> Result<ValidatedProgram, BuildError> {
    let passes = passes.unwrap_or_else(|| training_passes(config));
    let is_full = passes.reduce_grad.is_some() && passes.unshard.is_some();
    let level = match passes.communicate {
        None => Level::Compute,
        Some(_) if is_full => Level::Full,
        Some(_) => Level::Comms,
    };
    let program = lower(schedule, &passes).map_err(BuildError::Lower)?;
    prove(program, level)
}

/// Validates the user's own schedule before it is lowered, so that violations name the places in that schedule.
pub(super) fn check_made(schedule: &Schedule) -> Result<(), BuildError> {
    prove(drop_bubbles(schedule), Level::Compute).map(drop)
}

fn prove(program: Program, level: Level) -> Result<ValidatedProgram, BuildError> {
    validate(program, level).map_err(|violations| BuildError::Unsound(Box::new(violations)))
}

/// Returns the passes that make a training program from a schedule.
fn training_passes(config: &PipelineConfig) -> LowerConfig {
    LowerConfig::from(TrainingLowering {
        replicas: config.data_parallel,
        unshard_window: config.is_sharded().then(|| UnshardConfig::default().window),
        keep_overlaps: config.hook.as_ref().is_some_and(|hook| hook.runs_overlaps()),
    })
}
