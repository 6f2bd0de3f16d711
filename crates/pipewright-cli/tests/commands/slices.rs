//! Tests of training with slices of microbatches: figures as with whole ones, resumption between both, and
//! refusals.

use crate::run::{Run, assert_near};
use crate::scratch;

/// The largest relative difference from whole microbatches.
const CLOSE: f64 = 1e-5;

const SLICES: [&str; 2] = ["pipeline.schedule=seq1f1b", "pipeline.slices=4"];

/// Trains ten steps with these settings.
fn losses(set: &[&str]) -> Vec<[f64; 2]> {
    let run = Run::new();
    run.train(&[&["run.steps=10"], set].concat());
    run.losses()
}

#[test]
fn slices_train_as_whole_microbatches_do() {
    let whole = losses(&["pipeline.ranks=1"]);
    assert_eq!(losses(&[SLICES[0], "pipeline.slices=1"]), whole, "one slice");
    for set in [
        &["pipeline.ranks=1", SLICES[0], SLICES[1]][..],
        &["pipeline.ranks=2", SLICES[0]],
        &["pipeline.ranks=4", SLICES[0], SLICES[1]],
        &["mesh.data_parallel=2", SLICES[0], SLICES[1]],
        &["mesh.data_parallel=2", "mesh.data_parallel_mode=sharded", SLICES[0], SLICES[1]],
    ] {
        assert_near(&losses(set), &whole, CLOSE, &format!("{set:?}"));
    }
}

#[test]
fn a_run_resumes_with_slices_and_without() {
    const RATE: &str = "optimizer.schedule=constant";
    const WHOLE: &str = "pipeline.schedule=1f1b";
    let whole = losses(&[RATE]);
    for (first, then) in [(SLICES[0], WHOLE), (WHOLE, SLICES[0])] {
        let run = Run::new();
        run.train(&["run.steps=5", RATE, first]);
        run.resume(&["run.steps=10", then]);
        assert_near(&run.losses(), &whole, CLOSE, then);
    }
}

#[test]
fn an_evaluation_in_slices_has_the_loss_of_whole_microbatches() {
    let validation = |set: &[&str]| {
        let run = Run::new();
        run.train(&[&["run.steps=4", "data.validation_share=0.25", "run.eval_every=2"], set].concat());
        run.steps().iter().filter_map(|step| step["validation_loss"].as_f64()).collect::<Vec<f64>>()
    };
    let (found, expected) = (validation(&SLICES), validation(&[]));
    assert_eq!((found.len(), expected.len()), (2, 2));
    for (found, expected) in found.into_iter().zip(expected) {
        assert!((found - expected).abs() <= CLOSE * expected, "{found} for {expected}");
    }
}

#[test]
fn check_and_the_trace_know_slices() {
    let run = Run::new();
    let (words, _) = run.succeed(&["check", "small.toml"], &SLICES);
    assert!(words.contains("seq1f1b: 2 ranks, 4 microbatches of 4 slices, proved sound"), "{words}");
    run.train(&[&["run.steps=1"], &SLICES[..]].concat());
    assert!(run.read("out/config.toml").contains("slices = 4"));
    // Traces have the numbers of slices: this is slice 3 of microbatch 3.
    let trace = run.read("out/timeline.json");
    assert!(trace.contains("\"0F15\"") && !trace.contains("\"0F16\""), "16 slices run");
    // Pages have their names.
    run.print(&["view", "out", "-o", "view.html"]);
    let page = run.read("view.html");
    assert!(page.contains("seq1f1b: 2 ranks, 2 stages, 4 microbatches of 4 slices"), "the title");
    assert!(page.contains("\"slices\":4,") && page.contains("<td>0F0.0 "), "slices are named");
    assert!(page.contains(" 0F3.3 ") && !page.contains(" 0F15 "), "slices are named");
}

/// A model whose keys and values are a large part of what a step keeps.
const LONG: [&str; 9] = [
    "model.vocab_size=128",
    "model.hidden_size=64",
    "model.intermediate_size=64",
    "model.num_hidden_layers=16",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=4",
    "data.seq_len=512",
    "pipeline.ranks=2",
    "pipeline.microbatches=8",
];

/// Checks the estimate of memory of a run with these settings.
fn check_peaks(set: &[&str]) {
    let run = Run::new();
    run.write("text.txt", "the quick brown fox jumps over the lazy dog ".repeat(1000));
    run.check_peaks("small.toml", &[&LONG[..], &["run.steps=2"], set].concat());
}

#[test]
fn the_estimate_of_memory_is_the_peak_of_slices_and_of_whole_microbatches() {
    check_peaks(&[]);
    check_peaks(&SLICES);
}

/// Norms and feed-forward layers are a large part of what these layers keep.
#[test]
fn the_estimate_of_memory_counts_the_parts_that_are_computed_again() {
    let wide = "model.intermediate_size=256";
    for recompute in ["none", "parts", "[{ stage = 0, layers = 4, parts = [\"norms\"] }]"] {
        check_peaks(&[wide, &format!("pipeline.recompute={recompute}")]);
    }
}

#[test]
fn what_slices_cannot_do_is_refused() {
    let run = Run::of(&scratch::small(2, 4, 4));
    let refuse = |set: &[&str], expected: &str| {
        run.refuse(&["train", "small.toml"], &[&SLICES[..], set].concat(), expected);
        assert!(!run.out().exists(), "nothing has begun");
    };
    for (key, value) in
        [("pipeline.recompute", "stage"), ("mesh.tensor_parallel", "2"), ("data.packed", "true")]
    {
        let (short, set) = (key.split('.').nth(1).expect("a key"), format!("{key}={value}"));
        let expected = format!("`{short}` does not work with a schedule that cuts microbatches into slices");
        refuse(&["data.bos_id=32", &set], &expected);
    }
    refuse(
        &["model.architecture=qwen3_moe", "model.num_experts=4", "model.output_router_logits=true"],
        "the schedule cuts microbatches into 4 slices, and the model cannot run them: the balance loss of the router \
         `model.layers.0.mlp.gate` depends on whole microbatches, so set `output_router_logits = false` to train without it",
    );
    for model in [
        &["model.architecture=nemotron_h", "model.hybrid_override_pattern=M*"][..],
        &["model.architecture=hybrid", "model.pattern=AM"],
    ] {
        let sizes = ["model.mamba_num_heads=2", "model.mamba_head_dim=8", "model.ssm_state_size=8"];
        refuse(
            &[model, &sizes[..]].concat(),
            "the model cannot run them: its Mamba layers do not pass their state from slice to slice; or write for example",
        );
    }
    refuse(
        &["pipeline.head_parts=2"],
        "the model cannot run them: the parts of its head take the targets of whole microbatches; or write for example",
    );
    let without = ["pipeline.schedule=1f1b"];
    refuse(&without, "`1f1b` has no setting `slices`; leave it out");
}
