//! Tests of commands that cannot write: a limit on the size of files or a full disk ends each of them with an error
//! that names the file and says what to do, and a reader that goes away ends none of them with a panic.

use std::process::Stdio;

use crate::run::{Run, finished};

/// Runs a command that may write at most so many blocks of 512 bytes into a file. Returns its exit code and standard
/// error.
fn limited(run: &Run, blocks: u32, command: &str) -> (Option<i32>, String) {
    let (code, _, said) = finished(&mut run.shell(&format!("ulimit -f {blocks}; exec \"$0\" {command}")));
    (code, said)
}

/// Checks that a command ends with an error about a file.
fn check((found, said): (Option<i32>, String), code: i32, words: &[&str]) {
    assert_eq!(found, Some(code), "{said}");
    assert!(words.iter().all(|word| said.contains(word)) && !said.contains("panicked"), "{words:?}: {said}");
    assert_eq!(said.matches(ADVICE).count(), usize::from(words.contains(&ADVICE)), "{said}");
}

const ADVICE: &str = "raise the limit on the size of files (`ulimit -f unlimited`)";

#[test]
fn a_limit_on_files_ends_a_command_with_the_name_of_the_file() {
    let run = Run::new();
    run.train(&["run.steps=2"]);
    run.write("long.txt", "the quick brown fox ".repeat(1000));
    for (command, file) in [
        ("init my.toml", "my.toml: cannot be written"),
        ("schedule 1f1b --ranks 8 --microbatches 64 -o s.csv", "s.csv: cannot be written"),
        ("report out -o page.html", "page.html: cannot be written"),
        ("view out -o page.html", "page.html: cannot be written"),
        ("export out model", "model"),
        ("tokenize long.txt --tokenizer bytes -o t.pwtok", "t.pwtok"),
        ("schedule 1f1b --ranks 8 --microbatches 64 > s.csv", "standard output: cannot be written"),
    ] {
        check(limited(&run, 1, command), 2, &[file, ADVICE]);
    }
    let is_left = |file: &str| run.path(file).exists();
    assert!(!is_left("my.toml") && !is_left("page.html"), "no part of a file is left");
}

#[test]
fn a_limit_on_files_ends_a_run_that_resumes_without_it() {
    let run = Run::new();
    let set = "--set optimizer.schedule=constant --set run.steps=12";
    let output = limited(&run, 8, &format!("train small.toml {set}"));
    check(output, 2, &["out/metrics.jsonl: cannot be written", ADVICE, "pipewright resume ", "/out"]);
    // The last line is torn.
    run.says(&["resume", "out"], &[], "1 broken line");
    let output = limited(&run, 40, &format!("resume out {set} --set run.steps=13"));
    check(output, 2, &["rank-0000.safetensors", ADVICE, "earlier checkpoints are complete"]);
    assert_eq!(run.checkpoints(), ["step-00000012"], "the last good one");
    let whole = Run::new();
    whole.train(&["optimizer.schedule=constant", "run.steps=13"]);
    run.resume(&["run.steps=13"]);
    assert_eq!(run.figures(), whole.figures());
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_ends_a_command_with_what_to_do() {
    let run = Run::new();
    for command in ["schedule 1f1b --ranks 2 --microbatches 4", "simulate 1f1b --ranks 2 --microbatches 4"] {
        let to_file = limited(&run, 1 << 20, &format!("{command} -o /dev/full"));
        check(to_file, 2, &["/dev/full: cannot be written", "free some space"]);
        let to_output = limited(&run, 1 << 20, &format!("{command} > /dev/full"));
        check(to_output, 2, &["standard output: cannot be written", "free some space"]);
    }
}

#[test]
fn a_reader_that_goes_away_ends_no_command_with_a_panic() {
    let run = Run::new();
    for (arguments, code) in [
        (&["schedule", "1f1b", "--ranks", "16", "--microbatches", "512"][..], 0),
        (&["simulate", "1f1b", "--ranks", "16", "--microbatches", "512", "--format", "trace"], 0),
        (&["compare", "1f1b", "gpipe", "--ranks", "2", "--microbatches", "4"], 0),
        (&["data", "show", "small.toml", "--rows", "30"], 0),
        (&["man"], 0),
        (&["completions", "bash"], 0),
        (&["train", "--help"], 0),
        (&["train", "small.toml", "--set", "run.steps=3"], 0),
        (&["inspect", "out"], 0),
        (&["report", "out"], 0),
        (&["generate", "out", "--prompt", "the", "--tokens", "4"], 0),
        (&["inspect", "missing"], 2),
    ] {
        let mut command = run.binary();
        command.args(arguments);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
        // Both pipes lose their reader.
        (child.stdout, child.stderr) = (None, None);
        let status = child.wait().expect("the process is ours");
        assert_eq!(status.code(), Some(code), "{arguments:?}");
    }
    assert_eq!(run.figures().len(), 3, "a run that nobody watches trains on");
}
