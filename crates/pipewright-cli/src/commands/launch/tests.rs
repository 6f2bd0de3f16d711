//! Tests of how a launched run continues on fewer processes with the planner of this program.

use std::fs;
use std::path::Path;

use pipewright_planning::failure::Failure;
use pipewright_run::launch::{Layout, WholeRun};
use pipewright_run::settings::Settings;
use pipewright_run::training::load::load_settings;
use pipewright_run::training::model::read_model;

use super::REPLANNER;
use crate::planning::auto::assumed_profile;

fn read(folder: &Path, runs_here: bool) -> Result<WholeRun, Failure> {
    WholeRun::read(folder, &[], runs_here, REPLANNER)
}

/// Writes the configuration of a run into its folder, and returns it.
fn begin(folder: &Path, set: &[&str]) -> Settings {
    let out = format!("run.out={}", folder.display());
    let transport = if cfg!(feature = "mpi") { "pipeline.transport=mpi" } else { "pipeline.transport=local" };
    let set = [set, &[transport, &out]].concat();
    let set: Vec<String> = set.into_iter().map(str::to_owned).collect();
    let settings = load_settings(None, &set).expect("settings").settings;
    fs::write(folder.join("config.toml"), settings.to_toml()).expect("a file");
    settings
}

/// Checks how a run continues on `slots` processes, and that it has its configuration again on more.
fn check(set: &[&str], slots: u32, expected: Result<(u32, u32, &str), &str>) {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let settings = begin(folder.path(), set);
    let whole = read(folder.path(), true).expect("a run");
    match (whole.for_slots(slots), expected) {
        (Ok(distribution), Ok((ranks, replicas, words))) => {
            distribution.apply(folder.path()).expect("the folder takes files");
            let again = load_settings(Some(&folder.path().join("config.toml")), &[]).expect("settings");
            let layout = Layout::of(&again.settings);
            assert_eq!((layout.ranks, layout.replicas), (ranks, replicas), "{set:?}");
            assert_eq!(layout, distribution.layout);
            let change = distribution.change_from(whole.layout(), slots).unwrap_or_default();
            assert!(change.contains(words), "`{words}` in {change}");
            assert!(again.scheduled().is_ok(), "the schedule is stored");
            let back = whole.for_slots(u32::MAX).expect("the configured mesh");
            back.apply(folder.path()).expect("the folder takes files");
            let again = load_settings(Some(&folder.path().join("config.toml")), &[]).expect("settings");
            assert_eq!(again.settings, settings, "the configured mesh again");
        }
        (Err(failure), Err(expected)) => assert!(failure.text().contains(expected), "{}", failure.text()),
        (found, expected) => {
            panic!("{:?} instead of {expected:?}", found.map(|distribution| distribution.layout))
        }
    }
}

#[test]
fn a_run_without_a_plan_keeps_its_schedule() {
    let set = ["pipeline.ranks=4", "mesh.data_parallel=2"];
    check(&set, 8, Ok((4, 2, "")));
    check(&set, 7, Ok((4, 1, "with 1 replica instead of 2 (7 processes can run; 1f1b as configured")));
    check(
        &set,
        3,
        Ok((3, 1, "with 1 replica instead of 2 and with 3 ranks instead of 4 (3 processes can run")),
    );
}

#[test]
fn a_run_with_a_plan_is_planned_again() {
    let explicit = ["pipeline.ranks=4", "pipeline.partition=explicit", "pipeline.boundaries=[2,3,5]"];
    check(&explicit, 3, Ok((3, 1, "with 3 ranks instead of 4 (3 processes can run; planned: ")));
    check(&explicit, 1, Ok((1, 1, "for assumed times)")));
    let planned = [
        "pipeline.ranks=4",
        "run.planned_step_ms=20.0",
        "pipeline.schedule=interleaved-1f1b",
        "pipeline.stages_per_rank=2",
        "pipeline.group_size=4",
        "model.num_hidden_layers=6",
    ];
    check(&planned, 2, Ok((2, 1, "with 2 ranks instead of 4 (2 processes can run; planned: ")));
}

#[test]
fn a_plan_is_for_the_times_of_the_profile_in_the_folder() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let settings = begin(folder.path(), &["pipeline.ranks=4"]);
    let profile = assumed_profile(&settings, &read_model(&settings).expect("the model of the sample"));
    let text = toml::Table::try_from(profile).expect("a profile is a table").to_string();
    fs::write(folder.path().join("profile-0.toml"), text).expect("a file");
    let whole = read(folder.path(), true).expect("a run");
    let change = whole.for_slots(3).expect("a plan").change_from(whole.layout(), 3).expect("a change");
    assert!(change.starts_with("with 3 ranks instead of 4 (3 processes can run; planned: "), "{change}");
    assert!(change.ends_with("for the times in profile-0.toml)"), "{change}");
}

#[test]
fn a_layout_that_does_not_fit_into_memory_is_refused() {
    // The embedding of one rank would take terabytes.
    let set = ["pipeline.ranks=4", "model.vocab_size=268435456", "model.hidden_size=8192"];
    check(&set, 3, Err("does not fit into memory"));
    let folder = tempfile::tempdir().expect("a scratch folder");
    begin(folder.path(), &set);
    let whole = read(folder.path(), false).expect("a run");
    let elsewhere = whole.for_slots(3).expect("the memory of other machines is not known").layout;
    assert_eq!(elsewhere, Layout { ranks: 3, replicas: 1 });
}
