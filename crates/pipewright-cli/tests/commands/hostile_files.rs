//! Tests of files that are not what they seem: pipes and endless devices instead of a run's files, a full
//! disk, and names with control characters.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use crate::run::Run;

/// The longest time in seconds that a command may take.
const SOON: u64 = 30;

fn call(program: &str, arguments: &[&Path]) {
    let status = Command::new(program).args(arguments).status();
    assert!(status.is_ok_and(|status| status.success()), "{program} {arguments:?}");
}

/// Replaces a run's file by a special file, and runs the commands that may read it. Each must end with this
/// code.
fn check(run: &Run, file: &str, make: impl Fn(&Path), readers: &[(&[&str], i32)]) {
    for (reader, code) in readers {
        let path = run.path("out").join(file);
        call("rm", &[Path::new("-rf"), &run.out(), &run.path("out.1"), &run.path("exported")]);
        call("cp", &[Path::new("-r"), &run.path("whole"), &run.out()]);
        fs::remove_file(&path).expect("a file of the run");
        make(&path);
        let output = run.command_within(SOON, reader);
        let words = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(*code), "{file}, {reader:?}: {words}");
        let names_it = words.contains("device or a pipe") || words.contains("is missing");
        assert!(*code == 0 || names_it, "{file}, {reader:?}: {words}");
    }
}

fn check_all(make: impl Fn(&Path)) {
    const INSPECT: &[&str] = &["inspect", "out"];
    const EXPORT: &[&str] = &["export", "out", "exported"];
    const REPORT: &[&str] = &["report", "out", "-o", "report.html"];
    const VIEW: &[&str] = &["view", "out", "-o", "view.html"];
    const RESUME: &[&str] = &["resume", "out", "--set", "run.steps=3"];
    const GENERATE: &[&str] = &["generate", "out", "--prompt", "a", "--tokens", "1"];
    const TRAIN: &[&str] = &["train", "small.toml", "--set", "run.steps=1"];
    let run = Run::new();
    run.train(&["run.steps=2"]);
    fs::rename(run.out(), run.path("whole")).expect("a folder");
    let check = |file: &str, readers: &[(&[&str], i32)]| check(&run, file, &make, readers);
    check("metrics.jsonl", &[(INSPECT, 0), (REPORT, 2), (RESUME, 2), (TRAIN, 0)]);
    check("config.toml", &[(REPORT, 2), (RESUME, 2), (GENERATE, 0), (TRAIN, 0)]);
    check("timeline.json", &[(REPORT, 0), (VIEW, 0), (RESUME, 0), (TRAIN, 0)]);
    check("timelines/step-00000001.json", &[(REPORT, 0), (VIEW, 2)]);
    const PARTS: [&str; 2] = ["manifest.json", "rank-0000.safetensors"];
    for part in PARTS {
        let part = format!("checkpoints/step-00000002/{part}");
        check(&part, &[(INSPECT, 2), (EXPORT, 2), (RESUME, 2), (GENERATE, 2)]);
    }
    check("checkpoints/lock", &[(INSPECT, 0), (RESUME, 2), (TRAIN, 2)]);
}

#[test]
fn a_pipe_in_the_place_of_a_file_stops_no_command() {
    check_all(|path| call("mkfifo", &[path]));
}

#[test]
fn a_file_without_an_end_fills_no_memory() {
    check_all(|path| symlink("/dev/zero", path).expect("a link"));
}

#[test]
fn a_timeline_that_cannot_be_written_is_warned_of_once() {
    let run = Run::new();
    fs::create_dir_all(run.path("out/timelines")).expect("a folder");
    for step in 1..=3 {
        symlink("/dev/full", run.path(&format!("out/timelines/step-{step:08}.json"))).expect("a link");
    }
    let (_, words) = run.succeed(&["train", "small.toml", "--set", "run.steps=3"], &[]);
    assert_eq!(words.matches("warning: a timeline is not written").count(), 1, "{words}");
    assert_eq!(run.figures().len(), 3);
    assert_eq!(run.checkpoints(), ["step-00000003"]);
}

/// Runs a command, and checks that none of its words has a control character.
fn check_escaped(run: &Run, arguments: &[&str], escaped: &str) {
    let (_, out, said) = run.call(arguments, &[]);
    let words = out + &said;
    let hidden = words.chars().find(|&character| character.is_control() && !matches!(character, '\n' | '\t'));
    assert_eq!(hidden, None, "{arguments:?}: {words:?}");
    assert!(words.contains(escaped), "{arguments:?}: {words}");
}

#[test]
fn control_characters_of_files_are_shown_as_escapes() {
    const CLEAR: &str = "\u{1b}[2J";
    const SHOWN: &str = r"\u{1b}[2J";
    let run = Run::new();
    run.train(&["run.steps=2"]);
    run.change_checkpoint("step-00000002", |bytes| {
        // Both names have as many bytes.
        let (name, hostile) = (b"model.embed_to", br"\u001b[2J.head");
        let starts: Vec<usize> =
            (0..bytes.len() - name.len()).filter(|&start| bytes[start..].starts_with(name)).collect();
        assert!(!starts.is_empty());
        starts.iter().for_each(|&start| bytes[start..start + name.len()].copy_from_slice(hostile));
    });
    check_escaped(&run, &["inspect", "out"], SHOWN);
    check_escaped(&run, &["resume", "out", "--set", "run.steps=3"], "model.embed_tokens.weight");
    for set in ["pipeline.schedule", "optimizer.name", "data.path", "run.device", "model.hidden_act"] {
        let set = format!("{set}={CLEAR}");
        check_escaped(&run, &["check", "small.toml", "--set", &set], SHOWN);
    }
    // TOML has escapes of its own, and refuses raw control characters.
    let of_key = r#"[run]
"\u001b[2J" = 1"#;
    for (text, shown) in [(of_key, SHOWN), (CLEAR, "not valid TOML")] {
        run.write("hostile.toml", text);
        check_escaped(&run, &["check", "hostile.toml"], shown);
    }
    run.write("hostile.csv", format!("{CLEAR},1\n"));
    check_escaped(&run, &["validate", "hostile.csv"], "hostile.csv:1:1");
    let missing = format!("{CLEAR}.toml");
    check_escaped(&run, &["train", &missing], SHOWN);
    check_escaped(&run, &["inspect", &missing], SHOWN);
    let timeline = run.path("out/timeline.json");
    let text = fs::read_to_string(&timeline).expect("a timeline").replace("0F0", r"0F0\u001b[2J");
    fs::write(&timeline, text).expect("a file");
    check_escaped(&run, &["view", "out", "-o", "page.html"], SHOWN);
}
