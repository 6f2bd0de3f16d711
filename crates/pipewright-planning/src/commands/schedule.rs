//! `pipewright schedule`: prints a schedule, or the program that it is lowered to.

use std::fmt::Write;

use clap::{Args, ValueEnum};
use pipewright_schedule::footprint::Use;
use pipewright_schedule::generate::{catalogue, depends_on_costs};
use pipewright_schedule::lower::ProgramSource;
use pipewright_schedule::picture::{TimeGrid, TimeUnit};
use pipewright_schedule::simulate::timed;
use pipewright_schedule::words::counted;
use pipewright_schedule::{
    Action, Costs, Level, LowerConfig, Placement, Program, Schedule, Timeline, csv, generate, lower, picture,
};
use pipewright_system::schedule_memory::check_named;
use serde_json::json;

use crate::argument_values::Hinted;
use crate::failure::{Exit, Failure};
use crate::output::{self, PageOutput, page_of};
use crate::schedules::drawing::{Picture, PictureArguments, check_cells, check_size, json_rows};
use crate::schedules::size::{ScheduleSize, is_file_name, own_name, say_few_microbatches};
use crate::schedules::timed_program::refused;

/// The arguments of `pipewright schedule`.
#[derive(Debug, Args)]
pub struct ScheduleArguments {
    /// The schedule, without regard to case
    #[arg(required_unless_present = "list", value_parser = Hinted::schedules(), hide_possible_values = true)]
    name: Option<String>,
    /// Print the names and descriptions of all schedules
    #[arg(long, exclusive = true)]
    list: bool,
    #[command(flatten)]
    size: ScheduleSize,
    /// The costs of actions, for zb-greedy and vocab1f1b, and for the grid and the pictures; the default is
    /// 1, but 0 for a hop
    #[arg(long, value_name = "F=1,I=1,W=1,hop=0.1")]
    cost: Option<Costs>,
    /// The level to lower to: compute, comms (adds sends and receives) or full (adds sharding and reduction)
    #[arg(long, default_value = "compute")]
    level: Level,
    /// The form of the output
    #[arg(long, value_enum, default_value = "csv")]
    format: Format,
    #[command(flatten)]
    picture: PictureArguments,
    #[command(flatten)]
    output: PageOutput,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// One row per rank, in PyTorch's format
    Csv,
    /// A table for people: when each rank computes what, and with a level, its actions one after another
    Grid,
    /// The same rows as JSON, with the rank of each stage
    Json,
    /// A drawing of the predicted run, to scale
    Svg,
    /// The predicted run as a page to explore in a browser: zoom, hover, memory of each rank
    Html,
    /// The predicted run for Perfetto and chrome://tracing
    Trace,
}

/// Runs the command.
pub(crate) fn run(arguments: &ScheduleArguments) -> Result<(), Failure> {
    let Some(name) = &arguments.name else { return output::write(None, &list()) };
    if is_file_name(name) {
        return Err(Failure::input(format!(
            "{name}: this command makes schedules by name; for a file use `pipewright lower`, `validate` or `simulate`"
        )));
    }
    arguments.picture.check(arguments.format.picture(), &arguments.output)?;
    let mut spec = arguments.size.spec(name, arguments.cost.as_ref())?;
    if !arguments.is_timed() && arguments.cost.is_some() && !depends_on_costs(name) {
        // The generator refuses costs that have no effect.
        spec.costs.clone_from(&arguments.cost);
    }
    check_named(name, &spec, arguments.needs())?;
    let schedule = generate(name, &spec).map_err(Failure::input)?;
    say_few_microbatches(&schedule);
    let text = print(&schedule, arguments, name)?;
    arguments.output.write(&text, || page_of(&own_name(name), arguments.format.extension()))
}

impl ScheduleArguments {
    /// Returns whether the output shows when ranks compute, which depends on costs.
    fn is_timed(&self) -> bool {
        self.format.picture().is_some() || self.has_time_grid()
    }

    /// Returns whether the output is a table with columns of time.
    fn has_time_grid(&self) -> bool {
        self.format == Format::Grid && self.level == Level::Compute
    }

    /// Returns what is made of the schedule.
    fn needs(&self) -> Use {
        match self.level {
            _ if self.format == Format::Trace => Use::Trace,
            _ if self.is_timed() => Use::Simulate,
            Level::Compute => Use::Generate,
            Level::Comms | Level::Full => Use::Lower,
        }
    }
}

