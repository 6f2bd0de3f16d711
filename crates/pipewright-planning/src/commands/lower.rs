//! `pipewright lower`: runs passes over a schedule from a file.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, ValueEnum};
use pipewright_schedule::csv::{parse_rows, print_program};
use pipewright_schedule::footprint::Use;
use pipewright_schedule::lower::{
    Pass, PassInput, ReduceWait, UnshardLookahead, apply, check_messages, check_order,
};
use pipewright_schedule::{Action, LowerError, Program, Rank, picture};
use pipewright_system::schedule_file::{locate, read};
use pipewright_system::schedule_memory::check_text;

use crate::failure::{Exit, Failure};
use crate::output::OutputFile;
use crate::schedules::drawing::check_size;
use crate::schedules::transport::TransportArguments;

/// The arguments of `pipewright lower`.
#[derive(Debug, Args)]
pub struct LowerArguments {
    /// The schedule: one row per rank, at any level; or - for standard input
    #[arg(value_name = "FILE.csv")]
    file: PathBuf,
    /// The passes, in the order in which they run: merge-bw, unshard, reduce-grad, send-early (before
    /// send-recv), send-recv, wait-send and defer-recv (both after send-recv), order-safe, which orders the
    /// messages so that the program is sound on --transport, and offload (last), which moves what recomputed
    /// forwards keep out of memory
    #[arg(long = "pass", value_name = "PASS,..", value_delimiter = ',', required = true)]
    passes: Vec<ListedPass>,
    /// The rank of each stage, if it does not follow from the rows
    #[arg(long, value_name = "RANK,..", value_delimiter = ',')]
    stage_to_rank: Vec<u32>,
    /// The number of microbatches in a step, if the rows do not show all of them
    #[arg(long, value_name = "M")]
    microbatches: Option<u32>,
    #[command(flatten)]
    settings: PassSettings,
    #[command(flatten)]
    transport: TransportArguments,
    /// The form of the output
    #[arg(long, value_enum, default_value = "csv")]
    format: Format,
    #[command(flatten)]
    output: OutputFile,
}

/// A pass of `--pass`.
#[derive(Clone, Debug)]
struct ListedPass {
    pass: Pass,
    /// The text of the pass. A pass alone does not tell whether its default was written out.
    text: String,
}

impl ListedPass {
    fn has_setting(&self) -> bool {
        self.text.contains('=')
    }
}

impl FromStr for ListedPass {
    type Err = LowerError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self { pass: text.parse()?, text: text.to_owned() })
    }
}

