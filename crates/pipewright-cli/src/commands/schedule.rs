//! `pipewright schedule`: prints a schedule, or the program that it is lowered to.

use std::fmt::Write;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use pipewright_schedule::generate::catalogue;
use pipewright_schedule::simulate::logical;
use pipewright_schedule::{
    Level, LowerConfig, Program, Schedule, ScheduleSpec, Timeline, csv, generate, lower, picture,
};

use crate::failure::{Exit, Failure};
use crate::output;

/// The arguments of `pipewright schedule`.
#[derive(Debug, Args)]
pub(crate) struct ScheduleArguments {
    /// The schedule, without regard to case
    #[arg(required_unless_present = "list")]
    name: Option<String>,
    /// Print the names of all schedules, with a line on each
    #[arg(long, exclusive = true)]
    list: bool,
    /// Workers in the pipeline
    #[arg(long, value_name = "P", required_unless_present = "list")]
    ranks: Option<u32>,
    /// Stages on each rank; without it, what the schedule needs
    #[arg(long, value_name = "V")]
    stages_per_rank: Option<u32>,
    /// Microbatches in a step
    #[arg(long, value_name = "M", required_unless_present = "list")]
    microbatches: Option<u32>,
    /// How far to lower: compute, comms (adds sends and receives) or full (adds sharding and reduction)
    #[arg(long, default_value = "compute")]
    level: Level,
    /// What to print
    #[arg(long, value_enum, default_value = "csv")]
    format: Format,
    /// The file to write; without it, standard output
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Format {
    /// One row a rank, which PyTorch reads too
    Csv,
    /// A table for people
    Grid,
    /// A picture in which every action takes one tick
    Svg,
    /// The same for Perfetto and chrome://tracing
    Trace,
}

/// Runs the command.
pub(crate) fn run(arguments: &ScheduleArguments) -> Result<(), Failure> {
    let file = arguments.output.as_deref();
    let (Some(name), Some(ranks), Some(microbatches)) =
        (&arguments.name, arguments.ranks, arguments.microbatches)
    else {
        return output::write(None, &list());
    };
    let spec = ScheduleSpec {
        ranks,
        stages_per_rank: arguments.stages_per_rank,
        microbatches,
        ..ScheduleSpec::default()
    };
    let schedule = generate(name, &spec).map_err(Failure::input)?;
    output::write(file, &print(&schedule, arguments.level, arguments.format)?)
}

fn list() -> String {
    let width = catalogue().iter().map(|generator| generator.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for generator in catalogue() {
        writeln!(text, "{:width$}  {}", generator.name, generator.summary).expect("a string takes all text");
    }
    text
}

fn print(schedule: &Schedule, level: Level, format: Format) -> Result<String, Failure> {
    Ok(match (format, level) {
        (Format::Csv, Level::Compute) => csv::print_schedule(schedule),
        (Format::Csv, _) => csv::print_program(&program(schedule, level)?),
        (Format::Grid, Level::Compute) => {
            let ranks = schedule.placement().all_ranks();
            picture::grid(ranks.map(|rank| schedule.row(rank).iter().copied()), &[])
        }
        (Format::Grid, _) => {
            let program = program(schedule, level)?;
            picture::grid(program.rows().iter().map(|row| row.iter().copied().map(Some)), &[])
        }
        (Format::Svg, _) => picture::svg(&timeline(schedule, level)?),
        (Format::Trace, _) => timeline(schedule, level)?.chrome_trace(),
    })
}

fn program(schedule: &Schedule, level: Level) -> Result<Program, Failure> {
    lower(schedule, &LowerConfig::from(level)).map_err(|error| Failure::new(Exit::Bug, error))
}

/// Each action at its tick. When a rank can go on depends on messages, so the ticks are those of the program with
/// communication at any level; the level `compute` shows its computation alone.
fn timeline(schedule: &Schedule, level: Level) -> Result<Timeline, Failure> {
    let program = program(schedule, level.max(Level::Comms))?;
    let run = logical(&program).map_err(|error| Failure::new(Exit::Bug, error))?;
    let timeline = run.timeline(1.0);
    if level > Level::Compute {
        return Ok(timeline);
    }
    let compute = timeline.events().iter().filter(|event| event.action.is_compute()).copied();
    Ok(Timeline::new(timeline.ranks(), compute.collect()))
}
