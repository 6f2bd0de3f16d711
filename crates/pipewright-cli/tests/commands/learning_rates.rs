//! Tests of the learning rate of each step, also after a resume.

use crate::run::Run;

/// Checks the learning rates in the metrics.
#[track_caller]
fn assert_rates(run: &Run, expected: &[f64]) {
    let steps = run.steps();
    let found: Vec<f64> = steps.iter().filter_map(|step| step["learning_rate"].as_f64()).collect();
    assert_eq!(found.len(), expected.len(), "{found:?}");
    assert!(found.iter().zip(expected).all(|(one, other)| (one - other).abs() < 1e-9), "{found:?}");
}

/// The rates of the run that the tests configure: the highest is 0.01, after a warm-up of 1 step.
#[test]
fn the_rate_falls_by_its_schedule() {
    let run = Run::new();
    run.train(&["run.steps=3", "optimizer.min_learning_rate=0.002"]);
    assert_rates(&run, &[0.01, 0.01, 0.006]);
    let run = Run::new();
    run.train(&["run.steps=5", "optimizer.schedule=wsd", "optimizer.decay_steps=2"]);
    assert_rates(&run, &[0.01, 0.01, 0.01, 0.01, 0.005]);
    let run = Run::new();
    run.train(&["run.steps=4", "optimizer.schedule=inverse_sqrt"]);
    assert_rates(&run, &[0.01, 0.01, 0.01 / 2_f64.sqrt(), 0.01 / 3_f64.sqrt()]);
}

#[test]
fn a_resumed_run_begins_its_schedule_again() {
    let run = Run::new();
    run.train(&["run.steps=2", "optimizer.schedule=linear"]);
    run.resume(&["run.steps=5", "optimizer.restart_at=2"]);
    assert_rates(&run, &[0.01, 0.01, 0.01, 0.01, 0.005]);
    // The settings of the resumed run are the settings of the whole run.
    let whole = Run::new();
    whole.train(&["run.steps=5", "optimizer.schedule=linear", "optimizer.restart_at=2"]);
    assert_eq!(run.figures(), whole.figures());
}

#[test]
fn wsd_goes_on_from_a_checkpoint_before_its_decay() {
    let run = Run::new();
    let wsd = ["optimizer.schedule=wsd", "optimizer.decay_steps=2", "run.checkpoint_every=2"];
    run.train(&[&["run.steps=4"], &wsd[..]].concat());
    let (_, words) = run.succeed(&["resume", "out/checkpoints/step-00000002", "--set", "run.steps=6"], &[]);
    assert!(!words.contains("the learning rate changes"), "{words}");
    assert_rates(&run, &[0.01, 0.01, 0.01, 0.01, 0.01, 0.005]);
}

#[test]
fn keys_of_another_schedule_are_named() {
    let run = Run::new();
    let set = ["optimizer.schedule=constant", "optimizer.min_learning_rate=1e-4", "optimizer.decay_steps=2"];
    let (_, words) = run.succeed(&["check", "small.toml"], &set);
    for key in ["min_learning_rate", "decay_steps"] {
        let note = format!("`optimizer.{key}` has no effect with `schedule = \"constant\"`");
        assert!(words.contains(&note), "{words}");
    }
}
