//! The published runs, and settings made from them.

use std::sync::LazyLock;

use pipewright_cluster::machine::Machine;
use pipewright_cluster::pipeline::Programs;
use pipewright_cluster::predict::{Prediction, predict};
use pipewright_cluster::published::{Published, Run, read};
use pipewright_cluster::setting::Setting;

use crate::comparison::{Comparison, compare, compare_with_plans};

/// Machines, models and runs.
pub(crate) const RUNS: &str = include_str!("runs.toml");

/// The published runs.
pub(crate) fn published() -> Published {
    read(RUNS).expect("the published runs")
}

/// The published runs next to their predictions and the plans that the search chooses. They take seconds, so
/// that tests share them.
pub(crate) static WITH_PLANS: LazyLock<Comparison> =
    LazyLock::new(|| compare_with_plans(&published()).expect("predictions"));

/// The published runs next to their predictions.
pub(crate) fn comparison() -> Comparison {
    compare(&published()).expect("predictions")
}

/// The cases of a table: what is given, ` => `, and a message. Indented lines continue the line above.
pub(crate) fn cases(table: &str) -> Vec<(String, String)> {
    let lines = table.replace("\n    ", " ");
    let lines = lines.lines().filter(|line| !line.is_empty());
    let cases = lines.map(|line| line.split_once(" => ").expect("what is given, and a message"));
    cases.map(|(given, message)| (given.to_owned(), message.to_owned())).collect()
}

/// The published run of a model on a machine whose name contains `machine`.
pub(crate) fn run(model: &str, machine: &str) -> Run {
    let is_it = |run: &&Run| run.model.name == model && run.machine.name.contains(machine);
    published().runs.iter().find(is_it).expect("a published run").clone()
}

/// A run on another machine.
pub(crate) fn on<'a>(run: &'a Run, machine: &'a Machine) -> Setting<'a> {
    Setting { model: &run.model, layout: &run.layout, machine }
}

/// The prediction of a run.
pub(crate) fn predicted(run: &Run) -> Prediction {
    let setting = Setting { model: &run.model, layout: &run.layout, machine: &run.machine };
    predict(&setting, &mut Programs::default()).expect("a prediction")
}
