//! The commands, as clap declares them. The arguments of each command are in the command's file.
//!
//! Each paragraph of help is one line in the source, because clap wraps it to the terminal's width. The lines
//! of examples are short, so that clap does not wrap them. `-h` prints the arguments without these paragraphs and examples.

mod groups;
pub(crate) mod hints;

use clap::error::{ContextKind, ContextValue};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use pipewright_document::shortened;
use pipewright_run::error::exit_codes;

use crate::commands::resume::ResumeArguments;
use crate::commands::run_arguments::RunArguments;
use crate::commands::{
    check, clusters, compare, completions, data, devices, export, generate, init, inspect, launch, lower,
    man, partition, plan, profile, report, schedule, simulate, tokenize, validate, view, vpp, watch,
};

/// Trains models that do not fit on one device, by pipeline parallelism.
#[derive(Debug, Parser)]
#[command(name = "pipewright", version, max_term_width = 100, after_long_help = exits())]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
    /// Print errors only: no progress, no warnings, no summary on standard error
    #[arg(short, long, global = true)]
    pub(crate) quiet: bool,
}

impl Arguments {
    /// Returns the description of the whole command line, whose help lists the commands by subject.
    pub(crate) fn whole_command() -> clap::Command {
        groups::grouped(Self::command())
    }

    /// Parses the arguments of the process. If they are wrong, it prints why and ends the process, as
    /// [`Parser::parse`] does, but it does not repeat a very long value, or a long list of values.
    pub(crate) fn parse_shortened() -> Self {
        let parsed = Self::whole_command().try_get_matches();
        parsed.and_then(|matches| Self::from_arg_matches(&matches)).unwrap_or_else(|mut error| {
            if let Some(ContextValue::String(value)) = error.get(ContextKind::InvalidValue) {
                let value = ContextValue::String(shortened(value).into_owned());
                error.insert(ContextKind::InvalidValue, value);
            }
            if let Some(ContextValue::Strings(values)) = error.get(ContextKind::ValidValue)
                && values.len() > MOST_VALUES
            {
                error.remove(ContextKind::ValidValue);
            }
            error.exit()
        })
    }
}

/// The most possible values that an error lists. The keys of a configuration are more.
const MOST_VALUES: usize = 12;

/// Returns the text below the list of commands.
fn exits() -> String {
    format!("{}\n\nExample:\n  pipewright train --set run.steps=20", exit_codes())
}

/// The command to run.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train a model across pipeline ranks.
    #[command(after_long_help = "\
Without a file, a small model learns from the sample text, on this machine. With --from and --data, a model is \
fine-tuned: 100 steps of 8 rows of at most 512 tokens, on two ranks, at a learning rate that falls linearly from 2e-5; --set \
changes any key. The folder `run.out` receives metrics.jsonl, config.toml, timeline.json and checkpoints, one of them at the \
end of the run; an earlier run in it is moved aside, unless the folder also has files of the user. Ctrl-C ends the run \
after the current step, with a checkpoint to resume from; a second Ctrl-C ends it at once.

Example:
  pipewright train --set run.steps=20 --set pipeline.schedule=gpipe")]
    Train(RunArguments),
    /// Resume a run from its newest checkpoint, or from the named one.
    #[command(after_long_help = "\
The run's own configuration applies, and --set overrides its keys: ranks, schedule, microbatches, steps and more may \
change, model and data may not. metrics.jsonl continues after the checkpoint's step; lines and checkpoints of later \
steps are moved aside. A finished run continues if run.steps is raised.

Example:
  pipewright resume runs/sample --set pipeline.ranks=1")]
    Resume(ResumeArguments),
    /// Start the ranks of a run as processes, watch them, and start them again after a fault.
    #[command(after_long_help = "\
The processes run on this machine, on the hosts of a file, or in the Slurm allocation in which the command runs. mpirun or \
srun starts them. After a fault, the run resumes from its newest checkpoint on the hosts that answer: with spare hosts first, \
then with fewer replicas, then with fewer ranks. A failure that repeats at the same step with the same cause ends the run. \
Needs a build with the feature mpi.

Example:
  pipewright launch --ranks 2 -- train --set run.steps=20")]
    Launch(launch::LaunchArguments),
    /// Show the steps of a run that another process trains.
    #[command(after_long_help = "\
The display is the one of `train`, and ends with the run. It shows the steps before it too. Ctrl-C ends the display and not the \
run.

Example:
  pipewright watch runs/sample")]
    Watch(watch::WatchArguments),
    /// Verify a checkpoint and show what is in it.
    #[command(after_long_help = "Example:\n  pipewright inspect runs/sample --format json")]
    Inspect(inspect::InspectArguments),
    /// Write a checkpoint's model as a Hugging Face directory, or its adapters for PEFT.
    #[command(after_long_help = "\
