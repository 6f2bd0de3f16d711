//! Adapters on a base that stays in its files: the figures of a base in memory, and what `check` and `profile` say.

use std::fs;
use std::process::Stdio;

use super::adapters::folder_without_path;
use super::command_line::reference;
use crate::run::Run;

/// Adapters on a model of ten layers, each a stage of one rank.
const LAYERS: [&str; 6] = [
    "adapter.kind=lora",
    "adapter.rank=4",
    "pipeline.ranks=1",
    "pipeline.microbatches=4",
    "pipeline.schedule=looped-bfs",
    "pipeline.stages_per_rank=10",
];

fn folder(settings: &[&str]) -> (Run, Vec<String>) {
    let settings = LAYERS.iter().chain(settings).map(|setting| (*setting).to_owned()).collect();
    (folder_without_path(), settings)
}

fn with<'a>(settings: &'a [String], more: &[&'a str]) -> Vec<&'a str> {
    settings.iter().map(String::as_str).chain(more.iter().copied()).collect()
}

#[test]
fn a_base_in_its_files_has_the_figures_of_one_in_memory() {
    let evaluates = ["data.validation_share=0.25", "run.eval_every=2"];
    let (folder, settings) = folder(&evaluates);
    let figures = |more: &[&str]| {
        folder.train(&with(&settings, more));
        let validation =
            folder.steps().iter().map(|step| step["validation_loss"].clone()).collect::<Vec<_>>();
        (folder.figures(), validation)
    };
    let resident = figures(&["model.stream=false"]);
    for window in ["model.stream_window=1", "model.stream_window=3"] {
        assert_eq!(figures(&["model.stream=true", window]), resident);
    }
    assert!(folder.read("out/timeline.json").contains("unshard"), "the last run has read its base");
    // A run is resumed with the base where it was not before.
    let two = with(&settings, &["model.stream=true", "run.steps=2"]);
    folder.train(&two);
    folder.resume(&["run.steps=4", "model.stream=false"]);
    assert_eq!(folder.figures(), resident.0);
    let generate = |more: &[&str]| {
        let how = ["generate", "out", "--prompt", "a", "--tokens", "3", "--tokenizer", "bytes"];
        folder.print(&[&how[..], more].concat())
    };
    assert_eq!(generate(&["--stream"]), generate(&[]));
    folder.says(&["export", "out", "merged", "--merge"], &[], "wrote the model of step 4");
}

#[test]
fn check_counts_the_stages_that_are_in_memory() {
    let (folder, settings) = folder(&[]);
    let memory =
        |more: &[&str]| folder.json(&["check", "small.toml"], &with(&settings, more))["memory"].clone();
    let parameters = |memory: &serde_json::Value| memory["ranks"][0]["parameters"].as_u64().expect("bytes");
    let resident = memory(&["model.stream=false"]);
    let [one, two] = ["model.stream_window=1", "model.stream_window=2"]
        .map(|window| memory(&["model.stream=true", window]));
    let window = |memory: &serde_json::Value| memory["streamed"]["window"].as_u64().expect("bytes");
    assert!(resident["streamed"].is_null());
    // Each block has as many bytes, and a window of two has two of them.
    assert_eq!(window(&two), 2 * window(&one));
    assert_eq!(parameters(&two) - parameters(&one), window(&one));
    let step = |memory: &serde_json::Value| memory["streamed"]["step"].as_u64().expect("bytes");
    let base = parameters(&resident) - parameters(&one) + window(&one);
    // The stages that are in memory at the turn are read once.
    assert!(step(&two) < step(&one) && step(&one) <= 2 * base && step(&two) > base, "{one} {two} {base}");
}

#[test]
fn the_rate_of_the_disk_is_measured_and_used() {
    let (folder, settings) = folder(&["model.stream=true"]);
    let settings = with(&settings, &[]);
    folder.says(
        &["profile", "small.toml", "--time-limit", "1s", "-o", "p.toml"],
        &settings,
        "files of the base:",
    );
    let rate = folder.read_toml("p.toml")["link"]["read_bytes_per_s"].as_float().expect("a rate");
    let streamed =
        &folder.json(&["check", "small.toml", "--profile", "p.toml"], &settings)["memory"]["streamed"];
    let expected = streamed["step"].as_f64().expect("bytes") / rate;
    let found = streamed["seconds"].as_f64().expect("a time");
    assert!((found - expected).abs() <= 1e-3 * expected, "{found} {expected}");
    let (said, _) = folder.succeed(&["check", "small.toml", "--profile", "p.toml"], &settings);
    assert!(said.contains("the base stays in its files: a rank has at most"), "{said}");
}

#[test]
fn what_cannot_stream_is_refused() {
    let folder = folder_without_path();
    let refuse = |settings: &[&str], part: &str| folder.refuse(&["check", "small.toml"], settings, part);
    let adapter = ["adapter.kind=lora", "adapter.rank=4", "model.stream=true"];
    let add = |more: &[&'static str]| [&adapter[..], more].concat();
    refuse(&adapter[2..], "training changes the whole model: add a section [adapter]");
    refuse(
        &add(&["mesh.data_parallel=2", "mesh.data_parallel_mode=sharded"]),
        "it is not divided among replicas",
    );
    refuse(&["model.stream=2"], "stream");
    let rows = "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n";
    folder.write("plain.csv", rows);
    folder.print(&["lower", "plain.csv", "--pass", "send-recv", "-o", "messages.csv"]);
    folder.print(&["lower", "plain.csv", "--pass", "unshard,send-recv", "-o", "reading.csv"]);
    let of_rows = |file: &'static str| add(&[file, "pipeline.ranks=2", "pipeline.microbatches=2"]);
    let never = "messages.csv: the base stays in its files (`model.stream`), and the schedule communicates and never reads";
    refuse(&of_rows("pipeline.schedule=messages.csv"), never);
    folder.succeed(&["check", "small.toml"], &of_rows("pipeline.schedule=reading.csv"));
    let fresh = Run::empty();
    fresh.write("a.toml", "[model]\nstream = true\n");
    fresh.refuse(&["check", "a.toml"], &[], "`stream`");
}

#[test]
fn a_file_that_is_removed_ends_the_run_with_its_name() {
    let (folder, settings) = folder(&["model.stream=true", "run.steps=1000000"]);
    let base = folder.path("base");
    fs::create_dir(&base).expect("a folder");
    for entry in fs::read_dir(reference("qwen3-tiny")).expect("the model") {
        let path = entry.expect("a file").path();
        fs::copy(&path, base.join(path.file_name().expect("a name"))).expect("a copy");
    }
    let from = format!("model.from={}", base.display());
    let child = folder.start_heard("train", &["small.toml"], &with(&settings, &[&from]), Stdio::piped());
    folder.wait_for_step(2);
    let file = base.join("model.safetensors");
    fs::remove_file(&file).expect("it is there");
    let output = child.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{said}");
    for part in ["the file was removed while it was in use", "the base of stage", "put back the file"] {
        assert!(said.contains(part), "{part}: {said}");
    }
}
