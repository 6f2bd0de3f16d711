//! A generator: the function that makes one schedule, with its name and its settings.
//!
//! Each generator's file declares one. The list of them is in [`super::catalogue`].

use crate::generate::error::GenerateError;
use crate::generate::settings::Setting;
use crate::generate::spec::ScheduleSpec;
use crate::schedule::Schedule;

/// A schedule that can be asked for by name.
#[derive(Debug, Clone, Copy)]
pub struct Generator {
    /// The name, in lower case.
    pub name: &'static str,
    /// What the schedule is good for, in one line.
    pub summary: &'static str,
    /// The settings that it takes beyond the size.
    pub settings: &'static [Setting],
    /// Makes the schedule for a size, or says why it cannot.
    pub(super) generate: fn(&ScheduleSpec) -> Result<Schedule, GenerateError>,
}
