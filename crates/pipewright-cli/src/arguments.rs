//! The commands, as clap declares them. The arguments of each command are in the command's file.
//!
//! Each paragraph of help is one line in the source, because clap wraps it to the terminal's width. The lines
//! of examples are short, so that clap does not wrap them. `-h` prints the arguments without these paragraphs and examples.

mod groups;

use clap::{Arg, CommandFactory, FromArgMatches, Parser, Subcommand};
use pipewright_planning::argument_values::shortened_error;
use pipewright_system::failure::exit_codes;

use crate::commands::resume::ResumeArguments;
use crate::commands::run_arguments::RunArguments;
use crate::commands::{
    add_tokens, audit, check, completions, data, devices, export, fingerprint, generate, init, inspect,
    launch, man, partition, profile, quantize, report, tokenize, view, watch,
};
use crate::keys::keys;

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
        // The crate of the command does not know the keys.
        let with_keys = |argument: Arg| argument.value_parser(keys()).hide_possible_values(true);
        groups::grouped(Self::command().mut_subcommand("plan", |plan| plan.mut_arg("set", with_keys)))
    }

    /// Parses the arguments of the process. If they are wrong, it prints why and ends the process, as
    /// [`Parser::parse`] does, but it does not repeat a very long value, or a long list of values.
    pub(crate) fn parse_shortened() -> Self {
        let parsed = Self::whole_command().try_get_matches();
        parsed
            .and_then(|matches| Self::from_arg_matches(&matches))
            .unwrap_or_else(|error| shortened_error(error).exit())
    }
}

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
    /// Print the hashes of a run's states, or find the first difference between two runs.
    #[command(after_long_help = "\
Each line has a step and a hash of the trained parameters and their optimizer state, which does not depend on the cut, the \
schedule or the number of threads. The run needs run.fingerprint_every. With two runs, the command names the first step and \
the first parameters that differ, and exits with 3. For a configuration, it hashes the state before the first step.

Example:
  pipewright train --set run.steps=4 --set run.fingerprint_every=1
  pipewright fingerprint runs/sample")]
    Fingerprint(fingerprint::FingerprintArguments),
    /// Compute one stage of one step of a run again, and compare it with the recorded hashes.
    #[command(after_long_help = "\
The command starts from the checkpoint before the step, on the processor, with one stage in memory at a time. It exits with 3 \
if something is not as recorded, and names the step and the stage. The run needs run.fingerprint_every, and a checkpoint of \
the step before, unless the step is the first one.

Example:
  pipewright audit runs/sample --step 1 --stage 0")]
    Audit(audit::AuditArguments),
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
    /// Write a model with quantised weights, as the frozen base of adapters.
    #[command(after_long_help = "\
The matrices of attention and feed-forward are written as NF4 with double quantisation, in the form of bitsandbytes, which \
transformers loads too. Everything else is copied. The command prints the error of the quantised weights.

Example:
  pipewright quantize my-model my-model-nf4 --to nf4")]
    Quantize(quantize::QuantizeArguments),
    /// Write a model with further tokens, to be trained.
    #[command(after_long_help = "\
The tokenizer gets the tokens, and the embedding and the head a row for each, the mean of all their rows. Train the rows with \
adapter.modules_to_save = [\"embed_tokens\", \"lm_head\"], or with the whole model.

Example:
  pipewright add-tokens my-model my-model-tools --token SEARCH --token DONE")]
    AddTokens(add_tokens::AddTokensArguments),
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
    /// A command that needs no training.
    #[command(flatten)]
    Planning(pipewright_planning::Command),
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
    /// Distribute layers over stages.
    #[command(after_long_help = "\
Example:
  pipewright partition --weights 4,1,1.5,2 --stages 2 --method optimal")]
    Partition(partition::PartitionArguments),
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
