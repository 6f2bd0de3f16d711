//! The memory of plans: what `plan --memory` proposes holds at most the limit when it runs, as the allocator counts.

use std::collections::BTreeSet;
use std::fs;

use serde_json::Value;

use crate::profile::{command, profile};
use crate::run::Run;

/// Blocks below a kibibyte are not counted, so the model is larger than usual.
const MODEL: [&str; 9] = [
    "model.vocab_size=256",
    "model.hidden_size=64",
    "model.intermediate_size=192",
    "model.num_hidden_layers=6",
    "data.seq_len=128",
    "data.shuffle=false",
    "pipeline.ranks=2",
    "pipeline.microbatches=8",
    "run.steps=2",
];

/// The next limit, as a share of what the last plan needs.
const TIGHTER: f64 = 0.8;

/// A predicted peak is that of the run within this share.
const ERROR: f64 = 0.05;

/// Plans for a limit, and writes the best plan to `planned.toml`. Returns the plans, or the refusal.
fn plan(run: &Run, limit: u64) -> Result<Vec<Value>, (Option<i32>, String)> {
    let limit = limit.to_string();
    let arguments = [
        "plan",
        "small.toml",
        "--profile",
        "p.toml",
        "--data-parallel",
        "1",
        "--memory",
        &limit,
        "--time-limit",
        "300ms",
        "--format",
        "json",
        "-o",
        "planned.toml",
    ];
    let (code, printed, said) = command(run, &arguments, &MODEL);
    match code {
        Some(0) => {
            let report: Value = serde_json::from_str(&printed).expect("JSON");
            Ok(report["plans"].as_array().expect("plans").clone())
        }
        _ => Err((code, said)),
    }
}

/// Returns the bytes of each rank in a list.
fn peaks(of: &Value) -> Vec<u64> {
    of["peak_bytes"].as_array().expect("a list").iter().map(|bytes| bytes.as_u64().expect("bytes")).collect()
}

/// Trains and returns each rank's highest peak.
fn measured(run: &Run, configuration: &str, set: &[String]) -> Vec<u64> {
    let set: Vec<&str> = set.iter().map(String::as_str).collect();
    let (code, _, said) = command(run, &["train", configuration], &set);
    assert_eq!(code, Some(0), "{said}");
    let metrics = fs::read_to_string(run.path("out/metrics.jsonl")).expect("the metrics");
    let steps = metrics.lines().map(|line| peaks(&serde_json::from_str(line).expect("JSON")));
    let higher = |a: Vec<u64>, b: Vec<u64>| a.into_iter().zip(b).map(|(a, b)| a.max(b)).collect();
    steps.reduce(higher).expect("a step")
}

/// Returns the settings of a plan whose schedule has a name.
fn settings(plan: &Value) -> Vec<String> {
    let given = ["schedule", "stages_per_rank", "microbatches", "microbatch_size", "boundaries", "recompute"];
    let renamed = [("group", "group_size"), ("wide_warmup", "wide_warmup")];
    let keys = given.map(|key| (key, key)).into_iter().chain(renamed);
    let plan = keys
        .filter(|(key, _)| !plan[key].is_null())
        .map(|(key, name)| format!("pipeline.{name}={}", plan[key]));
    let model = MODEL.iter().map(|&key| key.to_owned());
    model.chain(["pipeline.partition=explicit".to_owned()]).chain(plan).collect()
}

/// Checks that no rank of a run holds more than the limit, and that the prediction is right.
fn check(plan: &Value, limit: u64, found: &[u64]) {
    let what = format!("{} with {limit} bytes: {plan}: {found:?}", plan["schedule"]);
    assert!(found.iter().all(|&bytes| bytes <= limit), "{what}");
    for (&found, predicted) in found.iter().zip(peaks(plan)) {
        let ratio = found as f64 / predicted as f64;
        assert!((1.0 - ERROR..=1.0 + ERROR).contains(&ratio), "{ratio}: {what}");
    }
}

#[test]
fn a_plan_holds_what_it_may_and_no_more() {
    let run = Run::new();
    fs::write(run.path("text.txt"), "the quick brown fox jumps over the lazy dog ".repeat(400))
        .expect("a text");
    profile(&run, &MODEL);
    let (mut limit, mut choices) = (1 << 40, BTreeSet::new());
    let (code, said) = loop {
        let plans = match plan(&run, limit) {
            Ok(plans) => plans,
            Err(refusal) => break refusal,
        };
        let most = |plan: &Value| peaks(plan).into_iter().max().expect("a rank");
        assert!(plans.iter().all(|plan| most(plan) <= limit), "{plans:?}");
        check(&plans[0], limit, &measured(&run, "planned.toml", &[]));
        let is_named = |plan: &&Value| plan["schedule"] != "searched" && plan["schedule"] != "zb-greedy";
        if let Some(other) = plans[1..].iter().find(is_named) {
            check(other, limit, &measured(&run, "small.toml", &settings(other)));
        }
        choices.insert(format!("{} {}", plans[0]["boundaries"], plans[0]["recompute"]));
        limit = (most(&plans[0]) as f64 * TIGHTER) as u64;
    };
    assert_eq!(code, Some(3), "{said}");
    assert!(
        said.starts_with("error: no plan fits: rank ")
            && said.contains(&format!(" and has {limit}, which is ")),
        "{said}"
    );
    let recomputes = |choice: &String| !choice.ends_with("\"none\"");
    assert!(choices.len() > 3 && choices.iter().any(recomputes), "{choices:?}");
}
