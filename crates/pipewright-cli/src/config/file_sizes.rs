//! The sizes of a schedule that is read from a file, beside those that are written in the configuration.

use std::path::Path;

use pipewright_schedule::Program;
use pipewright_schedule::csv::parse_program;
use pipewright_schedule::footprint::Use;

use crate::config::pipeline::{PipelineSettings, ScheduleChoice};
use crate::config::place::Place;
use crate::config::problem::ProblemKind;
use crate::config::section::Section;
use crate::schedules::file::{self as schedule_file, ScheduleFileError};
use crate::schedules::memory::check_text;

/// Refuses sizes that differ from those of the schedule's file.
///
/// A schedule from `--set` replaces the schedule and the sizes of the configuration file, and a note says so.
/// A file that cannot be read is reported when the schedule is made.
pub(super) fn check_file_sizes(section: &mut Section<'_>, pipeline: &PipelineSettings, replicas: u32) {
    let ScheduleChoice::Csv(file) = &pipeline.schedule else { return };
    let replaces_sizes = matches!(section.place("schedule"), Place::Set { .. });
    let sizes = [
        ("ranks", pipeline.ranks),
        ("stages_per_rank", pipeline.stages_per_rank),
        ("microbatches", pipeline.microbatches),
    ];
    if !sizes.iter().any(|(key, _)| section.is_written(key)) {
        return;
    }
    let Ok(program) = read_schedule_file(file) else { return };
    let placement = program.placement();
    let stages_per_rank = placement.all_ranks().map(|rank| placement.stages_of(rank).len() as u64).max();
    let found = [
        u64::from(program.ranks()),
        stages_per_rank.unwrap_or(1),
        u64::from(program.microbatches()) * u64::from(replicas),
    ];
    for ((key, value), found) in sizes.into_iter().zip(found) {
        if u64::from(value) == found {
            continue;
        }
        match section.place(key) {
            Place::Default => {}
            Place::File { source, .. } if replaces_sizes => {
                let written = section.text("schedule").unwrap_or_default();
                let shared = match replicas {
                    replicas if replicas > 1 && key == "microbatches" => format!(" for {replicas} replicas"),
                    _ => String::new(),
                };
                let name = &source.name;
                section
                    .note(format!("{key} = {value} of {name} is replaced by {found} of {written}{shared}"));
            }
            Place::File { .. } | Place::Set { .. } => {
                section.report(key, ProblemKind::NotOfFile { key, value, file: file.clone(), found });
            }
        }
    }
}

/// Reads the actions of a schedule's file. It is read several times, so it may not be a pipe.
pub(super) fn read_schedule_file(file: &Path) -> Result<Program, ScheduleFileError> {
    let text = schedule_file::read_regular(file)?;
    check_text(&text, Use::Simulate)?;
    parse_program(&text).map_err(|source| ScheduleFileError::Csv { path: file.to_owned(), source })
}
