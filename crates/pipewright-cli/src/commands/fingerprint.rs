//! `pipewright fingerprint`: prints the hashes of a run's states, finds the first step and the first parameter in which two
//! runs differ, or hashes the state in which a configuration begins.

use std::fmt::Write;
use std::path::PathBuf;

use clap::Args;
use pipewright_planning::failure::{Exit, Failure};
use pipewright_planning::output;
use pipewright_run::audit::initial;
use pipewright_run::fingerprints::{FirstDifference, fingerprints, first_difference};
use pipewright_run::training::load::load_settings;
use pipewright_schedule::words::counted;

use crate::keys::keys;

/// The parameters that the command names.
const NAMED: usize = 8;

/// The arguments of `pipewright fingerprint`.
#[derive(Debug, Args)]
pub(crate) struct FingerprintArguments {
    /// The folder of a run, or a configuration, for the state before its first step
    #[arg(value_name = "RUN_DIR|CONFIG")]
    path: PathBuf,
    /// The folder of another run, to find the first difference
    #[arg(value_name = "OTHER_RUN_DIR", conflicts_with_all = ["set", "layers"])]
    other: Option<PathBuf>,
    /// Print the hash of each layer too
    #[arg(long)]
    layers: bool,
    /// Override a key of the configuration
    #[arg(long, value_name = "section.key=value", value_parser = keys(), hide_possible_values = true)]
    set: Vec<String>,
}

/// Runs the command.
pub(crate) fn run(arguments: &FingerprintArguments) -> Result<(), Failure> {
    let FingerprintArguments { path, other, layers, set } = arguments;
    if let Some(other) = other {
        let (one, other) = (fingerprints(path)?, fingerprints(other)?);
        return match first_difference(&one, &other)? {
            Some(difference) => Err(Failure::new(Exit::CheckFailed, words(&difference))),
            None => output::show("the fingerprints of all steps that both runs have are equal\n"),
        };
    }
    if path.is_dir() && !set.is_empty() {
        return Err(Failure::input(format!(
            "{}: `--set` changes a configuration, and this is a folder: leave it out, or name a configuration",
            path.display()
        )));
    }
    let states = if path.is_dir() {
        fingerprints(path)?.into_iter().map(|found| (found.step, found.parameters)).collect()
    } else {
        vec![(0, initial(load_settings(Some(path), set)?)?)]
    };
    let mut text = String::new();
    for (step, state) in states {
        writeln!(text, "{step} {}", state.root()).expect("a string takes all text");
        for (layer, digest) in state.layers().into_iter().filter(|_| *layers) {
            writeln!(text, "{step} {digest} {layer}").expect("a string takes all text");
        }
    }
    output::show(&text)
}

/// Returns a sentence about the first difference between two runs.
fn words(difference: &FirstDifference) -> String {
    let FirstDifference { step, parameters, last_equal } = difference;
    let named: Vec<String> = parameters.iter().take(NAMED).map(|path| format!("`{path}`")).collect();
    let before =
        last_equal.map_or_else(String::new, |step| format!(", and step {step} is the last equal one"));
    format!(
        "the runs differ first after step {step}, in {}: {}{}{before}",
        counted(parameters.len(), "parameter"),
        named.join(", "),
        if parameters.len() > NAMED { ", ..." } else { "" }
    )
}
