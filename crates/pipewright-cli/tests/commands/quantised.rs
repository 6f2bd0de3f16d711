//! Adapters on a base with quantised weights, from the command that writes it to a merged model.

use super::adapters::{self, folder_without_path};
use super::command_line::reference;
use crate::run::Run;

/// Writes a configuration that trains the adapter of the reference on a tiny Qwen3, quantised.
pub(super) fn folder() -> Run {
    let folder = adapters::folder();
    let from = reference("qwen3-tiny");
    folder.succeed(&["quantize", &from, "nf4", "--to", "nf4"], &[]);
    let nf4 = folder.path("nf4").display().to_string();
    let config = folder.read("small.toml");
    let config = config.replacen(&format!("from = \"{from}\""), &format!("from = \"{nf4}\""), 1);
    folder.write("small.toml", config);
    folder
}

/// Trains adapters on a base that the command has quantised, resumes them, and merges them.
#[test]
fn a_quantised_base_is_trained_resumed_and_merged() {
    let folder = folder_without_path();
    let from = reference("qwen3-tiny");
    folder.says(&["quantize", &from, "nf4", "--to", "nf4"], &[], "wrote 56 linear layers");
    let base = format!("model.from={}", folder.path("nf4").display());
    let adapter = [&*base, "adapter.kind=lora", "adapter.rank=4"];
    folder.train(&[&adapter[..], &["run.steps=4"]].concat());
    let whole = folder.figures();
    folder.train(&[&adapter[..], &["run.steps=2", "pipeline.schedule=zb-h1"]].concat());
    folder.resume(&["run.steps=4", "pipeline.ranks=4", "pipeline.schedule=1f1b"]);
    assert_eq!(folder.figures(), whole);
    folder.says(&["export", "out", "small", "--merge"], &[], "wrote the model of step 4 in bfloat16");
    folder.succeed(&["export", "out", "merged", "--merge", "--dtype", "float32"], &[]);
    let generate = |model: &str| {
        let how = ["generate", model, "--prompt", "a", "--tokens", "3", "--tokenizer", "bytes"];
        folder.print(&how)
    };
    // The adapters are not merged into the quantised base.
    assert_eq!(generate("out"), generate("merged"));
    assert!(!generate("nf4").is_empty() && !generate("small").is_empty());
}

/// Most tensors of GPT-2 are vectors in single precision.
#[test]
fn a_quantised_gpt2_is_merged_in_bfloat16() {
    let folder = folder_without_path();
    let base = reference("gpt2-nf4");
    let [from, path] = [format!("model.from={base}"), format!("data.path={base}/tokens.jsonl")];
    let targets = "adapter.targets=\"all-linear\"";
    folder.train(&[&*from, &*path, "adapter.kind=lora", targets, "run.steps=1", "data.seq_len=32"]);
    folder.says(&["export", "out", "merged", "--merge"], &[], "wrote the model of step 1 in bfloat16");
}

#[test]
fn what_cannot_be_trained_is_refused() {
    let folder = folder_without_path();
    folder.succeed(&["quantize", &reference("qwen3-tiny"), "nf4", "--to", "nf4"], &[]);
    let base = format!("model.from={}", folder.path("nf4").display());
    let refuse = |settings: &[&str], part: &str| {
        let settings = [&[&*base][..], settings].concat();
        folder.refuse(&["check", "small.toml"], &settings, part);
    };
    refuse(&[], "only adapters can be trained on it: add a section [adapter]");
    folder.refuse(&["quantize", "nf4", "again", "--to", "nf4"], &[], "quantised already");
    folder.refuse(&["quantize", "nf4", "again", "--to", "q4_k"], &[], "quantised already");
}

/// Adapters with magnitudes need the norms of the decoded columns, and keep none of the columns.
#[test]
fn magnitudes_keep_no_decoded_matrix() {
    let folder = folder_without_path();
    folder.succeed(&["quantize", &reference("qwen3-tiny"), "nf4", "--to", "nf4"], &[]);
    let base = format!("model.from={}", folder.path("nf4").display());
    let held = |dora: &str| {
        let dora = format!("adapter.dora={dora}");
        let settings = [&*base, "adapter.kind=lora", "adapter.rank=4", &dora, "run.steps=1"];
        let settings = [&settings[..], &["pipeline.ranks=1", "pipeline.microbatches=1"]].concat();
        let predicted = folder.json(&["check", "small.toml"], &settings);
        let predicted = predicted["memory"]["ranks"][0]["activations"].as_u64().expect("bytes");
        folder.train(&settings);
        let metrics = folder.read("out/metrics.jsonl");
        let steps = metrics.lines().map(|line| serde_json::from_str(line).expect("an object"));
        let peaks = steps.filter_map(|line: serde_json::Value| line["peak_bytes"][0].as_u64());
        [peaks.max().expect("a step"), predicted]
    };
    let [without, with] = ["false", "true"].map(held);
    // With the decoded columns, the difference would be more than twice the predicted one.
    assert!(with[0] - without[0] < (with[1] - without[1]) * 3 / 2, "{without:?} {with:?}");
}

/// The weights need a quarter of the bytes that they need in bfloat16.
#[test]
fn check_counts_the_bytes_of_quantised_weights() {
    let folder = folder_without_path();
    folder.succeed(&["quantize", &reference("qwen3-tiny"), "nf4", "--to", "nf4"], &[]);
    let parameters = |from: &str| {
        let from = format!("model.from={from}");
        let settings =
            [&*from, "adapter.kind=lora", "adapter.rank=4", "run.precision=bf16", "pipeline.ranks=1"];
        let json = folder.json(&["check", "small.toml"], &settings);
        json["memory"]["ranks"][0]["parameters"].as_u64().expect("bytes")
    };
    let [whole, quantised] =
        [reference("qwen3-tiny"), folder.path("nf4").display().to_string()].map(|from| parameters(&from));
    assert!(quantised < whole, "{quantised} {whole}");
}
