//! `pipewright lower`: runs passes over a schedule from a file.

use std::num::NonZeroU32;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use pipewright_schedule::csv::{parse_rows, print_program};
use pipewright_schedule::lower::{Pass, PassInput, ReduceWait, apply};
use pipewright_schedule::{LowerError, Program, Rank, picture};

use crate::commands::drawing::check_size;
use crate::commands::schedule_file::{locate, read};
use crate::failure::{Exit, Failure};
use crate::output::OutputFile;

/// The arguments of `pipewright lower`.
#[derive(Debug, Args)]
pub(crate) struct LowerArguments {
    /// The schedule: one row a rank, at any level
    #[arg(value_name = "FILE.csv")]
    file: PathBuf,
    /// The passes, in the order in which they run: unshard, merge-bw, reduce-grad, send-early (before send-recv),
    /// send-recv, defer-recv, wait-send
    #[arg(long = "pass", value_name = "PASS,..", value_delimiter = ',', required = true)]
    passes: Vec<Pass>,
    /// The rank of each stage, where it does not follow from the rows
    #[arg(long, value_name = "RANK,..", value_delimiter = ',')]
    stage_to_rank: Vec<u32>,
    /// Microbatches in a step, where the rows do not show all of them
    #[arg(long, value_name = "M")]
    microbatches: Option<u32>,
    #[command(flatten)]
    settings: PassSettings,
    /// What to print
    #[arg(long, value_enum, default_value = "csv")]
    format: Format,
    #[command(flatten)]
    output: OutputFile,
}

/// The settings of single passes. They hold for every such pass in the list.
#[derive(Debug, Args)]
struct PassSettings {
    /// Stages of a rank that are gathered at once, for unshard
    #[arg(long, value_name = "STAGES")]
    window: Option<NonZeroU32>,
    /// Compute actions within which a gathered stage must be used, for unshard; without it, any number
    #[arg(long, value_name = "ACTIONS")]
    lookahead: Option<NonZeroU32>,
    /// Wait for reductions at the end of the row, for reduce-grad; without it, right behind each
    #[arg(long)]
    defer_wait: bool,
    /// Sends of a rank that may be on their way, for wait-send; without it, any number
    #[arg(long, value_name = "SENDS")]
    budget: Option<NonZeroU32>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Format {
    /// One row a rank, which PyTorch reads too
    Csv,
    /// A table for people
    Grid,
}

/// Runs the command.
pub(crate) fn run(arguments: &LowerArguments) -> Result<(), Failure> {
    let passes = arguments.settings.of(&arguments.passes)?;
    let file = &arguments.file;
    let rows = parse_rows(&read(file)?).map_err(|error| Failure::input(locate(file, &error)))?;
    let stage_to_rank = (!arguments.stage_to_rank.is_empty())
        .then(|| arguments.stage_to_rank.iter().copied().map(Rank::new).collect());
    let input = PassInput { rows, stage_to_rank, microbatches: arguments.microbatches };
    let program = apply(input, &passes).map_err(|error| {
        let exit =
            if matches!(error, LowerError::Stuck { .. }) { Exit::CheckFailed } else { Exit::WrongInput };
        Failure::new(exit, format!("{}: {error}", file.display()))
    })?;
    arguments.output.write(&print(&program, arguments.format)?)
}

impl PassSettings {
    /// `passes` with these settings.
    fn of(&self, passes: &[Pass]) -> Result<Vec<Pass>, Failure> {
        self.check(passes)?;
        let with = |pass| match pass {
            Pass::Unshard(mut config) => {
                config.window = self.window.unwrap_or(config.window);
                config.lookahead = self.lookahead.or(config.lookahead);
                Pass::Unshard(config)
            }
            Pass::ReduceGrad(_) if self.defer_wait => Pass::ReduceGrad(ReduceWait::AtEnd),
            Pass::WaitSend(budget) => Pass::WaitSend(self.budget.or(budget)),
            other => other,
        };
        Ok(passes.iter().copied().map(with).collect())
    }

    /// Refuses a setting whose pass is not there.
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
        match flags.into_iter().find(without_pass) {
            Some((flag, pass, _)) => Err(Failure::input(format!(
                "{flag} belongs to the pass {pass}, which is not asked for; leave it out or add the pass"
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
