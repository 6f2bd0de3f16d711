//! Tests of `train --from DIR --data PATH`, which needs no configuration file.

use std::fs;
use std::path::Path;

use super::command_line::{reference, run_in, text};

/// Returns the exit code and standard error of a command that fine-tunes the model on the chats.
fn fine_tune(folder: &Path, command: &str, more: &[&str]) -> (Option<i32>, String) {
    let (model, chats) = (reference("qwen3-tiny"), reference("masked/chats.jsonl"));
    let arguments = [command, "--from", &model, "--data", &chats, "--set", "data.tokenizer=bytes"];
    let output = run_in(folder, &[&arguments, more].concat());
    (output.status.code(), text(&output.stderr).to_owned())
}

const SHORT: [&str; 6] =
    ["--set", "data.chat_template=phi3", "--set", "data.seq_len=127", "--set", "run.steps=2"];

#[test]
fn a_model_is_fine_tuned_without_a_configuration() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let (code, words) = fine_tune(folder.path(), "check", &SHORT);
    assert_eq!(code, Some(0), "{words}");
    let (code, words) = fine_tune(folder.path(), "train", &SHORT);
    assert_eq!(code, Some(0), "{words}");
    let run = folder.path().join("runs/fine-tuned");
    let metrics = fs::read_to_string(run.join("metrics.jsonl")).expect("metrics");
    assert_eq!(metrics.lines().count(), 2);
    // The effective configuration repeats the run, so it has the model, the data and the rates.
    let config: toml::Table =
        fs::read_to_string(run.join("config.toml")).expect("a configuration").parse().expect("TOML");
    assert_eq!(config["model"]["from"].as_str(), Some(reference("qwen3-tiny").as_str()));
    assert_eq!(config["data"]["path"][0].as_str(), Some(reference("masked/chats.jsonl").as_str()));
    assert_eq!(config["optimizer"]["learning_rate"].as_float(), Some(2e-5));
    assert_eq!(config["optimizer"]["schedule"].as_str(), Some("linear"));
}

#[test]
fn adapters_are_trained_without_a_configuration_too() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let more = [&["--lora"][..], &SHORT, &["--set", "adapter.rank=2"]].concat();
    let (code, words) = fine_tune(folder.path(), "train", &more);
    assert!(code == Some(0) && words.contains("adapter: lora of rank 2 on 56 layers"), "{words}");
    let output = run_in(folder.path(), &["train", "--lora"]);
    assert!(output.status.code() == Some(2) && text(&output.stderr).contains("--from"));
}

#[test]
fn several_files_are_one_set_of_data() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    for name in ["a \"quoted\" name.txt", "b.txt"] {
        fs::write(folder.path().join(name), "text ".repeat(50)).expect("the folder takes files");
    }
    let model = reference("qwen3-tiny");
    let files = ["check", "--from", &model, "--data", "a \"quoted\" name.txt", "--data", "b.txt", "--set"];
    let set = ["data.tokenizer=bytes", "--set", "data.seq_len=16"];
    let output = run_in(folder.path(), &[&files[..], &set].concat());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("500 tokens"), "{}", text(&output.stdout));
}

#[test]
fn what_is_missing_is_named() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let refuse = |arguments: &[&str], parts: &[&str]| {
        let output = run_in(folder.path(), arguments);
        let words = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{words}");
        assert!(parts.iter().all(|part| words.contains(part)), "{words}");
    };
    refuse(&["train", "--from", "model"], &["--data <PATH>"]);
    refuse(&["train", "--data", "x.txt"], &["--from <DIR>"]);
    refuse(&["train", "x.toml", "--from", "model", "--data", "x.txt"], &["cannot be used with"]);
    refuse(&["train", "--from", "no-such-folder", "--data", "x.txt"], &["no-such-folder"]);
}
