//! Tests of `generate` in several processes: they write what one process writes, once, and all end with one
//! message when something is wrong.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::{folder, left_running, mpirun, pipewright, process_of, signal, train_on_threads, words};

const GREEDY: [&str; 6] = ["--prompt", "the quick ", "--prompt", "fox", "--temperature", "0"];

/// Trains a few steps with threads.
fn train(folder: &Path, set: &[&str]) {
    train_on_threads(folder, &[&["run.steps=2"], set].concat());
}

fn generate_command(folder: &Path, count: u32, arguments: &[&str]) -> Command {
    let mut command = mpirun(folder);
    command.args(["-n", &count.to_string()]).arg(pipewright()).args(["generate", "out"]).args(arguments);
    command
}

fn generate(folder: &Path, count: u32, arguments: &[&str]) -> Output {
    generate_command(folder, count, arguments).output().expect("mpirun is installed with MPI")
}

/// Returns the object that the processes print, which must be one.
fn json(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(0), "{}", words(output));
    serde_json::from_slice(&output.stdout).expect("one object")
}

/// Returns what a single process prints.
fn alone(folder: &Path, arguments: &[&str]) -> Value {
    let mut command = Command::new(pipewright());
    command.current_dir(folder).args(["generate", "out"]).args(arguments);
    json(&command.output().expect("it starts"))
}

/// Compares the texts of threads and of processes, to the bit.
fn check(set: &[&str], count: u32, arguments: &[&str]) {
    let folder = folder();
    train(folder.path(), set);
    let arguments = [&GREEDY[..], &["--tokens", "6", "--json"], arguments].concat();
    let found = json(&generate(folder.path(), count, &arguments));
    // Without the number of ranks, one process has one rank.
    let expected = alone(folder.path(), &arguments);
    assert_eq!(found["texts"], expected["texts"]);
    let ranks = |found: &Value| found["ranks"].as_array().map(Vec::len);
    assert_eq!(ranks(&found), Some(count as usize));
    assert_eq!(found["cache"], true);
}

#[test]
fn processes_generate_what_one_process_generates() {
    check(&[], 3, &[]);
    check(&["pipeline.ranks=2"], 2, &["--ranks", "run"]);
}

/// Starts a generation with a pipe for its standard input.
fn start_with_input(mut command: Command) -> (Child, ChildStdin) {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("it starts");
    let input = child.stdin.take().expect("a pipe");
    (child, input)
}

/// Also those that come when the ranks have started.
#[test]
fn prompts_on_standard_input_go_through_the_first_process() {
    let folder = folder();
    train(folder.path(), &[]);
    let arguments = ["--prompts", "-", "--temperature", "0", "--tokens", "4", "--json"];
    let (child, mut input) = start_with_input(generate_command(folder.path(), 2, &arguments));
    std::thread::sleep(Duration::from_secs(2));
    input.write_all(b"the quick \nfox\n").expect("it reads");
    drop(input);
    let found = json(&child.wait_with_output().expect("it ends"));
    let expected = alone(folder.path(), &[&GREEDY[..], &["--tokens", "4", "--json"]].concat());
    assert_eq!(found["texts"], expected["texts"]);
}

#[test]
fn processes_with_other_checkpoints_are_refused() {
    let folder = folder();
    train(folder.path(), &[]);
    train(folder.path(), &["run.seed=7", "run.out=other"]);
    let mut command = mpirun(folder.path());
    let arguments = ["--prompt", "a", "--tokens", "1"];
    for (run, separator) in [("out", Some(":")), ("other", None)] {
        command.args(["-n", "1"]).arg(pipewright()).args(["generate", run]).args(arguments).args(separator);
    }
    let output = command.output().expect("mpirun is installed with MPI");
    let said = words(&output);
    assert_eq!((output.status.code(), said.matches("error:").count()), (Some(2), 1), "{said}");
    assert!(said.contains("checkpoint") && output.stdout.is_empty(), "{said}");
}

#[test]
fn tensor_ranks_generate_in_processes_as_in_threads() {
    check(&["mesh.tensor_parallel=2", "pipeline.ranks=2"], 4, &["--ranks", "run"]);
    check(&[], 2, &["--tensor-parallel", "2"]);
}

