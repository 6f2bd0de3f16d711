//! The commands, as clap sees them. Each command's own arguments stand in its file.

use clap::{Parser, Subcommand};

use crate::commands::run_arguments::RunArguments;
use crate::commands::{export, init, inspect, lower, partition, resume, schedule, simulate, validate, vpp};

/// Trains models that do not fit on one device, by pipeline parallelism.
#[derive(Debug, Parser)]
#[command(name = "pipewright", version, max_term_width = 100, after_help = EXITS)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

const EXITS: &str = "\
Exit codes: 0 done; 2 wrong input; 3 a check said no; 4 a rank failed; 5 stopped by a signal
after saving a checkpoint; 70 a bug of Pipewright.

Example:
  pipewright train --set run.steps=20";

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train a model across pipeline ranks.
    #[command(after_help = "\
Without a file, a small model learns from the text at hand, on this machine. The folder `run.out` receives metrics.jsonl,
config.toml, timeline.json and checkpoints, one of them at the end of the run; an earlier run in it is moved aside. Ctrl-C
ends the run after the step, with a checkpoint to go on from; a second one ends it at once.

Example:
  pipewright train --set run.steps=20 --set pipeline.schedule=gpipe")]
    Train(RunArguments),
    /// Go on with a run from its newest checkpoint, or from the one that is named.
    #[command(after_help = "\
The run's own configuration holds, with --set on top: ranks, schedule, chunks, steps and more may change, model and data
may not. metrics.jsonl goes on behind the checkpoint's step; lines and checkpoints of later steps are moved aside. A run
that is finished goes on when run.steps is raised.

Example:
  pipewright resume runs/sample --set pipeline.ranks=1")]
    Resume(resume::ResumeArguments),
    /// Verify a checkpoint and show what is in it.
    #[command(after_help = "Example:\n  pipewright inspect runs/sample --format json")]
    Inspect(inspect::InspectArguments),
    /// Write a checkpoint's model as a Hugging Face directory.
    #[command(after_help = "Example:\n  pipewright export runs/sample my-model")]
    Export(export::ExportArguments),
    /// Check everything that can be checked without training.
    #[command(after_help = "Example:\n  pipewright check --set pipeline.ranks=4")]
    Check(RunArguments),
    /// Write a commented configuration.
    #[command(after_help = "Example:\n  pipewright init my-run.toml")]
    Init(init::InitArguments),
    /// Print what each rank computes, in order.
    #[command(after_help = "Example:\n  pipewright schedule 1f1b --ranks 4 --microbatches 8 --format grid")]
    Schedule(schedule::ScheduleArguments),
    /// Run passes over a schedule from a file.
    #[command(after_help = "\
A pass may have its setting behind it: unshard=3:8 (window, lookahead), reduce-grad=at-end, wait-send=2. Nothing is proved
here: validate the outcome.

Example:
  pipewright schedule 1f1b --ranks 4 --microbatches 8 -o 1f1b.csv && pipewright lower 1f1b.csv --pass reduce-grad,send-recv")]
    Lower(lower::LowerArguments),
    /// Prove a schedule sound, or list everything that is wrong with it.
    #[command(after_help = "\
Prints one line for each violation and exits with 3 where there is one.

Example:
  pipewright schedule 1f1b --ranks 4 --microbatches 8 -o 1f1b.csv && pipewright validate 1f1b.csv")]
    Validate(validate::ValidateArguments),
    /// Predict when each rank does what, and what it holds.
    #[command(after_help = "\
Without --logical, actions take their costs, and messages travel beside the computation. With it, every action takes one
tick. The last line says how long the engine itself took.

Example:
  pipewright simulate 1f1b --ranks 4 --microbatches 8 --cost F=1,I=1,W=1,hop=0.1")]
    Simulate(simulate::SimulateArguments),
    /// Share layers out over stages.
    #[command(after_help = "Example:\n  pipewright partition --weights 4,1,1,2 --stages 2 --method optimal")]
    Partition(partition::PartitionArguments),
    /// Print the tables of an interleaved pipeline: stages, order of chunks, warm-up.
    #[command(after_help = "Example:\n  pipewright vpp --ranks 4 --chunks 2 --microbatches 8")]
    Vpp(vpp::VppArguments),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_fit_together() {
        <Arguments as clap::CommandFactory>::command().debug_assert();
    }
}
