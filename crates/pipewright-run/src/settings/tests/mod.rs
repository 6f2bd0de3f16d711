//! Tests that turn text into settings. Tests of the binary check how the errors look on a terminal.

mod adapter;
mod book;
mod combinations;
mod mix;
mod model;
mod offload;
mod pipeline;
mod preference;
mod values;
mod whole;

use std::path::Path;

use crate::settings::{Base, ConfigError, Loaded, Settings, Surroundings};

/// Loads the settings from a file's text in a scratch folder. On failure, returns the problems, one per line,
/// without the path of the folder.
fn load(text: Option<&str>, arguments: &[&str]) -> Result<Settings, String> {
    load_all(text, arguments).map(|loaded| loaded.settings)
}

/// Like [`load`], with the schedule.
fn load_all(text: Option<&str>, arguments: &[&str]) -> Result<Loaded, String> {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let file = folder.path().join("a.toml");
    if let Some(text) = text {
        std::fs::write(&file, text).expect("the scratch folder takes files");
    }
    let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
    let surroundings = surroundings();
    let file = text.is_some().then_some(file.as_path());
    let loaded = Settings::load(file.map_or(Base::Sample, Base::File), &arguments, &surroundings);
    loaded.map_err(|error| match error {
        ConfigError::Problems(problems) => {
            let prefix = format!("{}/", folder.path().display());
            let lines: Vec<String> =
                problems.0.iter().map(|problem| problem.to_string().replace(&prefix, "")).collect();
            lines.join("\n")
        }
        error @ ConfigError::Read { .. } => error.to_string(),
    })
}

fn surroundings() -> Surroundings {
    Surroundings { working_folder: Path::new(env!("CARGO_MANIFEST_DIR")).to_owned(), variable: |_| None }
}

fn check(text: &str, problems: &[&str]) {
    let found = load(Some(text), &[]).err().unwrap_or_default();
    assert_eq!(found.lines().collect::<Vec<_>>(), problems);
}

fn check_set(arguments: &[&str], problems: &[&str]) {
    let found = load(Some(""), arguments).err().unwrap_or_default();
    assert_eq!(found.lines().collect::<Vec<_>>(), problems);
}