#[test]
fn a_chat_goes_through_the_first_process() {
    let folder = folder();
    train(folder.path(), &[]);
    let lines = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}";
    fs::write(folder.path().join("lines.jinja"), lines).expect("a file");
    let chat = ["--chat", "--chat-template", "lines.jinja", "--tokens", "4", "--temperature", "0"];
    let answers = |command: Command| {
        let (child, mut input) = start_with_input(command);
        input.write_all(b"two\n\nthree\n").expect("it reads");
        drop(input);
        let output = child.wait_with_output().expect("it ends");
        assert_eq!(output.status.code(), Some(0), "{}", words(&output));
        String::from_utf8(output.stdout).expect("text")
    };
    let mut one = Command::new(pipewright());
    one.current_dir(folder.path()).args(["generate", "out"]).args(chat);
    // The output of a process of mpirun is a terminal, on which control characters are escaped.
    let shown = |letter: char| match letter {
        '\n' => "\n".to_owned(),
        letter if letter.is_control() => letter.escape_unicode().to_string(),
        letter => letter.to_string(),
    };
    let expected: String = answers(one).chars().map(shown).collect();
    assert_eq!(answers(generate_command(folder.path(), 2, &chat)), expected);
}

#[test]
fn mistakes_of_a_generation_are_told_once() {
    let folder = folder();
    train(folder.path(), &[]);
    let refused = |count, arguments: &[&str], expected: &str| {
        let output = generate(folder.path(), count, arguments);
        let said = words(&output);
        assert_eq!((output.status.code(), said.matches("error:").count()), (Some(2), 1), "{said}");
        assert!(said.contains(expected) && output.stdout.is_empty(), "`{expected}` in: {said}");
    };
    refused(2, &["--prompt", "a", "--ranks", "3"], "2 processes were started for 3 x 1 ranks");
    refused(2, &["--prompts", "none.txt"], "none.txt");
    refused(2, &["--prompt", "a", "--tokens", "9", "--top-p", "7"], "the top-p is 7");
    refused(2, &["--prompt", "a", "--tensor-parallel", "3"], "2 processes were started for 1 x 3 ranks");
}

/// Waits until the first process reads the lines of a chat, which it does when all ranks have started.
fn wait_for_chat(folder: &Path) {
    let (leader, start) = (process_of(0, folder), Instant::now());
    let reads = || {
        let threads = fs::read_dir(format!("/proc/{leader}/task")).into_iter().flatten().flatten();
        let mut names = threads.filter_map(|thread| fs::read_to_string(thread.path().join("comm")).ok());
        names.any(|name| name.trim_end() == "standard input")
    };
    while !reads() {
        assert!(start.elapsed() < Duration::from_secs(60), "the chat does not begin");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Stops a rank of a chat after a message, if there is one. Checks that the chat ends with one report, which
/// names the rank.
fn check_stopped(message: &[u8]) {
    let folder = folder();
    train(folder.path(), &[]);
    let path = folder.path().canonicalize().expect("it exists");
    fs::write(path.join("lines.jinja"), "{{ messages }}").expect("a file");
    let chat = ["--chat", "--chat-template", "lines.jinja", "--deadline", "5", "--tokens", "1000000"];
    let mut command = generate_command(&path, 3, &chat);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut run = command.spawn().expect("mpirun is installed with MPI");
    // The chat waits for a line as long as it is open.
    let mut input = run.stdin.take().expect("a pipe");
    input.write_all(message).expect("it reads");
    wait_for_chat(&path);
    std::thread::sleep(Duration::from_millis(500));
    let start = Instant::now();
    signal(process_of(2, &path), "STOP");
    let output = run.wait_with_output().expect("mpirun ends");
    drop(input);
    let (took, said) = (start.elapsed(), words(&output));
    assert!(took < Duration::from_secs(15), "{took:?}: {said}");
    assert_eq!((output.status.code(), said.matches("error:").count()), (Some(4), 1), "{said}");
    assert!(said.contains("rank 2 has sent no heartbeat for 5.0 s"), "{said}");
    assert_eq!(left_running(&path), 0, "nothing is left running");
}

#[test]
fn a_process_that_is_stopped_ends_the_generation() {
    check_stopped(b"a\n");
    check_stopped(b"");
}
