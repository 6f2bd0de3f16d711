//! A generator: the function that makes one schedule, with its name and its settings.
//!
//! Each generator's file declares one. The list of them is in [`super::catalogue`].

use crate::generate::error::GenerateError;
use crate::generate::guide::Guide;
use crate::generate::settings::Setting;
use crate::generate::spec::ScheduleSpec;
use crate::schedule::Schedule;

/// A generator, found by the name of its schedule.
#[derive(Debug, Clone, Copy)]
pub struct Generator {
    /// The name, in lower case.
    pub name: &'static str,
    /// Other names for it, in lower case. Spellings that differ only in hyphens need no entry.
    pub aliases: &'static [&'static str],
    /// The use of the schedule, in one line.
    pub summary: &'static str,
    /// The settings that it takes besides the size.
    pub settings: &'static [Setting],
    /// Whether every model can train with the schedule: it runs whole microbatches, forward and backward.
    pub trains: bool,
    /// The description for readers who choose a schedule.
    pub guide: Guide,
    /// Makes the schedule for a size.
    pub(super) generate: fn(&ScheduleSpec) -> Result<Schedule, GenerateError>,
}

impl Generator {
    /// Returns the name and the aliases.
    pub(super) fn names(&self) -> impl Iterator<Item = &'static str> {
        [self.name].into_iter().chain(self.aliases.iter().copied())
    }
}
