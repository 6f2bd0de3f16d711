//! Parses the options of a bench, for its tests.

use clap::{Args, Command};

/// Parses arguments as the options of a bench.
pub(crate) fn parsed<T: Args>(arguments: &[&str]) -> Result<T, clap::Error> {
    let command = T::augment_args(Command::new("bench").no_binary_name(true));
    T::from_arg_matches(&command.try_get_matches_from(arguments)?)
}
