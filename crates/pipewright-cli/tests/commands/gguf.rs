//! GGUF files through the command line: a model that is quantised, trained with adapters, generated from and exported.

use std::fs;

use super::adapters::folder_without_path;
use super::command_line::reference;

/// Trains adapters on a base in GGUF, resumes them, and writes the model and the adapters as GGUF.
#[test]
fn a_gguf_base_is_trained_resumed_and_exported() {
    let folder = folder_without_path();
    let from = reference("qwen3-tiny");
    let said = "8 tensors in q8_0 or f16, because their rows are not whole blocks of q8_0";
    folder.says(&["quantize", &from, "base", "--to", "q8_0"], &[], said);
    folder.says(&["quantize", &from, "b.gguf", "--to", "q8_0"], &[], "wrote 50 tensors of");
    assert_eq!(fs::read(folder.path("b.gguf")).ok(), fs::read(folder.path("base").join("model.gguf")).ok());
    folder.refuse(&["quantize", &from, "b.gguf", "--to", "q8_0"], &[], "the file exists");
    let base = format!("model.from={}", folder.path("b.gguf").display());
    let adapter = [&*base, "adapter.kind=lora", "adapter.rank=4"];
    folder.train(&[&adapter[..], &["run.steps=4"]].concat());
    let whole = folder.figures();
    // The folder is the model too.
    let in_folder = format!("model.from={}", folder.path("base").display());
    folder.train(&[
        &*in_folder,
        "adapter.kind=lora",
        "adapter.rank=4",
        "run.steps=2",
        "pipeline.schedule=zb-h1",
    ]);
    folder.resume(&["run.steps=4", "pipeline.ranks=4", "pipeline.schedule=1f1b"]);
    assert_eq!(folder.figures(), whole);
    folder.succeed(&["export", "out", "merged", "--merge", "--dtype", "float32"], &[]);
    let gguf = ["export", "out", "merged.gguf", "--format", "gguf"];
    folder.says(
        &[&gguf[..], &["--merge", "--dtype", "float32"]].concat(),
        &[],
        "as GGUF in float32 to merged.gguf",
    );
    let generate = |model: &str| {
        folder.print(&["generate", model, "--prompt", "a", "--tokens", "3", "--tokenizer", "bytes"])
    };
    assert_eq!(generate("merged.gguf"), generate("merged"));
    assert_eq!(generate("out"), generate("merged"));
    folder.says(
        &["export", "out", "lora", "--format", "gguf"],
        &[],
        "wrote the adapters of step 4 as GGUF to lora/model.gguf",
    );
    folder.refuse(&["export", "out", "again", "--merge", "--dtype", "q4_k"], &[], "add --format gguf");
    folder.succeed(&["export", "out", "small", "--format", "gguf", "--merge", "--dtype", "q4_k"], &[]);
    assert!(!generate("small").is_empty());
}

/// A base in GGUF has its bytes in memory as they are in the file.
#[test]
fn check_reads_gguf_and_refuses_training_without_adapters() {
    let folder = folder_without_path();
    folder.succeed(&["quantize", &reference("qwen3-tiny"), "b.gguf", "--to", "q8_0"], &[]);
    let parameters = |from: &str| {
        let from = format!("model.from={from}");
        let settings =
            [&*from, "adapter.kind=lora", "adapter.rank=4", "run.precision=bf16", "pipeline.ranks=1"];
        let json = folder.json(&["check", "small.toml"], &settings);
        json["memory"]["ranks"][0]["parameters"].as_u64().expect("bytes")
    };
    let [whole, quantised] =
        [reference("qwen3-tiny"), folder.path("b.gguf").display().to_string()].map(|from| parameters(&from));
    assert!(quantised < whole, "{quantised} {whole}");
    let base = format!("model.from={}", folder.path("b.gguf").display());
    folder.refuse(&["check", "small.toml"], &[&base], "only adapters can be trained on it");
    fs::write(folder.path("b.gguf"), &fs::read(folder.path("b.gguf")).expect("a file")[..5000])
        .expect("a file");
    folder.refuse(&["check", "small.toml"], &[&base, "adapter.kind=lora"], "copy or download it again");
}
