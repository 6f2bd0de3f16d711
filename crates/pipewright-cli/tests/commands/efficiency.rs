//! Tests of the rate of computation in the metrics of each step.

use serde_json::Value;

use super::command_line::reference;
use crate::run::Run;

/// Returns the operations per token that each step in the metrics implies, and checks the share of the peak.
fn operations_per_token(metrics: &[Value]) -> Vec<f64> {
    let operations = |step: &Value| {
        if let Some(share) = step["mfu"].as_f64() {
            assert!(share > 0.0 && share < 1.0, "{step}");
        }
        let number = |key: &str| step[key].as_f64().expect("a number");
        number("model_tflops") * 1e12 / number("tokens_per_second")
    };
    metrics.iter().map(operations).collect()
}

#[track_caller]
fn check(set: &[&str], expected: f64) {
    let run = Run::new();
    run.train(&[&["run.steps=2"], set].concat());
    let found = operations_per_token(&run.steps());
    assert!(found.len() == 2 && found.iter().all(|one| (one / expected - 1.0).abs() < 1e-9), "{found:?}");
}

/// The operations per token of the model that the tests configure.
fn whole() -> f64 {
    let (attention, feed_forward, head) = (4 * 16 * 16, 3 * 16 * 24, 16 * 128);
    // Scores and values, in which a token meets half of a row of 8 tokens on average.
    let pairs = 8 * 16;
    f64::from(6 * (2 * (attention + feed_forward + pairs) + head))
}

#[test]
fn a_step_says_how_fast_it_computes() {
    check(&[], whole());
    check(&["pipeline.ranks=2", "run.precision=bf16", "run.accumulate=2"], whole());
}

#[test]
fn frozen_matrices_have_no_gradient() {
    let folder = Run::empty();
    folder.write("text.txt", "text ".repeat(50));
    let model = reference("qwen3-tiny");
    let operations = |more: &[&str]| {
        let set = ["data.tokenizer=bytes", "--set", "data.seq_len=16", "--set", "run.steps=1"];
        let arguments =
            [&["train", "--from", &model, "--data", "text.txt", "--set"][..], &set, more].concat();
        folder.print(&arguments);
        operations_per_token(&folder.metrics_in("runs/fine-tuned"))[0]
    };
    let (whole, adapted) = (operations(&[]), operations(&["--lora", "--set", "adapter.rank=2"]));
    // The scores and values of 8 layers, whose products have no weights, count as a whole.
    let mixing = f64::from(8 * 6 * 16 * (4 * 24));
    let expected = mixing + (whole - mixing) * 2.0 / 3.0;
    assert!((adapted / expected - 1.0).abs() < 1e-9, "{adapted} and not {expected} of {whole}");
    // The layers below the first adapter run forward only, whatever the cut.
    let upper = ["--lora", "--set", "adapter.rank=2", "--set", "adapter.targets=[\"*.layers.7.*\"]"];
    let cut = ["--set", "pipeline.ranks=2", "--set", "pipeline.partition=even"];
    let (last, last_of_two) = (operations(&upper), operations(&[&upper[..], &cut].concat()));
    assert!((last / last_of_two - 1.0).abs() < 1e-9, "{last} and {last_of_two}");
    assert!(
        last > whole / 3.0 && last < 0.8 * adapted,
        "{last} is not between those of {whole} and {adapted}"
    );
}
