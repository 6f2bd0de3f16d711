//! The commands, as clap declares them. The arguments of each command are in the command's file.
//!
//! Each paragraph of help is one line in the source, because clap wraps it to the terminal's width. The lines
//! of examples are short, so that clap does not wrap them. `-h` prints the arguments without these paragraphs and examples.

use clap::Subcommand;

use crate::commands::{clusters, compare, lower, plan, schedule, simulate, validate, vpp};
use crate::configurations::Configurations;
use crate::failure::Failure;

/// The command to run.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Print what each rank computes, in order.
    #[command(after_long_help = "\
PyTorch 2.15 reads the CSV of the level compute as it is (`_load_csv(file)`). At the levels comms and full its sends have no \
waits yet, and `_load_csv(file, \"compute_comms\")` needs them: run `pipewright lower FILE.csv --pass wait-send` first. \
PyTorch loads no schedule without a backward (forwardonly).

Example:
  pipewright schedule 1f1b --ranks 4 --microbatches 8 --format grid
  pipewright schedule zbv --ranks 4 --microbatches 8 --level comms -o zbv.csv
  pipewright lower zbv.csv --pass wait-send -o zbv-for-pytorch.csv")]
    Schedule(schedule::ScheduleArguments),
    /// Run passes over a schedule from a file.
    #[command(after_long_help = "\
A pass may be followed by its setting: unshard=3:2 or unshard=3:auto (window, lookahead in stages), reduce-grad=deferred, \
reduce-grad=at-end, wait-send=2. The result is not proved sound: run `pipewright validate` on it. For `_load_csv(file, \
\"compute_comms\")` of PyTorch 2.15, the passes end with send-recv and wait-send, and reduce-grad has another setting than \
at-end.

Example:
  pipewright schedule 1f1b --ranks 4 --microbatches 8 -o 1f1b.csv
  pipewright lower 1f1b.csv --pass reduce-grad,send-recv")]
    Lower(lower::LowerArguments),
    /// Prove a schedule sound, or list everything that is wrong with it.
    #[command(after_long_help = "\
Prints one line for each violation, and exits with 3 if there is one. Without `--transport`, a program must be sound on every \
transport, even if sends wait for their receive. With `--transport`, the verdict is `sound`, `crossed` (a receive gets the \
tensor of another message) or `may hang`.

Example:
  pipewright schedule 1f1b --ranks 4 --microbatches 8 -o 1f1b.csv
  pipewright validate 1f1b.csv
  pipewright lower 1f1b.csv --pass send-recv -o program.csv
  pipewright validate program.csv --transport all")]
    Validate(validate::ValidateArguments),
    /// Predict when each rank does what, and how much it holds.
    #[command(after_long_help = "\
Without --logical, actions take their costs, and messages travel during the computation. With it, every action takes one \
tick. The last line says how long the engine itself took.

Example:
  pipewright simulate 1f1b --ranks 4 --microbatches 8 --cost F=1,I=1,W=1")]
    Simulate(simulate::SimulateArguments),
    /// Compare schedules: time, bubble, memory and messages in a table, or their pictures on one scale.
    #[command(after_long_help = "\
Each schedule is predicted as `train` runs it, for the same model: a stage of a schedule with several stages on a rank has \
its part of the costs. A schedule that does not exist at this size is in the table with the reason.

Example:
  pipewright compare 1f1b zb-h1 zbv --ranks 4 --microbatches 16
  pipewright compare 1f1b zbv --ranks 4 --microbatches 8 --format html -o c.html")]
    Compare(compare::CompareArguments),
    /// Search the fastest cut, placement, schedule and recomputation, and say how far from the best it can
    /// be.
    #[command(after_long_help = "\
Plans are compared as `pipewright simulate --profile` predicts them. With a configuration, its ranks, microbatches and model \
apply, and without a profile its costs are estimated. -o writes a configuration for `train`, and the schedule as a CSV file in \
the same folder if it has no name. --emit writes the files with which torchtitan, Megatron or DeepSpeed executes the plan, and \
--check predicts such a file. With --cluster, a model's config.json is planned for GPUs that are not available here, from \
their data sheets. Exits with 3 if nothing fits into the memory.

Example:
  pipewright plan --profile profile.toml --ranks 4 --microbatches 16
  pipewright plan my-model --cluster h100 --nodes 2 --batch 64 --seq-len 4096")]
    Plan(Box<plan::PlanArguments>),
    /// List the machines that plans know by name, with the source of each figure.
    #[command(after_long_help = "\
With a name, it shows the machine as a file, which can be saved, edited, and given to `plan --cluster`.

Example:
  pipewright clusters
  pipewright clusters h100 -o my-cluster.toml")]
    Clusters(clusters::ClustersArguments),
    /// Print the tables of an interleaved pipeline: stages, order of chunks, warm-up.
    #[command(after_long_help = "Example:\n  pipewright vpp --ranks 4 --chunks 2 --microbatches 8")]
    Vpp(vpp::VppArguments),
}

impl Command {
    /// Runs the command. `configurations` reads the configurations that its arguments name.
    ///
    /// # Errors
    /// When the arguments or files are wrong, or a check fails.
    pub fn run(&self, configurations: &dyn Configurations) -> Result<(), Failure> {
        match self {
            Self::Schedule(arguments) => schedule::run(arguments),
            Self::Lower(arguments) => lower::run(arguments),
            Self::Validate(arguments) => validate::run(arguments),
            Self::Simulate(arguments) => simulate::run(arguments),
            Self::Compare(arguments) => compare::run(arguments),
            Self::Plan(arguments) => plan::run(arguments, configurations),
            Self::Clusters(arguments) => clusters::run(arguments),
            Self::Vpp(arguments) => vpp::run(arguments),
        }
    }
}
