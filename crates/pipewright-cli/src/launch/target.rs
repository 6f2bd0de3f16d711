//! [`Target`]: the command that the processes run, and the settings of its run.

use clap::{Parser, Subcommand};

use crate::commands::resume::ResumeArguments;
use crate::commands::run_arguments::RunArguments;
use crate::display::screen;
use crate::failure::Failure;
use pipewright_run::resume::stored_settings;
use pipewright_run::settings::Settings;

/// The command that the processes run.
#[derive(Debug)]
pub(crate) struct Target {
    /// Its words after `pipewright`.
    pub(crate) words: Vec<String>,
    /// The settings of its run, as the processes load them.
    pub(crate) settings: Settings,
    /// Whether it resumes a run.
    pub(crate) resumes: bool,
    /// Whether its words, or the words of the launch, have `--quiet`.
    is_quiet: bool,
}

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

impl Target {
    /// Reads the command. `set` has the settings that the launch adds to it.
    ///
    /// # Errors
    /// Fails if the command is not `train` or `resume`, or its settings cannot be loaded.
    pub(crate) fn read(words: &[String], set: &[String]) -> Result<Self, Failure> {
        if words.first().is_some_and(|command| command == "generate") {
            return Err(Failure::input(
                "`launch` starts runs again after faults, and `generate` has nothing to resume: start it with \
                 `mpirun -n N pipewright generate`",
            ));
        }
        let mut words = with_settings(words, set);
        let launched = Launched::try_parse_from(std::iter::once(&"pipewright".to_owned()).chain(&words));
        let launched = launched.map_err(|error| {
            Failure::input(format!(
                "the command after `--` is not understood: {}",
                error.to_string().trim_end()
            ))
        })?;
        let is_quiet = launched.quiet || screen::is_quiet();
        if is_quiet && !launched.quiet {
            words.push("--quiet".to_owned());
        }
        let (loaded, resumes) = match &launched.command {
            LaunchedCommand::Train(arguments) => (arguments.load()?, false),
            LaunchedCommand::Resume(arguments) => (stored_settings(&arguments.run, &arguments.set)?, true),
        };
        Ok(Self { words, settings: loaded.settings, resumes, is_quiet })
    }

    /// Returns the words that resume the run in its folder, with further settings.
    pub(crate) fn resumption(&self, set: &[String]) -> Vec<String> {
        let mut words = vec!["resume".to_owned(), self.settings.run.out.display().to_string()];
        words.extend(self.is_quiet.then(|| "--quiet".to_owned()));
        with_settings(&words, set)
    }

    /// Returns whether the command can run with further settings.
    pub(crate) fn accepts(&self, set: &[String]) -> bool {
        Self::read(&self.words, set).is_ok()
    }
}

/// Returns the words of a command with further settings.
pub(crate) fn with_settings(words: &[String], set: &[String]) -> Vec<String> {
    let set = set.iter().flat_map(|set| ["--set".to_owned(), set.clone()]);
    words.iter().cloned().chain(set).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_is_started_with_mpirun() {
        let refused = Target::read(&["generate", "runs/sample"].map(str::to_owned), &[]);
        let text = refused.expect_err("it is no run").text();
        assert!(text.contains("start it with `mpirun -n N pipewright generate`"), "{text}");
    }

    #[test]
    fn further_settings_are_checked_with_the_own_ones_of_the_command() {
        let words = ["train", "--set", "model.num_hidden_layers=4"].map(str::to_owned);
        let target = Target::read(&words, &["pipeline.ranks=4".to_owned()]).expect("the sample");
        let accepts = |ranks: u32| target.accepts(&[format!("pipeline.ranks={ranks}")]);
        assert_eq!([accepts(2), accepts(1000)], [true, false]);
    }
}
