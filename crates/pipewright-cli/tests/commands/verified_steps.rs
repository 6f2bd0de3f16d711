//! Tests of runs that verify suspicious steps: the display, the metrics and the report name the rank that has
//! computed wrong bits.

use serde_json::Value;

use crate::run::{Run, finished};

/// Trains 12 steps on two ranks for each replica, with faults, and checks the exit code. Returns what the run has said.
fn train(run: &Run, faults: &str, set: &[&str], expected: i32) -> String {
    let mut command = run.binary();
    command.args(["train", "small.toml"]);
    if !faults.is_empty() {
        command.env("PIPEWRIGHT_FAULT", faults);
    }
    let settings = ["run.steps=12", "pipeline.ranks=2", "pipeline.microbatches=2"];
    let (code, _, words) = finished(command.args(settings.iter().chain(set).flat_map(|set| ["--set", *set])));
    assert_eq!(code, Some(expected), "{words}");
    words
}

/// Returns the only event of a run. Ranks that a busy machine slows do not count.
fn only_event(run: &Run) -> Value {
    let is_of_speed =
        |event: &Value| event["event"] == "slow_rank" || event["event"] == "rank_no_longer_slow";
    let events: Vec<Value> = run.events().into_iter().filter(|event| !is_of_speed(event)).collect();
    assert_eq!(events.len(), 1, "{events:?}");
    events[0].clone()
}

/// Checks that a run with a flipped bit on a rank has the figures of a run without, and names the rank. The
/// usual norm is known before the step with the fault.
fn check(rank: u32, set: &[&str]) {
    let (right, run) = (Run::new(), Run::new());
    train(&right, "", set, 0);
    let verified: Vec<&str> = set.iter().copied().chain(["run.verify=on-suspicion"]).collect();
    let words = train(&run, &format!("flip:{rank}:10"), &verified, 0);
    assert_eq!(run.figures(), right.figures(), "{words}");
    let event = only_event(&run);
    let found = (&event["event"], &event["step"], &event["ranks"], &event["action"], &event["repetitions"]);
    let expected = ("wrong_bits".into(), 10.into(), serde_json::json!([rank]), "1I0".into(), 2.into());
    let (name, step, ranks, action, repetitions) = &expected;
    assert_eq!(found, (name, step, ranks, action, repetitions), "{event}");
    assert!(event["hosts"].as_array().is_some_and(|hosts| hosts.len() == 1), "{event}");
    let named = format!("rank {rank} has computed wrong bits in action 1I0");
    let sentence = format!("{named}; the right bits count (on ");
    assert_eq!(words.matches(&sentence).count(), 1, "{words}");
    run.print(&["report", "out", "-o", "page.html"]);
    let page = run.read("page.html");
    assert!(page.contains(&named), "the data of the page");
}

#[test]
fn a_flipped_bit_names_its_rank_in_the_display_the_metrics_and_the_report() {
    check(1, &[]);
    check(1, &["mesh.data_parallel=2"]);
    check(1, &["run.precision=bf16"]);
    // With a larger scale, a gradient of this run overflows by itself.
    check(1, &["run.precision=f16", "run.loss_scale=1024"]);
    // Inputs leave memory.
    check(1, &["pipeline.schedule=gpipe", "pipeline.recompute=block", "pipeline.offload=file"]);
}

#[test]
fn a_gradient_that_is_not_finite_once_names_its_rank_in_each_precision() {
    for precision in ["run.precision=f32", "run.precision=bf16", "run.precision=f16"] {
        let run = Run::new();
        let words = train(&run, "infinite:1:10", &[precision, "run.verify=on-suspicion"], 0);
        assert!(
            words.contains("rank 1 has computed wrong bits in action 1I0; the right bits count"),
            "{words}"
        );
        assert_eq!(run.figures().len(), 12);
    }
}

#[test]
fn a_gradient_that_is_not_finite_with_equal_bits_skips_the_update_in_f16() {
    let run = Run::new();
    let words = train(&run, "infinite:1:10:100", &["run.precision=f16", "run.verify=on-suspicion"], 0);
    assert!(
        words.contains("so the step was computed again: all bits agree, so the step is genuine"),
        "{words}"
    );
    assert!(words.contains("update skipped"), "{words}");
}

