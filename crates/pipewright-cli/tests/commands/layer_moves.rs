//! Tests of runs whose layers move to other ranks while they train (`run.replan`): the results have the bits of a run whose
//! layers stay, and the display, the metrics and the report have the moves.

use std::process::Command;

use serde_json::Value;

use super::{adapters, quantised};
use crate::run::{Run, finished, tensors};
use crate::scratch;

/// The settings of all runs but the ones with adapters.
const SETTINGS: [&str; 3] = ["run.steps=80", "pipeline.ranks=2", "pipeline.microbatches=4"];

/// Rank 1 is slow, and later rank 0. The delay of an action is much longer than its computation.
const FAULTS: &str = "slow:1:16:25,slow:0:50:25";

fn run() -> Run {
    Run::of(&scratch::small(6, 4, 80))
}

fn command(run: &Run, name: &str, set: &[&str]) -> Command {
    let mut command = run.binary();
    command.args([name, "small.toml"]).args(set.iter().flat_map(|set| ["--set", *set]));
    command
}

/// Trains with faults. Returns what the run has said.
fn train(run: &Run, faults: &str, set: &[&str], expected: i32) -> String {
    let set = [set, &["run.replan=when-slow"]].concat();
    let (code, _, words) = finished(command(run, "train", &set).env("PIPEWRIGHT_FAULT", faults));
    assert_eq!(code, Some(expected), "{set:?}: {words}");
    words
}

/// Returns the moves in the metrics.
fn moves(run: &Run) -> Vec<Value> {
    run.events().into_iter().filter(|event| event["event"] == "layer_move").collect()
}

/// Trains a run whose layers move and one whose layers stay, and compares their steps and their last checkpoints. Returns
/// the first run, and what it has said.
fn check(make: impl Fn() -> Run, faults: &str, set: &[&str]) -> (Run, String) {
    let (undisturbed, run) = (make(), make());
    let (code, _, words) = finished(&mut command(&undisturbed, "train", set));
    assert_eq!(code, Some(0), "{words}");
    let words = train(&run, faults, set, 0);
    assert!(moves(&run).len() >= 2, "{set:?}: {words}");
    assert_eq!(run.figures(), undisturbed.figures(), "{set:?}: {words}");
    let newest = |run: &Run| {
        let folder = run.path("out/checkpoints").read_dir().expect("checkpoints").flatten();
        folder
            .map(|entry| entry.path())
            .filter(|path| path.join("manifest.json").exists())
            .max()
            .expect("one")
    };
    assert!(
        tensors(&newest(&run)) == tensors(&newest(&undisturbed)),
        "{set:?}: parameters and optimizer state"
    );
    (run, words)
}

fn check_small(set: &[&str]) {
    check(run, FAULTS, &[&SETTINGS, set].concat());
}

#[test]
fn moves_are_in_the_display_the_metrics_and_the_report() {
    let (run, words) = check(run, FAULTS, &SETTINGS);
    let moves = moves(&run);
    let first = &moves[0];
    assert_eq!((&first["moves"][0]["from"], &first["moves"][0]["to"]), (&1.into(), &0.into()), "{first}");
    assert!(first["slowdowns"][1].as_f64() > Some(2.0) && first["seconds"].as_f64() > Some(0.0), "{first}");
    assert!(first["after_ms"].as_f64() < first["before_ms"].as_f64(), "{first}");
    let step = first["step"].as_u64().expect("a step");
    assert!((20..=40).contains(&step) && step.is_multiple_of(5), "{first}");
    assert!(words.contains(&format!("step {step}: layer")), "{words}");
    assert!(
        words.contains(" from rank 1 to rank 0 in ") && words.contains("times its usual time"),
        "{words}"
    );
    assert!(moves.iter().any(|moved| moved["moves"][0]["to"] == 1), "{moves:?}");
    run.print(&["report", "out", "-o", "page.html"]);
    assert!(run.read("page.html").contains(" from rank 1 to rank 0 in "), "the data of the page");
}

#[test]
fn every_schedule_keeps_its_bits() {
    for schedule in ["interleaved1f1b", "zbvzerobubble", "zb-h1"] {
        check_small(&[&format!("pipeline.schedule={schedule}")]);
    }
}

