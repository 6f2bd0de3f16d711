//! The memory of plans: the tensors of what `plan --memory` proposes hold at most the limit when it runs, as
//! the allocator counts.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::profile::{profile, write_times};
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
const TIGHTER: f64 = 0.9;

/// The bytes of lists of a rank that are not in a profile. Their size does not depend on the size of the
/// tensors.
const LISTS: u64 = 96 << 10;

/// A predicted peak equals the peak of the run within this share.
const ERROR: f64 = 0.05;

/// Plans for a limit, and writes the best plan to `planned.toml`. Returns the plans, or the refusal.
fn plan(run: &Run, limit: u64, set: &[&str], more: &[&str]) -> Result<Vec<Value>, (Option<i32>, String)> {
    let limit = limit.to_string();
    let arguments = ["plan", "small.toml", "--profile", "p.toml", "--data-parallel", "1", "--memory", &limit];
    let how = ["--time-limit", "8s", "--format", "json", "-o", "planned.toml"];
    let (code, printed, said) = run.call(&[&arguments[..], &how, more].concat(), set);
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

/// Returns the bytes of the rank with the most.
fn most(plan: &Value) -> u64 {
    peaks(plan).into_iter().max().expect("a rank")
}

/// Trains and returns each rank's highest peak.
fn measured(run: &Run, configuration: &str, set: &[String]) -> Vec<u64> {
    let set: Vec<&str> = set.iter().map(String::as_str).collect();
    run.succeed(&["train", configuration], &set);
    let steps = run.steps();
    let steps = steps.iter().map(peaks);
    let higher = |a: Vec<u64>, b: Vec<u64>| a.into_iter().zip(b).map(|(a, b)| a.max(b)).collect();
    steps.reduce(higher).expect("a step")
}

/// Returns the settings of a plan whose schedule has a name.
fn settings(plan: &Value) -> Vec<String> {
    let given = ["schedule", "stages_per_rank", "microbatches", "microbatch_size", "boundaries", "recompute"];
    let renamed = [("group", "group_size"), ("wide_warmup", "wide_warmup"), ("head_parts", "head_parts")];
    let keys = given.map(|key| (key, key)).into_iter().chain(renamed);
    let plan = keys
        .filter(|(key, _)| !plan[key].is_null())
        // In TOML, a key and its value have `=` between them.
        .map(|(key, name)| format!("pipeline.{name}={}", plan[key]).replace("\":", "\"="));
    let model = MODEL.iter().map(|&key| key.to_owned());
    model.chain(["pipeline.partition=explicit".to_owned()]).chain(plan).collect()
}

/// Checks that no rank of a run holds tensors of more bytes than the limit, and that the prediction is right.
fn check(plan: &Value, limit: u64, found: &[u64]) {
    let what = format!("{} with {limit} bytes: {plan}: {found:?}", plan["schedule"]);
    assert!(found.iter().all(|&bytes| bytes <= limit + LISTS), "{what}");
    for (&found, predicted) in found.iter().zip(peaks(plan)) {
        let ratio = found as f64 / predicted as f64;
        assert!((1.0 - ERROR..=1.0 + ERROR).contains(&ratio), "{ratio}: {what}");
    }
}

/// Makes a folder with a text that is long enough for the model, and measures the model.
fn profiled() -> Run {
    let run = Run::new();
    run.write("text.txt", "the quick brown fox jumps over the lazy dog ".repeat(400));
    profile(&run, &MODEL);
    write_times(&run, "p.toml", 1.0);
    run
}

/// Checks that the memory of a run with its head in parts is predicted from a profile of the whole head, and
/// from one of that number of parts.
fn check_parts(run: &Run, schedule: &str, stages_per_rank: u32, boundaries: &str, parts: u32) {
    let set = [
        format!("pipeline.schedule={schedule}"),
        format!("pipeline.stages_per_rank={stages_per_rank}"),
        format!("pipeline.boundaries=[{boundaries}]"),
        format!("pipeline.head_parts={parts}"),
        "pipeline.partition=explicit".to_owned(),
    ];
    let model = MODEL.iter().map(|&key| key.to_owned());
    let found = measured(run, "small.toml", &model.chain(set).collect::<Vec<_>>());
    for profile in ["p.toml", &format!("p{parts}.toml")] {
        let (stages, parts) = (stages_per_rank.to_string(), parts.to_string());
        let choice = ["--boundaries", boundaries, "--stages-per-rank", &stages, "--head-parts", &parts];
        check_simulated(run, schedule, &choice, profile, &found);
    }
}

/// Checks that the simulation of a choice predicts the measured peaks.
fn check_simulated(run: &Run, schedule: &str, choice: &[&str], profile: &str, found: &[u64]) {
    let size = ["--ranks", "2", "--microbatches", "8"];
    check_simulation(run, &[&[schedule][..], choice, &size].concat(), profile, found);
}

/// Checks that a simulation predicts the measured peaks. Returns the prediction.
fn check_simulation(run: &Run, of: &[&str], profile: &str, found: &[u64]) -> Vec<u64> {
    let output = ["--format", "json", "--profile", profile];
    let (printed, _) = run.succeed(&[&["simulate"][..], of, &output].concat(), &[]);
    let predicted = peaks(&serde_json::from_str(&printed).expect("JSON"));
    for (&found, &predicted) in found.iter().zip(&predicted) {
        let ratio = found as f64 / predicted as f64;
        let what = format!("{of:?}, {profile}: {found} of {predicted}");
        assert!((1.0 - ERROR..=1.0 + ERROR).contains(&ratio), "{ratio}: {what}");
    }
    predicted
}

/// Checks that the memory of a run is predicted whose stages recompute in part: in a configuration, and in an
/// argument.
fn check_recompute(run: &Run, schedule: &str, boundaries: &str, configured: &str, argument: &str) {
    let set = [
        format!("pipeline.schedule={schedule}"),
        format!("pipeline.boundaries=[{boundaries}]"),
        format!("pipeline.recompute={configured}"),
        "pipeline.partition=explicit".to_owned(),
    ];
    let model = MODEL.iter().map(|&key| key.to_owned());
    let found = measured(run, "small.toml", &model.chain(set).collect::<Vec<_>>());
    check_simulated(run, schedule, &["--boundaries", boundaries, "--recompute", argument], "p.toml", &found);
}

#[test]
fn the_memory_of_stages_that_recompute_in_part_is_predicted() {
    let run = profiled();
    check_recompute(&run, "1f1b", "4", "[{ stage = 0, layers = 2 }]", "0:layers=2");
    check_recompute(&run, "gpipe", "4", "[{ stage = 0, keep = 3 }, 1]", "0:keep=3,1");
    let both = "[{ stage = 0, layers = 3, keep = 2 }, { stage = 1, layers = 2 }]";
    check_recompute(&run, "gpipe", "4", both, "0:layers=3:keep=2,1:layers=2");
}

#[test]
fn the_memory_of_stages_that_recompute_parts_of_layers_is_predicted() {
    let run = profiled();
    for schedule in ["1f1b", "gpipe", "zb-h1"] {
        check_recompute(&run, schedule, "4", "parts", "parts");
    }
    let both = "[{ stage = 0, layers = 2, parts = ['norms'] }, { stage = 1, parts = ['feed-forward'] }]";
    check_recompute(&run, "gpipe", "4", both, "0:layers=2:parts=norms,1:parts=feed-forward");
}

#[test]
fn the_memory_of_stages_whose_inputs_leave_is_predicted() {
    let run = profiled();
    let written = |arguments: &[&str]| {
        run.succeed(arguments, &[]);
    };
    // Many microbatches, because an input is small compared with activations and parameters.
    written(&["schedule", "gpipe", "--ranks", "2", "--microbatches", "64", "-o", "rows.csv"]);
    let passes = "send-early,send-recv";
    written(&["lower", "rows.csv", "--pass", passes, "-o", "staying.csv"]);
    written(&["lower", "rows.csv", "--pass", &format!("{passes},offload"), "-o", "moving.csv"]);
    let [staying, moving] = [("staying.csv", "none"), ("moving.csv", "file")].map(|(rows, offload)| {
        let set = [
            "pipeline.microbatches=64".to_owned(),
            format!("pipeline.schedule={rows}"),
            format!("pipeline.offload={offload}"),
            "pipeline.recompute=stage".to_owned(),
            "pipeline.boundaries=[4]".to_owned(),
            "pipeline.partition=explicit".to_owned(),
        ];
        let model = MODEL.iter().filter(|key| !key.contains("microbatches")).map(|&key| key.to_owned());
        let found = measured(&run, "small.toml", &model.chain(set).collect::<Vec<_>>());
        let of = ["--csv", rows, "--boundaries", "4", "--recompute", "stage"];
        check_simulation(&run, &of, "p.toml", &found)
    });
    assert_eq!(moving[0], staying[0], "token ids stay");
    assert!((moving[1] as f64) < (1.0 - 4.0 * ERROR) * staying[1] as f64, "{moving:?} {staying:?}");
}

#[test]
fn the_memory_of_the_parts_of_a_head_is_predicted() {
    let run = profiled();
    for parts in ["2", "4"] {
        let (name, key) = (format!("p{parts}.toml"), format!("pipeline.head_parts={parts}"));
        let arguments = ["profile", "small.toml", "--time-limit", "1s", "-o", &name];
        run.succeed(&arguments, &[&MODEL[..], &[key.as_str()]].concat());
    }
    // Parts that share their stage, that are alone on a rank, and that are apart on one rank.
    check_parts(&run, "loopedbfs", 3, "1,2,4,6,8", 4);
    check_parts(&run, "1f1b", 1, "7", 4);
    check_parts(&run, "interleaved1f1b", 2, "4,7,9", 4);
    check_parts(&run, "zbvzerobubble", 2, "2,5,8", 2);
}

#[test]
fn a_plan_counts_the_state_of_the_optimizer() {
    let run = profiled();
    for name in ["sgd", "muon", "adafactor", "adamw_8bit"] {
        let key = format!("optimizer.name={name}");
        let set = [&MODEL[..], &[key.as_str()]].concat();
        profile(&run, &set);
        write_times(&run, "p.toml", 1.0);
        let mut limit = 1 << 40;
        for _ in 0..2 {
            // Parts of a head, which share tensors over ranks, have a test of their own.
            let plans = plan(&run, limit, &set, &["--head-parts", "1"]).expect("a plan");
            check(&plans[0], limit, &measured(&run, "planned.toml", &[]));
            limit = (most(&plans[0]) as f64 * TIGHTER) as u64;
        }
    }
}

#[test]
fn a_plan_holds_what_it_may_and_no_more() {
    let run = profiled();
    let (mut limit, mut choices) = (1 << 40, BTreeSet::new());
    let (code, said) = loop {
        let plans = match plan(&run, limit, &MODEL, &[]) {
            Ok(plans) => plans,
            Err(refusal) => break refusal,
        };
        assert!(plans.iter().all(|plan| most(plan) <= limit), "{plans:?}");
        check(&plans[0], limit, &measured(&run, "planned.toml", &[]));
        // The orders of the others also depend on costs.
        let is_named = |plan: &&Value| {
            ["searched", "zb-greedy", "vocab1f1b"].iter().all(|&other| plan["schedule"] != other)
        };
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
