//! Updates before the gradient norm, through the command line: they have the bits of updates after it.

use serde_json::Value;

use crate::run::{Figures, Run, tensors};

const SIZE: [&str; 3] = ["run.steps=6", "pipeline.ranks=2", "run.deadline_seconds=20"];
const EARLY: &str = "optimizer.post_validation=true";

/// The figures of a run, and the tensors of its last checkpoint.
type Outcome = (Vec<Figures>, Vec<(String, Vec<u8>)>);

fn outcome(run: &Run) -> Outcome {
    (run.figures(), tensors(&run.path("out/checkpoints/step-00000006")))
}

fn train(set: &[&str]) -> (Run, Outcome) {
    let run = Run::new();
    run.train(&[&SIZE[..], set].concat());
    let outcome = outcome(&run);
    (run, outcome)
}

/// Returns the number of steps of a run with early updates that were repaired, and that were kept.
fn early_steps(run: &Run) -> [usize; 2] {
    let mut counts = [0, 0];
    for step in run.steps() {
        let repaired = step["repaired"] == true;
        match step["early_update_ms"].as_array() {
            Some(times) => {
                assert_eq!(
                    times.len(),
                    step["peak_bytes"].as_array().map_or(0, Vec::len),
                    "one for each rank"
                );
                counts[usize::from(!repaired)] += 1;
            }
            None => assert!(!repaired, "{step}"),
        }
    }
    counts
}

/// Returns the median of the gradient norms of a run.
fn median_norm(figures: &[Figures]) -> String {
    let mut norms: Vec<f64> = figures.iter().map(|(.., norm)| norm.parse().expect("a number")).collect();
    norms.sort_by(f64::total_cmp);
    norms[norms.len() / 2].to_string()
}

/// Trains with and without early updates: with a limit that all norms exceed, without a limit, and with one
/// between the norms. Returns the sums of [`early_steps`].
fn check(set: &[&str]) -> [usize; 2] {
    let (_, unclipped) = train(&[set, &["optimizer.clip_norm=0"]].concat());
    let median = format!("optimizer.clip_norm={}", median_norm(&unclipped.0));
    let mut counts = [0, 0];
    for clip in ["optimizer.clip_norm=0", "optimizer.clip_norm=0.0001", &median] {
        let (norm_first, expected) = train(&[set, &[clip]].concat());
        assert_eq!(early_steps(&norm_first), [0, 0]);
        let (early, found) = train(&[set, &[clip, EARLY]].concat());
        assert!(found == expected, "{set:?} {clip}: {:?} {:?}", found.0, expected.0);
        let [repaired, kept] = early_steps(&early);
        assert!(clip != "optimizer.clip_norm=0" || repaired == 0, "{set:?}: nothing is clipped");
        assert!(clip != "optimizer.clip_norm=0.0001" || kept == 0, "{set:?}: all are clipped");
        counts = [counts[0] + repaired, counts[1] + kept];
    }
    counts
}

#[test]
fn runs_with_early_updates_have_the_same_figures_and_checkpoints() {
    let experts = ["model.architecture=qwen3_moe", "model.num_experts=4", "mesh.data_parallel=2"];
    let cases: [&[&str]; 6] = [
        &["run.accumulate=2", "run.precision=bf16"],
        &["pipeline.schedule=zb-h1", "mesh.data_parallel=2", "mesh.data_parallel_mode=sharded"],
        &["mesh.tensor_parallel=2", "run.verify=on-suspicion"],
        &[&experts[..], &["mesh.expert_parallel=2"]].concat(),
        &["optimizer.name=muon", "optimizer.groups=[{ parameters = [\"norm\"], clip_norm = 0.001 }]"],
        &["optimizer.name=adafactor", "pipeline.schedule=zbvzerobubble", "run.precision=f16"],
    ];
    // Whether a rank waits for the norm depends on the machine.
    let mut counts = [0, 0];
    for case in cases {
        // The norm of a group is above its limit although the others are not.
        let has_group = case.iter().any(|set| set.contains("clip_norm"));
        if has_group {
            let (_, expected) = train(case);
            let (_, found) = train(&[case, &[EARLY]].concat());
            assert!(found == expected, "{case:?}");
        } else {
            let [repaired, kept] = check(case);
            counts = [counts[0] + repaired, counts[1] + kept];
        }
    }
    assert!(counts[0] > 0 && counts[1] > 0, "{counts:?}");
}

#[test]
fn a_run_resumes_with_and_without_early_updates() {
    // The rates of the other schedule of the configuration depend on the number of steps.
    let constant = "optimizer.schedule=constant";
    let (_, expected) = train(&[constant]);
    for (before, after) in [(EARLY, "optimizer.post_validation=false"), ("run.seed=42", EARLY)] {
        let run = Run::new();
        run.train(&[&SIZE[..], &["run.steps=3", constant, before]].concat());
        run.resume(&["run.steps=6", after]);
        assert!(outcome(&run) == expected, "{before}, then {after}");
    }
}

/// Returns the memory of the ranks that `check` estimates.
fn memory(run: &Run, set: &[&str]) -> Vec<Value> {
    run.estimates("small.toml", set)
}

fn number(rank: &Value, key: &str) -> u64 {
    rank[key].as_u64().unwrap_or(0)
}

#[test]
fn check_counts_what_can_undo_an_update() {
    let run = Run::new();
    let sum = |rank: &Value, keys: &[&str]| keys.iter().map(|key| number(rank, key)).sum::<u64>();
    let total = |rank: &Value, rest: u64| {
        sum(rank, &["parameters", "gradients", "optimizer", "temporary"]) + rest - number(rank, "apart")
    };
    for set in [&[][..], &["mesh.data_parallel=2", "mesh.data_parallel_mode=sharded"]] {
        let without = memory(&run, &[&SIZE[..], set].concat());
        let with = memory(&run, &[&SIZE[..], set, &[EARLY]].concat());
        for (rank, plain) in with.iter().zip(&without) {
            assert!(plain.get("undo").is_none() && number(rank, "undo") > 0, "{rank}");
            let rest = number(rank, "activations").max(number(rank, "undo"));
            assert_eq!(number(rank, "total"), total(rank, rest));
            assert_eq!(number(plain, "total"), total(plain, number(plain, "activations")));
            let both = sum(rank, &["parameters", "optimizer"]);
            if set.is_empty() {
                assert_eq!(number(rank, "undo"), both, "a copy of both");
            } else {
                assert!(number(rank, "undo") < both, "its rows only");
            }
        }
    }
}

/// At these sizes the estimate leaves out many temporary tensors, so the peaks with and without the option
/// are compared. The rank that ends first updates early.
#[test]
fn early_updates_take_the_memory_that_check_counts() {
    let run = Run::new();
    let large = ["model.hidden_size=128", "model.intermediate_size=256", "model.num_attention_heads=4"];
    let set: Vec<&str> = SIZE.iter().chain(&large).chain(&["optimizer.clip_norm=0"]).copied().collect();
    let undo = number(&memory(&run, &[&set[..], &[EARLY]].concat())[1], "undo") as f64;
    let [without, with] = ["optimizer.post_validation=false", EARLY].map(|early| {
        run.succeed(&["train", "small.toml"], &[&set[..], &[early]].concat());
        run.steps().iter().map(|step| step["peak_bytes"][1].as_f64().expect("bytes")).fold(0.0, f64::max)
    });
    let share = (with - without) / undo;
    assert!((0.8..1.05).contains(&share), "{with} with it, {without} without it: {share} of {undo}");
}
