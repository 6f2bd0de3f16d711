//! Tests of `train --from DIR --data PATH`, which needs no configuration file.

use super::command_line::reference;
use crate::run::Run;

/// Runs a command that fine-tunes the model on the chats. Returns its standard error.
fn fine_tune(folder: &Run, command: &str, more: &[&str]) -> String {
    let (model, chats) = (reference("qwen3-tiny"), reference("masked/chats.jsonl"));
    let arguments = [command, "--from", &model, "--data", &chats];
    let set = [
        "data.tokenizer=bytes",
        "data.chat_template=phi3",
        "data.seq_len=127",
        "run.steps=2",
        "adapter.rank=2",
    ];
    let set = if more.is_empty() { &set[..4] } else { &set };
    folder.succeed(&[&arguments, more].concat(), set).1
}

#[test]
fn a_model_is_fine_tuned_without_a_configuration() {
    let folder = Run::empty();
    for command in ["check", "train"] {
        fine_tune(&folder, command, &[]);
    }
    assert_eq!(folder.metrics_in("runs/fine-tuned").len(), 2);
    // The effective configuration repeats the run, so it has the model, the data and the rates.
    let config = folder.read_toml("runs/fine-tuned/config.toml");
    assert_eq!(config["model"]["from"].as_str(), Some(reference("qwen3-tiny").as_str()));
    assert_eq!(config["data"]["path"][0].as_str(), Some(reference("masked/chats.jsonl").as_str()));
    assert_eq!(config["optimizer"]["learning_rate"].as_float(), Some(2e-5));
    assert_eq!(config["optimizer"]["schedule"].as_str(), Some("linear"));
    let words = fine_tune(&folder, "train", &["--lora"]);
    assert!(words.contains("adapter: lora of rank 2 on 56 layers"), "{words}");
}

#[test]
fn several_files_are_one_set_of_data() {
    let folder = Run::empty();
    for name in ["a \"quoted\" name.txt", "b.txt"] {
        folder.write(name, "text ".repeat(50));
    }
    let model = reference("qwen3-tiny");
    let files = ["check", "--from", &model, "--data", "a \"quoted\" name.txt", "--data", "b.txt"];
    folder.prints(&files, &["data.tokenizer=bytes", "data.seq_len=16"], "500 tokens");
}

#[test]
fn what_is_missing_is_named() {
    let folder = Run::empty();
    let refuse = |arguments: &[&str], part: &str| folder.refuse(arguments, &[], part);
    refuse(&["train", "--lora"], "--from");
    refuse(&["train", "--from", "model"], "--data <PATH>");
    refuse(&["train", "--data", "x.txt"], "--from <DIR>");
    refuse(&["train", "x.toml", "--from", "model", "--data", "x.txt"], "cannot be used with");
    refuse(&["train", "--from", "no-such-folder", "--data", "x.txt"], "no-such-folder");
}
