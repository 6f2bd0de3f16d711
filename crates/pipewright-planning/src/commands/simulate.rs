//! `pipewright simulate`: predicts when each rank runs each action, and prints how long the prediction took.

use std::path::PathBuf;
use std::time::Instant;

use clap::{Args, ValueEnum};
use pipewright_schedule::csv::print_rows;
use pipewright_schedule::footprint::Use;
use pipewright_schedule::lower::ProgramSource;
use pipewright_schedule::simulate::{LogicalRun, SimulateError, Summary, logical, timed};
use pipewright_schedule::{Costs, Level, LowerConfig, Recompute, Timeline, picture};

use crate::argument_values::Hinted;
use crate::failure::{Exit, Failure};
use crate::output::{PageOutput, page_of};
use crate::plans::prediction::{Predicted, ProfileArguments};
use crate::schedules::delayed::DelayedRun;
use crate::schedules::drawing::{Picture, PictureArguments, check_cells, check_exchanges, check_size};
use crate::schedules::simulation_text::{activations, events, json, text};
use crate::schedules::size::{ScheduleSize, is_file_name, own_name};
use crate::schedules::timed_program::{EngineTimes, Source, TimedProgram, refused};
use crate::schedules::transport::TransportArguments;
use crate::schedules::transport_price::{Price, Priced};

/// The arguments of `pipewright simulate`.
#[derive(Debug, Args)]
pub struct SimulateArguments {
    /// The schedule, without regard to case
    #[arg(required_unless_present = "csv", conflicts_with = "csv", value_parser = Hinted::schedules(), hide_possible_values = true)]
    name: Option<String>,
    /// A schedule from a file, instead of a name: one row per rank, with or without communication
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    #[command(flatten)]
    size: ScheduleSize,
    /// Count every action, including messages, as one tick
    #[arg(long, conflicts_with = "cost")]
    logical: bool,
    /// The program to simulate, for a schedule without communication: as PyTorch lowers it to a level; by
    /// default, the program that `train` runs, or with --logical the level comms
    #[arg(long, value_enum, conflicts_with = "profile")]
    level: Option<SimulatedLevel>,
    /// The costs of actions, in any one unit; the default is 1, but I + W for B (and halves of B for I and W
    /// if it is given) and 0 for a hop; F=1:1:2 gives each stage its own cost; attention=0.3 is the share of
    /// F and I that grows from slice to slice, for seq1f1b; exchange=0.5 is the time in which the tokens of
    /// F, and of B or I, travel to their experts and back, in exchanges=2 exchanges
    #[arg(long, value_name = "F=1,I=1,W=1,hop=0.1")]
    cost: Option<Costs>,
    #[command(flatten)]
    profile: ProfileArguments,
    /// By how many updates parameters are delayed: with 1, batches overlap and the pipeline never drains, and the
    /// output is the steady state (pictures show three batches)
    #[arg(long, value_name = "0|1", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1))]
    delay: u32,
    /// The stages that compute their forward again in their backward: none, stage, block, or a list of stages,
    /// such as 0,1:layers=3,2:keep=4: of stage 1 the first 3 layers, of stage 2 the microbatches after the
    /// first 4 in flight; or parts of layers: 0:parts=norms+feed-forward, and parts for all parts of all stages
    #[arg(long, value_name = "none|stage|0,2", default_value = "none", conflicts_with = "logical")]
    recompute: Recompute,
    #[command(flatten)]
    transport: TransportArguments,
    /// The form of the output
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
    #[command(flatten)]
    picture: PictureArguments,
    #[command(flatten)]
    output: PageOutput,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Bubbles, memory, and how long the engine took
    Text,
    /// The same numbers as JSON
    Json,
    /// Every event with its start and end; with --logical, one row per rank and one cell per tick
    Csv,
    /// The activations of every forward: the first and the last action of its rank that uses them, and the buffer
    /// that they can have, one line for each
    Activations,
    /// A table of the ticks, with --logical
    Grid,
    /// For Perfetto and chrome://tracing
    Trace,
    /// A drawing, to scale
    Svg,
    /// A page to explore in a browser: zoom, hover, memory of each rank
    Html,
}

