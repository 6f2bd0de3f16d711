//! Operations per token and parameters, against what the authors of models and runs say.

use pipewright_shapes::operations::AttentionCount;
use pipewright_shapes::reader;

use crate::data::run;

/// Compares with model TFLOP/s divided by tokens per second, as published.
fn check(model: &str, machine: &str, count: AttentionCount, published: f64) {
    let run = run(model, machine);
    let operations = run.model.operations_per_token(u64::from(run.layout.sequence), count);
    assert!((operations / published - 1.0).abs() < 0.002, "{model}: {operations:e} and {published:e}");
}

#[test]
fn nemo_counts_all_pairs_of_attention() {
    let full = AttentionCount::Full;
    check("gpt3-5B", "H100", full, 736e12 / 22_521.0);
    check("gpt3-175B", "H100", full, 782e12 / 726.0);
    check("llama2-7B", "H100", full, 776e12 / 16_847.0);
    check("llama2-70B", "H100", full, 759e12 / 1_707.0);
    check("nemotron-22B", "H100", full, 554e12 / 4_256.0);
}

#[test]
fn megatron_bridge_counts_the_pairs_that_are_used() {
    check("llama3-70B", "H100 80", AttentionCount::Causal, 719e12 / 1_602.0);
}

#[test]
fn parameters_are_those_of_the_names() {
    for (model, billions) in [("llama3-8B", 8.03), ("llama3-70B", 70.55), ("llama3.1-405B", 405.85)] {
        let parameters = run(model, "H100").model.parameters() as f64 / 1e9;
        assert!((parameters / billions - 1.0).abs() < 0.001, "{model}: {parameters}");
    }
}

/// DeepSeek-V3 (arXiv 2412.19437): 671 billion parameters, 37 billion active.
#[test]
fn experts_and_latent_attention_have_the_published_parameters() {
    let model = reader::read(include_str!("deepseek_v3.json")).expect("a model").model;
    let without_predictors = pipewright_shapes::model::Model { predictors: 0, ..model };
    let parameters = without_predictors.parameters() as f64 / 1e9;
    assert!((parameters / 671.0 - 1.0).abs() < 0.002, "{parameters}");
    let operations = without_predictors.operations_per_token(1, AttentionCount::Causal);
    let active = operations / 6e9 + without_predictors.table_parameters() as f64 / 1e9;
    assert!((active / 37.6 - 1.0).abs() < 0.01, "{active}");
}
