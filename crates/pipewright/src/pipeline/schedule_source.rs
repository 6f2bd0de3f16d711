//! The sources of a builder's program.

use std::borrow::Cow;

use pipewright_schedule::{Schedule, ValidatedProgram};

/// The source of a program: the name of a schedule, a schedule, or a program that is already lowered and
/// validated.
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
