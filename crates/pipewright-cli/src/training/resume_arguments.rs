//! The arguments of `pipewright resume`, and the settings that they load.

use std::path::PathBuf;

use clap::Args;

use crate::failure::Failure;
use crate::run_folder;
use crate::training::arguments::load_settings;
use crate::training::checkpoint_path::RunPath;
use pipewright_run::settings::Loaded;

/// The arguments of `pipewright resume`.
#[derive(Debug, Args)]
pub(crate) struct ResumeArguments {
    /// The folder of the run, to resume from its newest checkpoint, or one of its checkpoints
    #[arg(value_name = "RUN_DIR")]
    pub(crate) run: PathBuf,
    /// Override a key of the run's configuration
    #[arg(long, value_name = "section.key=value")]
    pub(crate) set: Vec<String>,
}

impl ResumeArguments {
    /// Loads the settings with which the run resumes.
    pub(crate) fn load(&self) -> Result<Loaded, Failure> {
        let path = RunPath::of(&self.run)?;
        let config = run_folder::config_of(&path.run).map_err(Failure::input)?;
        load_settings(Some(&config), &self.overrides(&path)?)
    }

    /// Returns the `--set` arguments, and behind them the folder of the run.
    pub(crate) fn overrides(&self, path: &RunPath) -> Result<Vec<String>, Failure> {
        let mut set = self.set.clone();
        if set.iter().any(|argument| argument.trim_start().starts_with("run.out")) {
            return Err(Failure::input(format!(
                "a run is resumed in its own folder, {}; leave out run.out",
                path.run.display()
            )));
        }
        // The run may have been moved since it wrote its configuration.
        set.push(format!("run.out={}", toml::Value::String(path.run.display().to_string())));
        Ok(set)
    }
}
