//! The arguments that say which run is meant, shared by the commands that prepare one.

use std::path::PathBuf;

use clap::Args;

/// The configuration of a run.
#[derive(Debug, Args)]
pub(crate) struct RunArguments {
    /// The configuration; without it, the built-in sample
    #[arg(value_name = "CONFIG.toml")]
    pub(crate) config: Option<PathBuf>,
    /// Override a key with a TOML value, or with a text where the value is no TOML
    #[arg(long, value_name = "section.key=value")]
    pub(crate) set: Vec<String>,
}
