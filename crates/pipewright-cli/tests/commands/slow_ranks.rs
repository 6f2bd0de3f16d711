//! Tests of runs with a slow rank: the display, the metrics and the report name it.

use serde_json::Value;

use crate::run::{Run, finished};

/// The steps of a run. The faults begin at step 15: on a busy machine, other ranks are also slow in some steps, and a rank is
/// named only after five steps in a row in which it alone is slow.
const STEPS: usize = 28;

/// Returns the faults of a run of so many ranks. Each action takes 20 ms longer in all steps, so that the load of the machine
/// seldom doubles its time, and 140 ms longer on the slow ranks from step 15 on.
fn faults(ranks: u32, slow: &[u32]) -> String {
    let always = (0..ranks).map(|rank| format!("slow:{rank}:1:{STEPS}"));
    let later = slow.iter().flat_map(|rank| std::iter::repeat_n(format!("slow:{rank}:15:{STEPS}"), 6));
    always.chain(later).collect::<Vec<_>>().join(",")
}

/// The most runs of a test. A busy machine may slow another rank in one of them for five steps in a row. A wrong rule names that
/// rank in all of them.
const RUNS: usize = 3;

/// Trains on two ranks and with `faults`, again if there are more or fewer events than `expected`. Returns the last
/// run, its events and what it has said.
fn train(faults: &str, set: &[&str], expected: usize) -> (Run, Vec<Value>, String) {
    let mut last = train_once(faults, set);
    for _ in 1..RUNS {
        if last.1.len() != expected {
            last = train_once(faults, set);
        }
    }
    last
}

/// Trains once.
fn train_once(faults: &str, set: &[&str]) -> (Run, Vec<Value>, String) {
    let run = Run::new();
    let mut command = run.binary();
    command.env("PIPEWRIGHT_FAULT", faults).args(["train", "small.toml"]);
    let steps = format!("run.steps={STEPS}");
    let settings = [&*steps, "pipeline.ranks=2", "pipeline.microbatches=2"];
    let (code, _, words) = finished(command.args(settings.iter().chain(set).flat_map(|set| ["--set", *set])));
    assert_eq!(code, Some(0), "{words}");
    assert_eq!(run.figures().len(), STEPS);
    let events = run.events();
    (run, events, words)
}

#[test]
fn a_slow_rank_is_named_in_the_display_the_metrics_and_the_report() {
    let (run, events, words) = train(&faults(2, &[1]), &[], 1);
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
    let (_, events, words) = train(&faults(4, &[3]), &["mesh.tensor_parallel=2"], 1);
    assert_eq!(events.len(), 1, "{events:?}: {words}");
    assert!(words.contains(": the tensor group of the ranks 2 to 3 is slow: "), "{words}");
}

/// The rank of the other replica waits for the tokens of the slow one inside its actions.
#[test]
fn a_rank_that_waits_for_tokens_of_a_slow_one_is_not_named() {
    let experts = ["model.architecture=qwen3_moe", "model.num_experts=4"];
    let together = ["mesh.data_parallel=2", "mesh.expert_parallel=2"];
    let (_, events, words) = train(&faults(4, &[1]), &[experts, together].concat(), 1);
    let [event] = &events[..] else { panic!("{events:?}: {words}") };
    assert_eq!((&event["event"], &event["ranks"]), (&"slow_rank".into(), &serde_json::json!([1])), "{event}");
}

#[test]
fn ranks_that_are_all_slow_are_not_named() {
    let (_, events, words) = train(&faults(2, &[0, 1]), &[], 0);
    assert!(events.is_empty() && !words.contains(" is slow"), "{events:?}: {words}");
}