impl SimulateArguments {
    /// Returns what is made of the schedule.
    fn needs(&self) -> Use {
        if self.format == Format::Trace { Use::Trace } else { Use::Simulate }
    }
}

/// The levels of programs that can be simulated, because they have messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum SimulatedLevel {
    /// With sends and receives, which follow whole actions
    Comms,
    /// Also with the gathering of parameters and the reduction of gradients
    Full,
}

impl From<SimulatedLevel> for Level {
    fn from(level: SimulatedLevel) -> Self {
        match level {
            SimulatedLevel::Comms => Self::Comms,
            SimulatedLevel::Full => Self::Full,
        }
    }
}

impl Format {
    /// Returns the picture of a run, if the format is a picture.
    fn picture(self) -> Option<Picture> {
        match self {
            Self::Text | Self::Json | Self::Csv | Self::Activations | Self::Grid => None,
            Self::Trace => Some(Picture::Trace),
            Self::Svg => Some(Picture::Svg),
            Self::Html => Some(Picture::Html),
        }
    }
}

/// Runs the command.
pub(crate) fn run(arguments: &SimulateArguments) -> Result<(), Failure> {
    if arguments.format == Format::Grid && !arguments.logical {
        return Err(Failure::input(no_grid(arguments)));
    }
    arguments.picture.check(arguments.format.picture(), &arguments.output)?;
    if arguments.recompute.has_parts() && arguments.profile.profile.is_none() {
        return Err(Failure::input(
            "--recompute names parts of layers, whose sizes and times are in a profile; add --profile, or name layers or stages",
        ));
    }
    if arguments.delay > 0 {
        return run_delayed(arguments);
    }
    if arguments.transport.is_given() {
        return run_on_transport(arguments);
    }
    if arguments.profile.profile.is_some() {
        return run_profile(arguments);
    }
    let costs = costs_of(arguments);
    let mut timed_program = program(arguments)?;
    if arguments.format == Format::Grid || arguments.format.picture().is_some() {
        check_size(&timed_program.program)?;
    }
    let printed = if arguments.logical {
        // The run borrows the program while `timed_program` records its times.
        let program = timed_program.program.clone();
        let run = timed_program.times.simulate(|| logical(&program)).map_err(bug)?;
        print_logical(&run, &timed_program, arguments)?
    } else {
        let program = &timed_program.program;
        let run = timed_program.times.simulate(|| timed(program, &costs)).map_err(refused)?;
        let steps = logical(program).map_err(bug)?.steps();
        let summary = || Summary::of(&run, steps, &costs);
        print(summary, run.timeline(), &timed_program, None, arguments)?
    };
    write(arguments, &printed)
}

/// Simulates batches that overlap.
fn run_delayed(arguments: &SimulateArguments) -> Result<(), Failure> {
    let others = [
        ("--logical", arguments.logical, "which has no costs"),
        ("--level", arguments.level.is_some(), "whose programs end with their batch"),
        ("--profile", arguments.profile.profile.is_some(), "whose prediction is of a step that drains"),
        ("--transport", arguments.transport.is_given(), "which simulates one batch"),
        ("--format activations", arguments.format == Format::Activations, "which lists one batch"),
    ];
    if let Some((flag, _, reason)) = others.into_iter().find(|(_, is_given, _)| *is_given) {
        return Err(Failure::input(format!("--delay 1 does not work with {flag}, {reason}; leave one out")));
    }
    let costs = costs_of(arguments);
    let mut times = EngineTimes::default();
    let source = source(arguments)?;
    let name = source.name();
    let schedule = source.read(arguments.needs(), &mut times)?.computation().map_err(Failure::input)?;
    let passes = passes(arguments);
    let run = DelayedRun::of(name, &schedule, (&costs, &passes), times)?;
    let printed = match arguments.format {
        Format::Json => run.json(),
        Format::Text => run.text(),
        _ => {
            let (drawn, costs) = run.drawn()?;
            if arguments.format.picture().is_some() {
                check_size(&drawn.program)?;
            }
            let timed = timed(&drawn.program, costs).map_err(refused)?;
            let steps = logical(&drawn.program).map_or(0, |run| run.steps());
            print(|| Summary::of(&timed, steps, costs), timed.timeline(), &drawn, None, arguments)?
        }
    };
    write(arguments, &printed)
}

