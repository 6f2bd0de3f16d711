//! Tests of `run.checkpoint_every = "auto"`.

use serde_json::Value;

use crate::run::{Run, tensors};

/// Returns the field of each step that has it.
fn series(run: &Run, key: &str) -> Vec<(u64, f64)> {
    let field = |step: &Value| Some((step["step"].as_u64()?, step[key].as_f64()?));
    run.steps().iter().filter_map(field).collect()
}

/// A failure is expected each second, so every interval is short.
const AUTO: [&str; 4] =
    ["run.steps=40", "run.keep_checkpoints=40", "run.checkpoint_every=auto", "run.failure_every=1s"];

#[test]
fn a_chosen_interval_changes_no_bits() {
    let (fixed, chosen) = (Run::new(), Run::new());
    fixed.train(&["run.steps=40"]);
    let (_, words) = chosen.succeed(&["train", "small.toml"], &AUTO);
    assert_eq!(chosen.figures(), fixed.figures());
    let last = "checkpoints/step-00000040";
    assert_eq!(tensors(&chosen.out().join(last)), tensors(&fixed.out().join(last)));
    assert!(
        words.contains("\ncheckpoints: every ") && words.contains("a failure is expected every "),
        "{words}"
    );
    // Checkpoints come when the agreed number of steps has passed since the one before.
    let intervals = series(&chosen, "checkpoint_interval");
    assert_eq!((intervals.len(), intervals[0]), (40, (1, 4.0)));
    let mut saved = 0;
    let mut expected: Vec<String> = Vec::new();
    for (step, interval) in intervals {
        if (step - saved) as f64 >= interval || step == 40 {
            expected.push(format!("step-{step:08}"));
            saved = step;
        }
    }
    assert_eq!(chosen.checkpoints(), expected);
    assert_eq!(expected[0], "step-00000004");
    let costs = series(&chosen, "checkpoint_cost_ms");
    assert!(!costs.is_empty() && costs.iter().all(|(step, cost)| *step > 4 && *cost >= 0.0), "{costs:?}");
    assert!(series(&fixed, "checkpoint_interval").is_empty());
}

#[test]
fn a_run_with_a_chosen_interval_resumes() {
    let run = Run::new();
    let set = ["run.steps=12", AUTO[1], AUTO[2], AUTO[3], "run.accumulate=2"];
    run.train(&set);
    let figures = run.figures();
    run.resume(&["run.steps=20"]);
    assert_eq!(run.figures()[..12], figures);
    // The first checkpoint of a resumed run is measured again.
    assert_eq!(series(&run, "checkpoint_interval")[12], (13, 4.0));
    assert!(run.checkpoints().contains(&"step-00000016".to_owned()), "{:?}", run.checkpoints());
    run.resume(&["run.steps=24", "run.checkpoint_every=3"]);
    assert!(run.checkpoints().contains(&"step-00000021".to_owned()), "{:?}", run.checkpoints());
}
