//! Loads the settings of a run relative to the working folder.

use std::path::Path;

use crate::error::RunError;
use crate::settings::{Base, Loaded, Settings, Surroundings};

/// Loads the settings from a file, or the settings of the built-in sample. Texts such as `run.steps=4` override them.
///
/// # Errors
/// When the file cannot be read, or with every mistake in it and in the texts.
pub fn load_settings(file: Option<&Path>, set: &[String]) -> Result<Loaded, RunError> {
    load(file.map_or(Base::Sample, Base::File), set)
}

/// Loads the settings of `base`. Texts such as `run.steps=4` override them.
///
/// # Errors
/// As [`load_settings`].
pub fn load(base: Base<'_>, set: &[String]) -> Result<Loaded, RunError> {
    let surroundings = Surroundings::of_process().map_err(|error| {
        RunError::input(format!("the working folder cannot be found: {error}; go to another"))
    })?;
    Ok(Settings::load(base, set, &surroundings)?)
}