/// Simulates on the transports that the arguments choose.
fn run_on_transport(arguments: &SimulateArguments) -> Result<(), Failure> {
    if arguments.logical {
        return Err(Failure::input(
            "--logical has no messages that take time, and --transport is about them; leave one out",
        ));
    }
    let (mut timed_program, costs, prediction) = match arguments.profile.profile {
        Some(_) => {
            let mut times = EngineTimes::default();
            let source = source(arguments)?;
            let name = source.name();
            let Predicted { prediction, .. } =
                arguments.profile.predict(source, &arguments.recompute, arguments.needs(), &mut times)?;
            let timed_program = TimedProgram::of_prediction(name, &prediction, times)?;
            (timed_program, prediction.costs.clone(), Some(prediction))
        }
        None => (program(arguments)?, costs_of(arguments), None),
    };
    let optimizer = prediction.as_ref().map_or(0.0, |prediction| prediction.optimizer_s);
    let priced = Priced { timed_program: &timed_program, costs: &costs, optimizer };
    let communicators = priced.communicators(&arguments.transport);
    let [communicator] = communicators.as_slice() else {
        if !matches!(arguments.format, Format::Text | Format::Json) {
            return Err(Failure::input(
                "--transport all prints a table; use --format text or json, or one transport",
            ));
        }
        return write(arguments, &priced.compare(&communicators, arguments.format == Format::Json)?);
    };
    if arguments.format.picture().is_some() {
        check_size(&timed_program.program)?;
    }
    let start = Instant::now();
    let run = priced.simulate(communicator)?;
    let elapsed = start.elapsed();
    let price = priced.price(&run, communicator.streams)?;
    timed_program.times.simulate = elapsed;
    // A receive holds its rank in the logical simulation, which some transports do not demand.
    let steps = logical(&timed_program.program).map_or(0, |run| run.steps());
    let summary = || {
        let summary = Summary::of(&run, steps, &costs);
        let makespan = summary.makespan + optimizer;
        match &prediction {
            Some(prediction) => {
                Summary { makespan, peak_bytes: Some(prediction.peak_bytes.clone()), ..summary }
            }
            None => summary,
        }
    };
    write(arguments, &print(summary, run.timeline(), &timed_program, Some(&price), arguments)?)
}

/// Returns the costs that the arguments give.
fn costs_of(arguments: &SimulateArguments) -> Costs {
    Costs { recompute: arguments.recompute.clone(), ..arguments.cost.clone().unwrap_or_default() }
}

/// Writes the output to where the arguments say.
fn write(arguments: &SimulateArguments, text: &str) -> Result<(), Failure> {
    let schedule = || match (&arguments.name, &arguments.csv) {
        (Some(name), _) => own_name(name),
        (None, Some(file)) => file.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
        (None, None) => String::new(),
    };
    let extension = arguments.format.picture().map_or("txt", Picture::extension);
    arguments.output.write(text, || page_of(&schedule(), extension))
}

/// Returns why the arguments give no grid, and arguments that do.
fn no_grid(arguments: &SimulateArguments) -> String {
    let costs = [
        ("--profile", arguments.profile.profile.is_some()),
        ("--cost", arguments.cost.is_some()),
        ("--recompute", arguments.recompute != Recompute::None),
        ("--transport", arguments.transport.is_given()),
    ];
    let advice = match costs.into_iter().find(|(_, is_given)| *is_given) {
        Some((flag, _)) => {
            format!(
                "--logical has them, without costs and transports: leave {flag} out and add --logical, or use --format svg"
            )
        }
        None => "add --logical, or use --format svg".to_owned(),
    };
    format!("--format grid has one column per tick; {advice}")
}