The directory also receives the tokenizer of the run, and the generation settings and further keys of the model that \
`model.from` named. The export of a run that trained adapters is a PEFT directory, or with --merge the whole model.

Example:
  pipewright export runs/sample my-model")]
    Export(export::ExportArguments),
    /// Sample text from a trained model.
    #[command(after_long_help = "\
One rank computes the model on the processor, unless --ranks, --tensor-parallel and --devices name other ranks and devices. \
With mpirun, each process is a rank (in a build with the feature mpi), and the first one prints. The text ends after --tokens \
tokens, or at the model's own end token (`eos_token_id`). The tokenizer is the one that the run used, or the tokenizer.json \
of the directory.

Example:
  pipewright generate runs/sample --prompt 'fn main' --temperature 0.7
  pipewright generate runs/sample --ranks run --prompt 'let' --prompt 'use'")]
    Generate(generate::GenerateArguments),
    /// Check everything that can be checked without training.
    #[command(after_long_help = "Example:\n  pipewright check --set pipeline.ranks=4 --format json")]
    Check(check::CheckArguments),
    /// Show the training data.
    #[command(after_long_help = "Example:\n  pipewright data show --rows 1")]
    Data(data::DataArguments),
    /// Turn data files into token ids once, for runs that read them as they need them.
    #[command(after_long_help = "\
`data.path` takes the file, and the run has the same rows as with the files themselves. Name the same tokenizer, chat \
template and beginning of documents in the configuration: another one is refused.

Example:
  pipewright tokenize '*.txt' --tokenizer bytes -o text.pwtok
  pipewright train small.toml --set data.path=text.pwtok")]
    Tokenize(tokenize::TokenizeArguments),
    /// List the devices that this build can use on this machine.
    #[command(after_long_help = "\
`run.device` and `run.devices` take the names in the first column. The build contains the back ends that were chosen with \
cargo's --features: cuda, rocm, metal, vulkan, wgpu.

Example:
  pipewright devices")]
    Devices(devices::DevicesArguments),
    /// Write a commented configuration.
    #[command(after_long_help = "Example:\n  pipewright init my-run.toml")]
    Init(init::InitArguments),
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
    /// Make a page that shows and explains the timelines of a run or a schedule.
    #[command(after_long_help = "\
The page compares the predicted and the measured timeline of each rank, names the cause of every bubble, highlights the \
critical path, and simulates the schedule again for other costs or numbers of microbatches. For the folder of a run, such \
as runs/sample, the prediction has the median costs of the recorded steps.

Example:
  pipewright view 1f1b --ranks 4 --microbatches 8 -o view.html")]
    View(view::ViewArguments),
    /// Make a page about one or more runs: loss, speed, utilisation, memory.
    #[command(after_long_help = "\
Several runs are shown side by side, in the same charts, below the settings that differ. --format json or csv writes these \
settings and the figures of each run.

Example:
  pipewright report runs/sample -o report.html
  pipewright report runs/sample --format csv")]
    Report(report::ReportArguments),
    /// Measure what the layers of a model and the links between ranks cost, for `plan` and `simulate`.
    #[command(after_long_help = "\
Runs a short model that has the first and the last layer and two layers of each kind between them, on as many ranks at \
once as the run has. The depth of the model does not matter. Figures that cannot be measured are estimated, and the profile \
names them.

Example:
  pipewright profile --set pipeline.ranks=2 -o profile.toml")]
    Profile(profile::ProfileArguments),
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
    Plan(plan::PlanArguments),
    /// List the machines that plans know by name, with the source of each figure.
    #[command(after_long_help = "\
With a name, it shows the machine as a file, which can be saved, edited, and given to `plan --cluster`.

Example:
  pipewright clusters
  pipewright clusters h100 -o my-cluster.toml")]
    Clusters(clusters::ClustersArguments),
    /// Distribute layers over stages.
    #[command(after_long_help = "\
Example:
  pipewright partition --weights 4,1,1.5,2 --stages 2 --method optimal")]
    Partition(partition::PartitionArguments),
    /// Print the tables of an interleaved pipeline: stages, order of chunks, warm-up.
    #[command(after_long_help = "Example:\n  pipewright vpp --ranks 4 --chunks 2 --microbatches 8")]
    Vpp(vpp::VppArguments),
    /// Print a script that completes arguments in a shell.
    #[command(after_long_help = "\
Example:
  pipewright completions bash -o pipewright.bash")]
    Completions(completions::CompletionsArguments),
    /// Print the manual page, or write the pages of all commands to a folder.
    #[command(after_long_help = "Example:\n  pipewright man man1")]
    Man(man::ManArguments),
}

#[cfg(test)]
mod book;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_fit_together() {
        Arguments::whole_command().debug_assert();
    }
}
