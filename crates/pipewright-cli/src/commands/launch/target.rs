//! Reads the command that the processes of a launch run.

use clap::{Parser, Subcommand};
use pipewright_planning::failure::Failure;
use pipewright_planning::screen;
use pipewright_run::launch::Target;
use pipewright_run::resume::stored_settings;

use crate::commands::resume::ResumeArguments;
use crate::commands::run_arguments::RunArguments;

/// The commands that can be launched.
#[derive(Debug, Parser)]
#[command(name = "pipewright", disable_help_subcommand = true)]
struct Launched {
    #[command(subcommand)]
    command: LaunchedCommand,
    #[arg(short, long, global = true)]
    quiet: bool,
}

#[derive(Debug, Subcommand)]
enum LaunchedCommand {
    Train(RunArguments),
    Resume(ResumeArguments),
}

/// Reads the command. `set` has the settings that the launch adds to it.
///
/// # Errors
/// Fails if the command is not `train` or `resume`, or its settings cannot be loaded.
pub(super) fn read(words: &[String], set: &[String]) -> Result<Target, Failure> {
    if words.first().is_some_and(|command| command == "generate") {
        return Err(Failure::input(
            "`launch` starts runs again after faults, and `generate` has nothing to resume: start it with \
             `mpirun -n N pipewright generate`",
        ));
    }
    let mut words = Target::with_settings(words, set);
    let launched = Launched::try_parse_from(std::iter::once(&"pipewright".to_owned()).chain(&words));
    let launched = launched.map_err(|error| {
        Failure::input(format!("the command after `--` is not understood: {}", error.to_string().trim_end()))
    })?;
    let is_quiet = launched.quiet || screen::is_quiet();
    if is_quiet && !launched.quiet {
        words.push("--quiet".to_owned());
    }
    let (loaded, resumes) = match &launched.command {
        LaunchedCommand::Train(arguments) => (arguments.load()?, false),
        LaunchedCommand::Resume(arguments) => (stored_settings(&arguments.run, &arguments.set)?, true),
    };
    let settings = loaded.settings;
    let mut resumption = vec!["resume".to_owned(), settings.run.out.display().to_string()];
    resumption.extend(is_quiet.then(|| "--quiet".to_owned()));
    let command = words.clone();
    let accepts = Box::new(move |set: &[String]| read(&command, set).is_ok());
    Ok(Target { words, resumption, settings, resumes, accepts })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_is_started_with_mpirun() {
        let refused = read(&["generate", "runs/sample"].map(str::to_owned), &[]);
        let text = refused.err().expect("it is no run").text();
        assert!(text.contains("start it with `mpirun -n N pipewright generate`"), "{text}");
    }

    #[test]
    fn further_settings_are_checked_with_the_own_ones_of_the_command() {
        let words = ["train", "--set", "model.num_hidden_layers=4"].map(str::to_owned);
        let target = read(&words, &["pipeline.ranks=4".to_owned()]).expect("the sample");
        let accepts = |ranks: u32| (target.accepts)(&[format!("pipeline.ranks={ranks}")]);
        assert_eq!([accepts(2), accepts(1000)], [true, false]);
    }
}