#[test]
fn muon_half_precision_and_accumulation_keep_their_bits() {
    check_small(&["optimizer.name=muon"]);
    check_small(&["run.precision=bf16", "run.accumulate=2"]);
}

#[test]
fn tied_embeddings_recomputation_and_evaluations_keep_their_bits() {
    let validation = ["data.validation_share=0.2", "run.eval_every=7"];
    check_small(&[&["model.tie_word_embeddings=true", "pipeline.recompute=block"], &validation[..]].concat());
}

#[test]
fn replicas_keep_their_bits() {
    check_small(&["mesh.data_parallel=2"]);
    check_small(&["mesh.data_parallel=2", "mesh.data_parallel_mode=sharded"]);
}

#[test]
fn adapters_keep_their_bits() {
    check(adapters::folder, FAULTS, &["run.steps=80", "pipeline.ranks=2", "pipeline.microbatches=4"]);
}

/// Ranks read the quantised matrices of their new layers from the files.
#[test]
fn adapters_on_quantised_weights_keep_their_bits() {
    check(quantised::folder, FAULTS, &["run.steps=80", "pipeline.ranks=2", "pipeline.microbatches=4"]);
}

#[test]
fn a_long_run_follows_its_ranks_again_and_again() {
    let faults = "slow:1:20:50,slow:0:100:50,slow:1:200:50";
    let (run, words) = check(run, faults, &["run.steps=300", "pipeline.ranks=2", "run.checkpoint_every=60"]);
    assert!((4..=40).contains(&moves(&run).len()), "{words}");
}

/// A run that resumes begins with the cut of its configuration.
#[test]
fn a_run_that_has_moved_resumes() {
    let (undisturbed, run) = (run(), run());
    let (code, _, words) =
        finished(&mut command(&undisturbed, "train", &[&SETTINGS[..], &["run.steps=90"]].concat()));
    assert_eq!(code, Some(0), "{words}");
    train(&run, "slow:1:16:65", &SETTINGS, 0);
    assert!(!moves(&run).is_empty());
    run.succeed(&["resume", "out"], &["run.steps=90"]);
    assert_eq!(run.figures(), undisturbed.figures());
}

#[test]
fn a_rank_that_panics_in_a_move_costs_the_steps_since_the_checkpoint() {
    let (undisturbed, run) = (run(), run());
    let set = [&SETTINGS[..], &["run.checkpoint_every=10", "run.deadline_seconds=5"]].concat();
    let (code, _, words) = finished(&mut command(&undisturbed, "train", &set));
    assert_eq!(code, Some(0), "{words}");
    run.write("now", "");
    let faults = format!("slow:1:16:25,panic-in-move:0:file={}", run.path("now").display());
    let words = train(&run, &faults, &[&set[..], &["run.restarts=1"]].concat(), 0);
    assert!(words.contains("PIPEWRIGHT_FAULT asks for this panic; the run continues from step "), "{words}");
    assert_eq!(run.figures(), undisturbed.figures(), "{words}");
    // Without a restart, the run ends with the first cause.
    let run = self::run();
    run.write("now", "");
    let faults = format!("slow:1:16:25,panic-in-move:1:file={}", run.path("now").display());
    let words = train(&run, &faults, &set, 4);
    assert!(words.contains("rank 1: the stage panicked: PIPEWRIGHT_FAULT asks for this panic"), "{words}");
}

#[test]
fn settings_with_which_layers_cannot_move_are_refused() {
    let run = run();
    let refused = |set: &[&str], expected: &str| {
        run.refuse_settings(&[&["run.replan=when-slow"], set].concat(), expected);
    };
    refused(
        &["mesh.tensor_parallel=2"],
        "with ranks that compute each stage together (`mesh.tensor_parallel`)",
    );
    refused(&["run.verify=on-suspicion"], "with steps that are verified (`run.verify`)");
    refused(
        &["pipeline.schedule=seq1f1b", "pipeline.slices=2"],
        "with a schedule that cuts microbatches into slices",
    );
    run.refuse_settings(&["run.replan=always"], "never");
    // Without the key, they are not.
    run.succeed(&["check", "small.toml"], &["run.verify=on-suspicion"]);
}

#[test]
fn one_rank_trains_as_before() {
    let run = run();
    let words = train(&run, "slow:0:5:1", &["run.steps=20", "pipeline.ranks=1"], 0);
    assert!(moves(&run).is_empty(), "{words}");
}
