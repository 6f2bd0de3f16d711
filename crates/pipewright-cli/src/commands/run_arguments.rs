//! The arguments that specify a run. The commands that prepare a run share them.

use std::path::PathBuf;

use clap::Args;

/// The configuration of a run.
#[derive(Debug, Args)]
pub(crate) struct RunArguments {
    /// The configuration file; by default, the built-in sample
    #[arg(value_name = "CONFIG.toml")]
    pub(crate) config: Option<PathBuf>,
    /// Override a key with a TOML value; a value that is not TOML is taken as text
    #[arg(long, value_name = "section.key=value")]
    pub(crate) set: Vec<String>,
}