/// The settings of individual passes.
#[derive(Debug, Args)]
struct PassSettings {
    /// The number of stages of a rank that are gathered at the same time, for unshard
    #[arg(long, value_name = "STAGES")]
    window: Option<NonZeroU32>,
    /// How many of a rank's next stages are fetched before they are needed, for unshard: full (as many as the
    /// window), auto (2 on rank 0 and one more on each further rank, up to the window), a number, or one for
    /// each rank
    #[arg(long, value_name = "full|auto|STAGES|STAGES,..")]
    lookahead: Option<UnshardLookahead>,
    /// Wait for a reduction before the next one of the rank, so that at most one is pending, for reduce-grad;
    /// by default, directly after each reduction
    #[arg(long)]
    defer_wait: bool,
    /// The number of sends of a rank that may be pending, for wait-send, which then runs after defer-recv; by
    /// default, any number
    #[arg(long, value_name = "SENDS")]
    budget: Option<NonZeroU32>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Format {
    /// One row per rank, in PyTorch's format
    Csv,
    /// A table for people
    Grid,
}

/// Runs the command.
pub(crate) fn run(arguments: &LowerArguments) -> Result<(), Failure> {
    let passes = passes(arguments)?;
    let file = &arguments.file;
    let text = read(file).map_err(Failure::input)?;
    check_text(&text, Use::Lower)?;
    let rows = parse_rows(&text).map_err(|error| Failure::input(locate(file, &error)))?;
    require_microbatches(&rows, arguments.microbatches)
        .map_err(|message| Failure::input(format!("{}: {message}", file.display())))?;
    check_messages(&rows, &passes).map_err(|error| Failure::input(format!("{}: {error}", file.display())))?;
    let stage_to_rank = (!arguments.stage_to_rank.is_empty())
        .then(|| arguments.stage_to_rank.iter().copied().map(Rank::new).collect());
    let input = PassInput { rows, stage_to_rank, microbatches: arguments.microbatches };
    let program = apply(input, &passes).map_err(|error| {
        let is_unsound = matches!(error, LowerError::Stuck { .. } | LowerError::Invalid(_));
        let exit = if is_unsound { Exit::CheckFailed } else { Exit::WrongInput };
        Failure::new(exit, format!("{}: {error}", file.display()))
    })?;
    arguments.output.write(&print(&program, arguments.format)?)
}

/// Refuses a number of microbatches that is smaller than the rows show.
fn require_microbatches(rows: &[Vec<Option<Action>>], given: Option<u32>) -> Result<(), String> {
    let parts = rows.iter().flatten().flatten().flat_map(|action| action.parts());
    let last = parts.filter_map(Action::microbatch).max();
    match (given, last) {
        (Some(given), Some(last)) if given <= last.get() => Err(format!(
            "--microbatches is {given}, and the rows have the microbatch {last}; give more, or leave the number out"
        )),
        _ => Ok(()),
    }
}

/// Returns the passes with the settings and the transport of the command line.
fn passes(arguments: &LowerArguments) -> Result<Vec<Pass>, Failure> {
    let LowerArguments { passes: listed, settings, transport, .. } = arguments;
    let communicator = transport.single("a program")?;
    let mut passes: Vec<Pass> = listed.iter().map(|listed| listed.pass.clone()).collect();
    check_order(&passes).map_err(|error| Failure::input(format!("--pass: {error}")))?;
    let streams = communicator.as_ref().map(|communicator| communicator.streams);
    let flags = [
        ("unshard", settings.window.map(|window| format!("--window {window}"))),
        ("unshard", settings.lookahead.as_ref().map(|lookahead| format!("--lookahead {lookahead}"))),
        ("reduce-grad", settings.defer_wait.then(|| "--defer-wait".to_owned())),
        ("wait-send", settings.budget.map(|budget| format!("--budget {budget}"))),
        ("order-safe", streams.map(|streams| format!("--transport {streams}"))),
    ];
    for (pass, flag) in flags {
        if let Some(flag) = flag {
            check_flag(&flag, pass, listed)?;
        }
    }
    passes.iter_mut().for_each(|pass| settings.apply(pass));
    if let (Some(communicator), Some(pass)) =
        (communicator, passes.iter_mut().find(|pass| pass.name() == "order-safe"))
    {
        *pass = Pass::OrderSafe(communicator);
    }
    Ok(passes)
}

/// Refuses a flag with its value if its pass is not in the list, or has a setting there.
fn check_flag(flag: &str, pass: &str, passes: &[ListedPass]) -> Result<(), Failure> {
    match passes.iter().find(|listed| listed.pass.name() == pass) {
        None => Err(Failure::input(format!(
            "{flag} belongs to the pass {pass}, which --pass does not name; leave it out or add the pass"
        ))),
        Some(listed) if listed.has_setting() => {
            Err(Failure::input(format!("{flag} and --pass {} are given; leave one setting out", listed.text)))
        }
        Some(_) => Ok(()),
    }
}

impl PassSettings {
    /// Puts these settings into a pass.
    fn apply(&self, pass: &mut Pass) {
        match pass {
            Pass::Unshard(config) => {
                config.window = self.window.unwrap_or(config.window);
                if let Some(lookahead) = &self.lookahead {
                    config.lookahead = lookahead.clone();
                }
            }
            Pass::ReduceGrad(wait) if self.defer_wait => *wait = ReduceWait::Deferred,
            Pass::WaitSend(budget) => *budget = self.budget.or(*budget),
            _ => {}
        }
    }
}

fn print(program: &Program, format: Format) -> Result<String, Failure> {
    match format {
        Format::Csv => Ok(print_program(program)),
        Format::Grid => {
            check_size(program)?;
            Ok(picture::grid(program.rows().iter().map(|row| row.iter().copied().map(Some)), &[]))
        }
    }
}