impl Format {
    /// Returns the ending of a file in this format.
    fn extension(self) -> &'static str {
        self.picture().map_or("txt", Picture::extension)
    }

    /// Returns the picture of a run, if the format is a picture.
    fn picture(self) -> Option<Picture> {
        match self {
            Self::Csv | Self::Grid | Self::Json => None,
            Self::Svg => Some(Picture::Svg),
            Self::Html => Some(Picture::Html),
            Self::Trace => Some(Picture::Trace),
        }
    }
}

fn list() -> String {
    let width = catalogue().iter().map(|generator| generator.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for generator in catalogue() {
        let also = match generator.aliases {
            [] => String::new(),
            aliases => format!(" (also: {})", aliases.join(", ")),
        };
        writeln!(text, "{:width$}  {}{also}", generator.name, generator.summary)
            .expect("a string takes all text");
    }
    text
}

fn print(schedule: &Schedule, arguments: &ScheduleArguments, name: &str) -> Result<String, Failure> {
    let ScheduleArguments { level, format, .. } = *arguments;
    if let Some(picture) = format.picture() {
        let (program, timeline) = predicted(schedule, level, arguments.cost.as_ref())?;
        let name = own_name(name);
        let (ranks, microbatches) = (
            counted(schedule.ranks(), "rank"),
            picture::microbatches_in_words(schedule.microbatches(), schedule.slices()),
        );
        let title = format!("{name}: {ranks}, {microbatches}");
        return Ok(picture.draw(&timeline, &program, &title, TimeUnit::Costs, &arguments.picture));
    }
    if arguments.has_time_grid() {
        let (_, timeline) = predicted(schedule, level, arguments.cost.as_ref())?;
        let grid = TimeGrid::of(&timeline);
        check_cells(grid.cells())?;
        return Ok(grid.to_string());
    }
    if level == Level::Compute {
        if format == Format::Csv {
            return Ok(csv::print_schedule(schedule));
        }
        check_cells(schedule.rows().iter().map(|row| row.len() as u64).sum())?;
        let rows = schedule.rows().iter().map(|row| row.iter().copied());
        return Ok(print_rows(rows, schedule.placement(), arguments));
    }
    let program = program(schedule, level)?;
    if format == Format::Csv {
        return Ok(csv::print_program(&program));
    }
    check_size(&program)?;
    let rows = program.rows().iter().map(|row| row.iter().copied().map(Some));
    Ok(print_rows(rows, program.placement(), arguments))
}

/// Returns rows as a table or as JSON.
fn print_rows<Row: IntoIterator<Item = Option<Action>>>(
    rows: impl IntoIterator<Item = Row>,
    placement: &Placement,
    arguments: &ScheduleArguments,
) -> String {
    if arguments.format == Format::Grid {
        return picture::grid(rows, &[]);
    }
    let stage_to_rank: Vec<u32> =
        placement.all_stages().map(|stage| placement.rank_of(stage).get()).collect();
    let level = arguments.level;
    json!({ "level": level, "stage_to_rank": stage_to_rank, "rows": json_rows(rows) }).to_string() + "\n"
}

fn program(schedule: &Schedule, level: Level) -> Result<Program, Failure> {
    lower(schedule, &LowerConfig::from(level)).map_err(|error| Failure::new(Exit::Bug, error))
}

/// Returns a program and its predicted run. The time at which a rank can continue depends on messages, so
/// there is always communication. At the level `compute`, the program is the one that `train` runs, and the
/// run has the schedule's own computations alone.
fn predicted(
    schedule: &Schedule,
    level: Level,
    costs: Option<&Costs>,
) -> Result<(Program, Timeline), Failure> {
    // Before the lowering, which takes time.
    check_cells(schedule.rows().iter().map(|row| row.len() as u64).sum())?;
    let program = match level {
        Level::Compute => {
            let lowered = ProgramSource::Schedule(schedule.clone())
                .program(&LowerConfig::training_at(costs.unwrap_or(&Costs::default())));
            lowered.map_err(|error| Failure::new(Exit::Bug, error))?.into_program()
        }
        level => program(schedule, level)?,
    };
    check_size(&program)?;
    let run = timed(&program, costs.unwrap_or(&Costs::default())).map_err(refused)?;
    let timeline = match level {
        Level::Compute => picture::computation_of(schedule, run.timeline()),
        _ => run.timeline().clone(),
    };
    Ok((program, timeline))
}
