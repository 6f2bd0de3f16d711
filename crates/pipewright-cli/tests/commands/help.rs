//! Tests of the help of all commands: its examples work, and its lines are as long as the terminal is wide.

use std::fs;

use crate::command_line::folder;
use crate::run::{Run, finished};

/// Returns the names of all commands, in the order of the help.
fn commands() -> Vec<String> {
    let help = folder().print(&["--help"]);
    let list = help.split("Training:\n").nth(1).and_then(|rest| rest.split("\nOptions:\n").next());
    let lines = list.expect("a list of commands").lines().filter(|line| indentation(line) == 2);
    let names = lines.filter_map(|line| line.split_whitespace().next()).map(str::to_owned);
    names.filter(|name| name != "help").collect()
}

/// Makes a folder with a run in `runs/sample`, whose last step is to be taken again.
fn folder_with_run() -> Run {
    let folder = folder();
    folder.train(&["run.out=runs/sample", "run.checkpoint_every=1", "run.fingerprint_every=1"]);
    let checkpoints = folder.path("runs/sample/checkpoints");
    fs::remove_dir_all(checkpoints.join("step-00000003")).expect("the last checkpoint");
    folder
}

/// Returns the words of a command line. Some words have quotes.
fn words(line: &str) -> Vec<&str> {
    let parts = line.split('\'').enumerate();
    parts
        .flat_map(|(index, part)| match index % 2 {
            0 => part.split_whitespace().collect(),
            _ => vec![part],
        })
        .collect()
}

#[test]
fn the_examples_of_the_help_work_as_typed() {
    let with_run = folder_with_run();
    let (commands, mut typed) = (commands(), 0);
    for command in &commands {
        let fresh = folder();
        // The limits only make the test shorter.
        let (folder, limits) = match command.as_str() {
            "train" => (&fresh, &["--set", "model.num_hidden_layers=2", "--set", "data.seq_len=16"][..]),
            "profile" => (&with_run, &["--time-limit", "200ms"][..]),
            "plan" => (&with_run, &["--time-limit", "500ms"][..]),
            "audit" | "resume" | "inspect" | "export" | "quantize" | "add-tokens" | "generate" | "report"
            | "watch" => (&with_run, &[][..]),
            _ => (&fresh, &[][..]),
        };
        if command == "add-tokens" {
            // The run has read bytes, and its model has no tokenizer.
            let model = "{\"model\": {\"type\": \"WordLevel\", \"vocab\": {\"a\": 0}, \"unk_token\": \"a\"}}";
            folder.write("my-model/tokenizer.json", model);
        }
        let help = folder.print(&[command, "--help"]);
        // A build without MPI cannot launch processes.
        if command == "launch" && !cfg!(feature = "mpi") {
            continue;
        }
        let example = help.split("Example:\n").nth(1).expect(command).trim();
        for line in example.lines() {
            // The search for a cluster takes no limit.
            let limits = if line.contains("--cluster") { &[][..] } else { limits };
            folder.print(&[&words(line)[1..], limits].concat());
            typed += 1;
        }
    }
    assert!(typed > commands.len(), "{typed} examples of {} commands", commands.len());
    let inside = |name: &str| fs::read_to_string(with_run.path(name)).expect(name);
    assert_eq!(inside("runs/sample/metrics.jsonl").lines().count(), 3, "the example of resume takes a step");
    assert!(inside("runs/sample/config.toml").contains("ranks = 1\n"));
    assert!(inside("profile.toml").contains("[[layers]]") && inside("report.html").contains("<html"));
}

#[test]
fn the_short_help_says_that_there_is_more() {
    let folder = folder();
    for command in commands().iter().map(|name| vec![name.as_str()]).chain([vec![]]) {
        let [short, long] = ["-h", "--help"].map(|flag| folder.print(&[&command[..], &[flag]].concat()));
        assert!(short.contains("(see more with '--help')") && !short.contains("Example:"), "{short}");
        assert!(short.lines().count() < long.lines().count() && long.contains("Example:"), "{long}");
    }
}

#[test]
fn scripts_complete_schedules_and_keys() {
    for shell in ["bash", "zsh", "fish"] {
        let script = folder().print(&["completions", shell]);
        for word in ["zb-h1", "group-interleaved", "pipeline.ranks=", "optimizer.learning_rate="] {
            assert!(script.contains(word), "{shell}: {word}");
        }
    }
    let help = folder().print(&["train", "--help"]);
    assert!(!help.contains("pipeline.ranks="), "{help}");
    folder().refuse(&["train", "--set"], &[], "none was supplied For more information, try '--help'.");
}

/// Returns whether a line of help continues the paragraph of the line before it.
fn continues(before: &str, line: &str) -> bool {
    let (is_blank, column) = (before.trim().is_empty() || line.trim().is_empty(), indentation(line));
    // Commands, arguments and examples begin in column 2. Options and their values begin with a hyphen, defaults with
    // a bracket.
    let is_item = column == 2 || (column > 0 && line.trim_start().starts_with(['-', '[']));
    let is_below = column == indentation(before) && !is_item;
    // The description of a command, an argument or an option may begin next to its name.
    let beside = before.get(..column).zip(before.get(column..));
    let is_beside = beside.is_some_and(|(name, description)| {
        name.ends_with("  ") && !name.trim().is_empty() && !description.starts_with(' ')
    });
    !is_blank && (is_below || is_beside)
}

#[test]
fn help_is_wrapped_once() {
    let folder = folder();
    let all: Vec<Vec<String>> = commands().into_iter().map(|name| vec![name]).chain([vec![]]).collect();
    for width in [80, 120] {
        for command in &all {
            let mut binary = folder.binary();
            binary.args(command).arg("--help").env("COLUMNS", width.to_string());
            let (_, help, _) = finished(&mut binary);
            let lines: Vec<&str> = help.lines().collect();
            for pair in lines.windows(2) {
                assert!(pair[0].chars().count() <= width, "{command:?} at {width}: {}", pair[0]);
                // The last line of a paragraph may be short. Any other line must be full.
                let next = pair[1].split_whitespace().next().unwrap_or_default();
                let limit = width.min(100);
                assert!(
                    !continues(pair[0], pair[1])
                        || pair[0].chars().count() + 1 + next.chars().count() > limit,
                    "{command:?} at {width}: a line is broken early: {pair:?}"
                );
            }
            let example = lines.iter().skip_while(|line| **line != "Example:").skip(1);
            let mut broken = example.filter(|line| !line.starts_with("  pipewright "));
            assert_eq!(broken.next(), None, "{command:?} at {width}: a line of the example is broken");
        }
    }
}

fn indentation(line: &str) -> usize {
    line.len() - line.trim_start().len()
}