#[test]
fn a_flipped_bit_names_its_rank_among_replicas_that_hold_experts_together() {
    let experts = ["model.architecture=qwen3_moe", "model.num_experts=4", "model.num_experts_per_tok=2"];
    let mesh = ["model.num_attention_heads=4", "mesh.data_parallel=2", "mesh.expert_parallel=2"];
    for (rank, set) in [
        (1, &[][..]),
        (3, &["mesh.data_parallel_mode=sharded"]),
        (3, &["mesh.tensor_parallel=2"]),
        (6, &["mesh.tensor_parallel=2", "mesh.data_parallel_mode=sharded"]),
    ] {
        check(rank, &[&experts[..], &mesh, set].concat());
    }
}

#[test]
fn a_genuine_loss_that_is_not_finite_ends_the_run_with_its_error() {
    let run = Run::new();
    let set = ["optimizer.learning_rate=1e30", "optimizer.clip_norm=0", "run.verify=on-suspicion"];
    let words = train(&run, "", &set, 4);
    assert!(
        words.contains("; the parameters are still those before this step")
            || words.contains("has ruined it"),
        "{words}"
    );
    assert!(!words.contains("wrong bits"), "{words}");
    let event = only_event(&run);
    assert_eq!((&event["event"], &event["repetitions"]), (&"verified_step".into(), &1.into()), "{event}");
    assert!(
        event["suspicion"]
            .as_str()
            .is_some_and(|words| words.contains("not finite") || words.contains("loss"))
    );
}

/// Trains with faults that make a gradient infinite in all computations of step 10. Returns the only event.
fn failed_by_gradient(faults: &str, ranks: u32) -> Value {
    let run = Run::new();
    let ranks = format!("pipeline.ranks={ranks}");
    let words = train(&run, faults, &[&ranks, "run.verify=on-suspicion"], 4);
    assert!(words.contains("is not finite; the parameters are still those before this step"), "{words}");
    let event = only_event(&run);
    assert!(
        event["suspicion"].as_str().is_some_and(|words| words.starts_with("the gradient of ")),
        "{event}"
    );
    let end = "the repetition shows a number that is not finite again, so the step fails";
    assert!(event["finding"].as_str().is_some_and(|finding| finding.ends_with(end)), "{event}");
    event
}

#[test]
fn a_gradient_that_is_not_finite_with_equal_bits_ends_the_run_and_names_no_rank() {
    let event = failed_by_gradient("infinite:1:10:100", 2);
    assert_eq!((&event["event"], &event["repetitions"]), (&"verified_step".into(), &1.into()), "{event}");
    assert!(event.get("ranks").is_none(), "{event}");
}

#[test]
fn a_gradient_that_is_not_finite_with_other_bits_names_the_rank() {
    let event = failed_by_gradient("infinite:1:10:100,flip:2:10", 3);
    assert_eq!((&event["event"], &event["repetitions"]), (&"wrong_bits".into(), &2.into()), "{event}");
    assert_eq!((&event["ranks"], &event["action"]), (&serde_json::json!([2]), &"2I0".into()), "{event}");
}

#[test]
fn a_fault_that_cannot_happen_is_refused() {
    let words = train(&Run::new(), "flip:0:3", &[], 2);
    assert!(words.contains("rank 0 sends, and it sends none"), "{words}");
}

#[test]
fn steps_without_equal_bits_end_the_run() {
    let run = Run::new();
    // A restarted run would not know the usual norm, and would accept the wrong bits.
    let set = ["mesh.data_parallel=2", "run.verify=on-suspicion", "run.restarts=3"];
    let words = train(&run, "flip:1:10:100", &set, 4);
    let sentence = "the ranks 1 and 3 have different bits in action 1I0, and which one is wrong is not known";
    assert!(words.contains(sentence), "{words}");
    let event = only_event(&run);
    assert_eq!((&event["event"], &event["undecided"]), (&"wrong_bits".into(), &serde_json::json!([1, 3])));
    assert_eq!(event["repetitions"], 3, "{event}");
    assert!(event["suspicion"].as_str().is_some_and(|words| words.starts_with("the gradient ")), "{event}");
}

#[test]
fn a_value_that_is_not_known_is_refused() {
    let words = train(&Run::new(), "", &["run.verify=always"], 2);
    assert!(words.contains("verify") && words.contains("on-suspicion"), "{words}");
    let words = train(&Run::new(), "", &["run.replace_wrong=true"], 2);
    assert!(words.contains("`replace_wrong` has no effect without verified steps"), "{words}");
}