/// Simulates at the costs of a profile: the program that `train` runs.
fn run_profile(arguments: &SimulateArguments) -> Result<(), Failure> {
    let mut times = EngineTimes::default();
    let source = source(arguments)?;
    let name = source.name();
    let Predicted { summary, prediction, .. } =
        arguments.profile.predict(source, &arguments.recompute, arguments.needs(), &mut times)?;
    let timed_program = TimedProgram::of_prediction(name, &prediction, times)?;
    if arguments.format == Format::Grid || arguments.format.picture().is_some() {
        check_size(&timed_program.program)?;
    }
    write(arguments, &print(|| summary.clone(), prediction.run.timeline(), &timed_program, None, arguments)?)
}

/// Makes the program that is simulated.
fn program(arguments: &SimulateArguments) -> Result<TimedProgram, Failure> {
    let mut times = EngineTimes::default();
    let source = source(arguments)?;
    let name = source.name();
    let source = source.read(arguments.needs(), &mut times)?;
    if let (ProgramSource::Rows(rows), Some(_)) = (&source, arguments.level)
        && rows.communicates()
    {
        return Err(Failure::input(format!(
            "{name}: the file has messages already, and --level is for a schedule without; leave it out"
        )));
    }
    if arguments.transport.is_given() {
        return TimedProgram::unproved(name, source, &passes(arguments), times);
    }
    TimedProgram::made(name, source, &passes(arguments), times)
}

/// Returns the passes that make the program: for `--level`, for the level of PyTorch's dry run, or for
/// training.
fn passes(arguments: &SimulateArguments) -> LowerConfig {
    match arguments.level {
        Some(level) => LowerConfig::from(Level::from(level)),
        None if arguments.logical => LowerConfig::from(Level::Comms),
        None => LowerConfig::training_at(&costs_of(arguments)),
    }
}

/// Returns the schedule to simulate.
fn source(arguments: &SimulateArguments) -> Result<Source, Failure> {
    if let Some(file) = &arguments.csv {
        return match arguments.size.any_flag() {
            Some(flag) => Err(Failure::input(format!("{flag} follows from the file of --csv; leave it out"))),
            None => Ok(Source::File(file.clone(), arguments.size.slices().unwrap_or_default())),
        };
    }
    let name = arguments.name.clone().unwrap_or_default();
    if is_file_name(&name) {
        return Err(Failure::input(format!(
            "{name}: a schedule from a file is named with --csv; write --csv {name}"
        )));
    }
    let spec = arguments.size.spec(&name, arguments.cost.as_ref())?;
    Ok(Source::Named(name, Box::new(spec)))
}

/// Returns the failure for an error that is a bug, because a sound program always runs to its end.
fn bug(error: SimulateError) -> Failure {
    Failure::new(Exit::Bug, error)
}

fn print_logical(
    run: &LogicalRun<'_>,
    timed_program: &TimedProgram,
    arguments: &SimulateArguments,
) -> Result<String, Failure> {
    let format = arguments.format;
    let ranks = run.program().placement().all_ranks();
    if let Format::Csv | Format::Grid = format {
        let rows = ranks.map(|rank| run.row(rank));
        if format == Format::Csv {
            return Ok(print_rows(rows));
        }
        check_cells(u64::from(run.steps()) * u64::from(run.program().ranks()))?;
        return Ok(picture::grid(rows, &[]));
    }
    let timeline = run.timeline(1.0);
    print(|| Summary::of_logical(run), &timeline, timed_program, None, arguments)
}

fn print(
    summary: impl Fn() -> Summary,
    timeline: &Timeline,
    timed_program: &TimedProgram,
    price: Option<&Price>,
    arguments: &SimulateArguments,
) -> Result<String, Failure> {
    Ok(match (arguments.format, arguments.format.picture()) {
        (_, Some(picture)) => {
            check_exchanges(timeline)?;
            let title = timed_program.title();
            picture.draw(timeline, &timed_program.program, &title, timed_program.unit, &arguments.picture)
        }
        (Format::Text, None) => text(&summary(), timed_program, price, arguments.logical),
        (Format::Json, None) => json(&summary(), timed_program, price),
        (Format::Activations, None) => activations(&timed_program.program),
        (_, None) => events(timeline),
    })
}
