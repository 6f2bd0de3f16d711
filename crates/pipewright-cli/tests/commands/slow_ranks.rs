//! Tests of runs with a slow rank: the display, the metrics and the report name it.

use serde_json::Value;

use crate::run::{Run, finished};

/// The steps of a run. The faults begin at step 15 and last for 30 steps: on a busy machine, other ranks are also slow in some
/// steps, and a rank is named only after five steps in a row in which it alone is slow.
const STEPS: usize = 44;

/// Trains on two ranks and with `faults`. Returns the events in the metrics and what the run has said.
fn train(run: &Run, faults: &str, set: &[&str]) -> (Vec<Value>, String) {
    let mut command = run.binary();
    command.env("PIPEWRIGHT_FAULT", faults).args(["train", "small.toml"]);
    let steps = format!("run.steps={STEPS}");
    let settings = [&*steps, "pipeline.ranks=2", "pipeline.microbatches=2"];
    let (code, _, words) = finished(command.args(settings.iter().chain(set).flat_map(|set| ["--set", *set])));
    assert_eq!(code, Some(0), "{words}");
    assert_eq!(run.figures().len(), STEPS);
    (run.events(), words)
}

#[test]
fn a_slow_rank_is_named_in_the_display_the_metrics_and_the_report() {
    let run = Run::new();
    let (events, words) = train(&run, "slow:1:15:30", &[]);
    let [event] = &events[..] else { panic!("{events:?}: {words}") };
    assert_eq!((&event["event"], &event["ranks"]), (&"slow_rank".into(), &serde_json::json!([1])), "{event}");
    assert!(event["step"].as_u64() >= Some(19) && event["slowdown"].as_f64() >= Some(2.0), "{event}");
    assert_eq!(words.matches(": rank 1 is slow: its actions take ").count(), 1, "{words}");
    run.print(&["report", "out", "-o", "page.html"]);
    let page = run.read("page.html");
    assert!(page.contains("rank 1 is slow: its actions take "), "the data of the page");
}

#[test]
fn a_slow_tensor_group_is_named_as_a_whole() {
    let (events, words) = train(&Run::new(), "slow:3:15:30", &["mesh.tensor_parallel=2"]);
    assert_eq!(events.len(), 1, "{events:?}: {words}");
    assert!(words.contains(": the tensor group of the ranks 2 to 3 is slow: "), "{words}");
}

/// The rank of the other replica waits for the tokens of the slow one inside its actions.
#[test]
fn a_rank_that_waits_for_tokens_of_a_slow_one_is_not_named() {
    let experts = ["model.architecture=qwen3_moe", "model.num_experts=4"];
    let together = ["mesh.data_parallel=2", "mesh.expert_parallel=2"];
    let (events, words) = train(&Run::new(), "slow:1:15:30", &[experts, together].concat());
    let [event] = &events[..] else { panic!("{events:?}: {words}") };
    assert_eq!((&event["event"], &event["ranks"]), (&"slow_rank".into(), &serde_json::json!([1])), "{event}");
}

#[test]
fn ranks_that_are_all_slow_are_not_named() {
    let (events, words) = train(&Run::new(), "slow:0:15:30,slow:1:15:30", &[]);
    assert!(events.is_empty() && !words.contains(" is slow"), "{events:?}: {words}");
}
