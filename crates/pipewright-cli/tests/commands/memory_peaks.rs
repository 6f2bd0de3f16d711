//! The memory that `check` estimates is the peak of runs that train all parameters. Adapters and slices have tests next to
//! their own.

use crate::run::Run;

/// A model whose gradients and activations are both a large part of a rank's memory.
const SIZES: [&str; 10] = [
    "model.vocab_size=1024",
    "model.hidden_size=256",
    "model.intermediate_size=768",
    "model.num_hidden_layers=4",
    "model.num_attention_heads=4",
    "data.seq_len=256",
    "pipeline.ranks=2",
    "pipeline.microbatches=4",
    "pipeline.microbatch_size=4",
    "run.steps=2",
];

/// Checks the estimates of runs with these settings, in single and in half precision.
fn check(settings: &[&[&str]]) {
    let run = Run::new();
    run.write("text.txt", "the quick brown fox jumps over the lazy dog ".repeat(1200));
    for set in settings {
        for precision in ["run.precision=f32", "run.precision=bf16"] {
            run.check_peaks("small.toml", &[&SIZES[..], set, &[precision]].concat());
        }
    }
}

/// A rank that has its peak in a stage's first backward does not hold the gradients yet.
#[test]
fn gradients_take_the_place_of_the_tensors_that_they_need() {
    let few = "pipeline.microbatches=2";
    check(&[
        &["pipeline.schedule=gpipe"],
        &["pipeline.schedule=1f1b", few],
        &["pipeline.schedule=zb-h1", few],
    ]);
}

#[test]
fn activations_other_than_swiglu_are_counted() {
    let gemma = ["model.architecture=gemma2", "model.head_dim=64"];
    let gpt = ["model.architecture=gpt2", "model.n_positions=256"];
    check(&[&gemma, &gpt, &["model.architecture=starcoder2"], &["model.architecture=phi3"]]);
}

#[test]
fn the_backward_of_a_scan_is_counted() {
    let sizes = ["model.mamba_num_heads=8", "model.mamba_head_dim=64", "model.ssm_state_size=64"];
    let pattern = ["model.architecture=nemotron_h", "model.hybrid_override_pattern=MMMM"];
    check(&[&[&pattern[..], &sizes].concat()]);
}
