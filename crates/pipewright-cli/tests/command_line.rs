//! The command line as scripts and people meet it: what goes where, exit codes, and the words of errors.

mod scratch;

use std::fs;
use std::path::Path;
use std::process::Output;

use assert_cmd::Command;
use tempfile::TempDir;

fn small() -> String {
    scratch::small(2, 2, 3)
}

fn folder() -> TempDir {
    scratch::folder(&small())
}

fn write(folder: &TempDir, name: &str, content: impl AsRef<[u8]>) {
    fs::write(folder.path().join(name), content).expect("the scratch folder takes files");
}

fn run_in(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::cargo_bin("pipewright").expect("the binary is built");
    command.current_dir(folder).args(arguments).timeout(std::time::Duration::from_secs(60));
    command.output().expect("the binary starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs a command that succeeds; returns its standard output.
fn succeed(folder: &TempDir, arguments: &[&str]) -> String {
    let output = run_in(folder.path(), arguments);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// Runs a command that fails with `code`, and compares the lines of its standard error that begin an error or its help.
fn fail(folder: &TempDir, arguments: &[&str], code: i32, expected: &[&str]) {
    let output = run_in(folder.path(), arguments);
    let stderr = text(&output.stderr).replace(&format!("{}/", folder.path().display()), "");
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stderr}");
    let lines =
        stderr.lines().filter(|line| line.starts_with("error:") || line.trim_start().starts_with("help:"));
    assert_eq!(lines.map(str::trim).collect::<Vec<_>>(), expected, "{arguments:?}");
    assert!(!stderr.contains('\u{1b}'), "colour where there is no terminal: {stderr:?}");
}

/// A check of `small.toml` with one override, which is refused in one sentence and perhaps with help.
fn refuse(argument: &str, expected: &[&str]) {
    fail(&folder(), &["check", "small.toml", "--set", argument], 2, expected);
}

#[test]
fn a_misspelt_key_is_shown_where_it_stands() {
    let folder = folder();
    write(&folder, "bad.toml", small().replace("microbatches", "mikrobatches"));
    let output = run_in(folder.path(), &["check", "bad.toml"]);
    let expected = "\
error: bad.toml:11:1: unknown key `mikrobatches` in [pipeline]
    ,-[11:1]
 10 | [pipeline]
 11 | mikrobatches = 2
    : ^^^^^^^^^^^^
 12 | [run]
    `----
  help: did you mean `microbatches`?
";
    assert_eq!((output.status.code(), text(&output.stderr).as_str()), (Some(2), expected));
}

#[test]
fn all_mistakes_of_a_configuration_are_reported() {
    let folder = folder();
    write(&folder, "bad.toml", "[run]\nsteps = 0\n[pipeline]\nranks = \"two\"\n");
    fail(
        &folder,
        &["check", "bad.toml", "--set", "data.seqlen=8", "--set", "data.path=text.txt"],
        2,
        &[
            "error: --set data.seqlen=8: unknown key `seqlen` in [data]",
            "help: did you mean `seq_len`?",
            "error: bad.toml:4:9: `ranks` is a text, where a whole number is expected",
            "help: write a whole number",
            "error: bad.toml:2:9: `steps` is 0, where a whole number from 1 to 9223372036854775807 is expected",
            "help: write a whole number from 1 to 9223372036854775807",
        ],
    );
}

#[test]
fn sizes_that_do_not_fit_each_other() {
    refuse(
        "pipeline.microbatches=1",
        &[
            "error: --set pipeline.microbatches=1: 1 microbatches cannot fill the 2 stages of `1f1b`; use at least 2",
        ],
    );
    refuse(
        "model.num_attention_heads=3",
        &[
            "error: --set model.num_attention_heads=3: `hidden_size = 16` is not divisible by `num_attention_heads = 3`",
        ],
    );
    let folder = folder();
    let arguments = ["check", "small.toml", "--set", "pipeline.ranks=5", "--set", "pipeline.microbatches=8"];
    let message = "error: --set pipeline.ranks=5: 4 layers cannot fill 5 stages; use at most 4 stages";
    fail(&folder, &arguments, 2, &[message]);
}

#[test]
fn missing_configurations() {
    let expected = "error: none.toml: cannot read the configuration: No such file or directory (os error 2)";
    fail(&folder(), &["train", "none.toml"], 2, &[expected]);
}

#[test]
fn the_sample_needs_no_files() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let output = run_in(folder.path(), &["train", "--set", "run.steps=2"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let config = fs::read_to_string(folder.path().join("runs/sample/config.toml")).expect("a configuration");
    assert!(config.contains("path = [\"built-in\"]\n"), "{config}");
    let output = run_in(folder.path(), &["resume", "runs/sample", "--set", "run.steps=3"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
}

#[test]
fn bad_data() {
    let folder = folder();
    write(&folder, "empty.txt", "");
    write(&folder, "latin.txt", b"na\xefve text in Latin-1");
    write(&folder, "short.txt", "ten bytes!");
    write(&folder, "accent.txt", "seventeen bytes, caf\u{e9}");
    write(&folder, "rows.jsonl", "[1,2,3,4,5,6,7,8,9]\n[1,2,3]\n");
    write(&folder, "large.jsonl", "[1,2,3,4,5,6,7,8,9]\n[1,2,3,4,5,6,7,8,128]\n");
    let refuse = |path: &str, message: &str| {
        let argument = format!("data.path={path}");
        fail(&folder, &["check", "small.toml", "--set", &argument], 2, &[&format!("error: {message}")]);
    };
    refuse("none.txt", "none.txt: there is no such data file; check the path");
    refuse("empty.txt", "empty.txt: the data is empty; name files that hold text");
    refuse(
        "latin.txt",
        "latin.txt: byte 2 is not valid UTF-8; convert the file, or leave it out with a pattern such as \"!**/latin.txt\"",
    );
    refuse(
        "short.txt",
        "the data has 1 rows of seq_len 8, and a step's batch takes 2; \
         give more data, a shorter seq_len, or fewer or smaller microbatches",
    );
    refuse(
        "accent.txt",
        "accent.txt: byte 20: token id 195 lies beyond the vocabulary of 128; raise vocab_size, or correct the data",
    );
    refuse(
        "rows.jsonl",
        "rows.jsonl:2: the row holds 3 ids, and seq_len 8 takes 9; correct the row or seq_len",
    );
    refuse(
        "large.jsonl",
        "large.jsonl:2: token id 128 lies beyond the vocabulary of 128; raise vocab_size, or correct the data",
    );
}

#[test]
fn an_output_folder_that_cannot_be_written() {
    refuse("run.out=text.txt/out", &["error: text.txt: this is no folder; choose another run.out"]);
    let folder = folder();
    fs::create_dir(folder.path().join("out")).expect("a folder");
    write(&folder, "out/config.toml", "mine");
    let message = "error: out/config.toml: the file belongs to no earlier run and would be overwritten; \
                   choose another run.out";
    fail(&folder, &["train", "small.toml"], 2, &[message]);
    assert_eq!(fs::read_to_string(folder.path().join("out/config.toml")).ok().as_deref(), Some("mine"));
}

#[test]
fn check_tells_what_would_run_and_leaves_no_trace() {
    let folder = folder();
    let expected = "\
model     4 layers, 8528 parameters
stage 0   on rank 0: layers 0 to 2, 6464 parameters
stage 1   on rank 1: layers 3 to 3, 2064 parameters
schedule  1f1b: 2 ranks, 2 microbatches, proved sound
data      264 tokens, 32 rows, 16 steps of 2 rows an epoch
";
    let found = succeed(&folder, &["check", "small.toml"]);
    let (summary, run) = found.split_at(found.find("run ").expect("a line on the run"));
    assert_eq!(summary, expected);
    assert!(run.starts_with("run       3 steps, results in /"), "{run}");
    assert!(!folder.path().join("out").exists());
}

#[test]
fn check_counts_what_a_family_and_tied_embeddings_change() {
    let folder = folder();
    let check = |argument: &str, words: &str| {
        let found = succeed(&folder, &["check", "small.toml", "--set", argument]);
        assert_eq!(found.lines().next(), Some(format!("model     4 layers, {words}").as_str()), "{argument}");
    };
    check("model.tie_word_embeddings=true", "6480 parameters");
    check("model.architecture=qwen2", "8624 parameters");
}

#[test]
fn init_writes_a_configuration_once() {
    let folder = folder();
    succeed(&folder, &["init"]);
    succeed(&folder, &["check", "pipewright.toml", "--set", "data.path=text.txt", "--set", "data.seq_len=4"]);
    let message = "error: pipewright.toml: the file exists and is left as it is; name another file";
    fail(&folder, &["init"], 2, &[message]);
}

#[test]
fn the_examples_of_the_help_work_as_typed() {
    for command in ["check", "init", "schedule", "lower", "validate", "simulate", "partition", "vpp"] {
        let folder = folder();
        let help = succeed(&folder, &[command, "--help"]);
        let example = help.split("Example:\n").nth(1).expect(command).trim();
        for line in example.split(" && ") {
            let words: Vec<&str> = line.split_whitespace().skip(1).collect();
            succeed(&folder, &words);
        }
    }
}

#[test]
fn wrong_arguments_have_the_code_of_wrong_input() {
    for arguments in [&["trian"][..], &["schedule", "gpipe"], &["partition", "--weights", "x"], &[]] {
        assert_eq!(run_in(folder().path(), arguments).status.code(), Some(2), "{arguments:?}");
    }
}
