//! `pipewright lower`: runs passes over a schedule from a file.

use std::num::NonZeroU32;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use pipewright_schedule::csv::{parse_rows, print_program};
use pipewright_schedule::footprint::Use;
use pipewright_schedule::lower::{
    Pass, PassInput, ReduceWait, UnshardLookahead, apply, check_messages, check_order,
};
use pipewright_schedule::{Action, LowerError, Program, Rank, picture};
use pipewright_system::schedule_memory::check_text;

use crate::failure::{Exit, Failure};
use crate::output::OutputFile;
use crate::schedules::drawing::check_size;
use crate::schedules::file::{locate, read};
use crate::schedules::transport::TransportArguments;

/// The arguments of `pipewright lower`.
#[derive(Debug, Args)]
pub(crate) struct LowerArguments {
    /// The schedule: one row per rank, at any level
    #[arg(value_name = "FILE.csv")]
    file: PathBuf,
    /// The passes, in the order in which they run: merge-bw, unshard, reduce-grad, send-early (before
    /// send-recv), send-recv, wait-send and defer-recv (both after send-recv), and order-safe, which orders the
    /// messages so that the program is sound on --transport
    #[arg(long = "pass", value_name = "PASS,..", value_delimiter = ',', required = true)]
    passes: Vec<Pass>,
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
    /// The number of sends of a rank that may be pending, for wait-send; by default, any number
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
    check_order(&arguments.passes).map_err(|error| Failure::input(format!("--pass: {error}")))?;
    let passes = arguments.settings.apply(&arguments.passes)?;
    let passes = on_transport(passes, &arguments.transport)?;
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

/// Returns `passes` with the transport of the command line for `order-safe`.
fn on_transport(mut passes: Vec<Pass>, transport: &TransportArguments) -> Result<Vec<Pass>, Failure> {
    let Some(communicator) = transport.single("a program")? else { return Ok(passes) };
    let is_plain = |pass: &Pass| pass.to_string() == "order-safe";
    let Some(pass) = passes.iter_mut().find(|pass| pass.name() == "order-safe") else {
        return Err(Failure::input(
            "--transport belongs to the pass order-safe, which --pass does not name; leave it out or add the pass",
        ));
    };
    if !is_plain(pass) {
        return Err(Failure::input(
            "--transport is given, and --pass has a setting after order-safe= as well; leave one of them out",
        ));
    }
    *pass = Pass::OrderSafe(communicator);
    Ok(passes)
}

impl PassSettings {
    /// Returns `passes` with these settings.
    fn apply(&self, passes: &[Pass]) -> Result<Vec<Pass>, Failure> {
        self.check(passes)?;
        let with = |pass| match pass {
            Pass::Unshard(mut config) => {
                config.window = self.window.unwrap_or(config.window);
                config.lookahead = self.lookahead.clone().unwrap_or(config.lookahead);
                Pass::Unshard(config)
            }
            Pass::ReduceGrad(_) if self.defer_wait => Pass::ReduceGrad(ReduceWait::Deferred),
            Pass::WaitSend(budget) => Pass::WaitSend(self.budget.or(budget)),
            other => other,
        };
        Ok(passes.iter().cloned().map(with).collect())
    }

    /// Refuses a setting whose pass is not in the list, or whose pass already has that setting in the list.
    fn check(&self, passes: &[Pass]) -> Result<(), Failure> {
        let flags = [
            ("--window", "unshard", self.window.is_some()),
            ("--lookahead", "unshard", self.lookahead.is_some()),
            ("--defer-wait", "reduce-grad", self.defer_wait),
            ("--budget", "wait-send", self.budget.is_some()),
        ];
        let without_pass = |&(_, pass, is_given): &(&str, &str, bool)| {
            is_given && !passes.iter().any(|candidate| candidate.name() == pass)
        };
        if let Some((flag, pass, _)) = flags.into_iter().find(without_pass) {
            return Err(Failure::input(format!(
                "{flag} belongs to the pass {pass}, which --pass does not name; leave it out or add the pass"
            )));
        }
        let set_twice = |&(_, pass, is_given): &(&str, &str, bool)| {
            let listed = passes.iter().find(|listed| listed.name() == pass);
            // A pass is printed with the settings that differ from its defaults.
            let plain = pass.parse::<Pass>().ok();
            is_given && listed.is_some_and(|listed| Some(listed) != plain.as_ref())
        };
        match flags.into_iter().find(set_twice) {
            Some((flag, pass, _)) => Err(Failure::input(format!(
                "{flag} is given, and --pass has a setting after {pass}= as well; leave one of them out"
            ))),
            None => Ok(()),
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
