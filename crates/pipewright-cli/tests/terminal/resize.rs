//! The screen after a run whose terminal was made narrower and wider during the run.

use std::fs;
use std::process::Command;

use rustix::process::{Pid, Resource, Rlimit, prlimit};
use tempfile::TempDir;

use crate::pty::Terminal;
use crate::{WIDTHS, count, ends_with_the_error, folder, joined, train, without_notice};

/// The widths that a terminal has in turn during a run, each with a word that the display's first line has at
/// this width, and one that it lacks.
const IN_TURN: [(u16, &str, &str); 6] = [
    (120, "4 layers", "\0"),
    (50, "1f1b", "microbatches"),
    (80, "microbatches", "4 layers"),
    (50, "1f1b", "microbatches"),
    (80, "microbatches", "4 layers"),
    (120, "4 layers", "\0"),
];

/// Returns a folder with a text that is long enough for steps of several hundred milliseconds.
fn folder_of_long_steps() -> TempDir {
    let folder = folder();
    fs::write(folder.path().join("text.txt"), "to be or not to be ".repeat(20_000)).expect("a file");
    folder
}

/// Resizes the terminal several times, waits for the display to fit each width, and leaves the terminal
/// `columns` wide with a display for another width.
fn resize_in_turn(terminal: &mut Terminal, columns: u16) {
    for (width, present, absent) in IN_TURN {
        terminal.resize(width);
        terminal.wait_until(|lines| {
            let is_whole = lines.iter().all(|line| line.chars().count() < width.into());
            let starts = |word: &str| lines.iter().filter(|line| line.starts_with(word)).count();
            let is_of_width = lines[0].contains(present) && !lines[0].contains(absent);
            is_whole
                && is_of_width
                && lines[0].starts_with("llama")
                && ["llama", "step ", "loss "].map(starts) == [1, 1, 1]
        });
        assert!(terminal.is_running(), "the run ends before the terminal has had all widths");
    }
    terminal.resize(columns);
}

/// Checks that the screen has one display, at the top, and no line that is broken or cut off.
fn check_screen(lines: &[String], columns: u16) {
    let what = format!("at {columns} columns: {lines:?}");
    let lines = &without_notice(lines)[..];
    assert!(lines[0].starts_with("llama") && count(lines, "llama") == 1, "{what}");
    assert_eq!((count(lines, "tokens/s  "), lines[1].starts_with("step ")), (1, true), "{what}");
    assert!(!joined(lines).contains("^C"), "{what}");
    assert!(lines.iter().take(4).all(|line| line.chars().count() <= columns.into()), "{what}");
}

#[test]
fn the_error_of_a_failing_step_stays_after_resizing() {
    for columns in WIDTHS {
        let folder = folder_of_long_steps();
        let set = [
            "optimizer.learning_rate=1e30",
            "optimizer.clip_norm=0",
            "data.seq_len=64",
            "pipeline.microbatches=3200",
        ];
        let mut terminal = train(&folder, 80, &set);
        terminal.wait_until(|lines| count(lines, "step 1/40") == 1);
        resize_in_turn(&mut terminal, columns);
        let (code, lines) = terminal.wait_for_end();
        assert_eq!(code, Some(4), "{lines:?}");
        check_screen(&lines, columns);
        let text = joined(&lines);
        assert!(text.contains("error: step 2: rank "), "at {columns} columns: {lines:?}");
        assert!(ends_with_the_error(&text), "at {columns} columns: {lines:?}");
    }
}

#[test]
fn the_error_of_a_full_disk_stays_after_resizing() {
    for columns in WIDTHS {
        let folder = folder();
        let mut command = Command::new("sh");
        let binary = assert_cmd::cargo::cargo_bin!("pipewright").display().to_string();
        let script = format!(
            "trap '' XFSZ; exec '{binary}' train small.toml --set run.timelines=0 --set run.steps=1000000"
        );
        command.current_dir(folder.path()).args(["-c", &script]);
        let mut terminal = Terminal::start(command, 80, &[]);
        terminal.wait_until(|lines| count(lines, "tokens/s") == 1);
        resize_in_turn(&mut terminal, columns);
        // From here on, no file of the process may grow.
        let pid = i32::try_from(terminal.id()).ok().and_then(Pid::from_raw);
        let limit = Rlimit { current: Some(1), maximum: Some(1) };
        prlimit(pid, Resource::Fsize, limit).expect("the child's limits are ours to set");
        let (code, lines) = terminal.wait_for_end();
        assert_eq!(code, Some(2), "{lines:?}");
        check_screen(&lines, columns);
        let text = joined(&lines);
        assert!(
            text.contains("error: ") && text.contains("metrics.jsonl: cannot be written: "),
            "at {columns} columns: {lines:?}"
        );
        let has_advice = text.contains("raise the limit on the size of files") && text.ends_with("/out");
        assert!(has_advice, "at {columns} columns: {lines:?}");
    }
}

#[test]
fn a_signal_leaves_no_stale_line_after_resizing() {
    for columns in WIDTHS {
        let folder = folder();
        let mut terminal = train(&folder, 80, &["run.steps=1000000"]);
        terminal.wait_until(|lines| count(lines, "tokens/s") == 1);
        resize_in_turn(&mut terminal, columns);
        terminal.interrupt();
        let (code, lines) = terminal.wait_for_end();
        assert_eq!(code, Some(5), "{lines:?}");
        check_screen(&lines, columns);
        assert_eq!(count(&lines, "stopped by a signal after step "), 1, "{lines:?}");
        assert_eq!(terminal.cursor(), (lines.len() as u16, 0), "{lines:?}");
    }
}

#[test]
fn a_run_ends_with_one_display_after_resizing() {
    for columns in WIDTHS {
        let folder = folder_of_long_steps();
        let mut terminal =
            train(&folder, 80, &["run.steps=12", "data.seq_len=64", "pipeline.microbatches=300"]);
        terminal.wait_until(|lines| count(lines, "tokens/s") == 1);
        resize_in_turn(&mut terminal, columns);
        let (code, lines) = terminal.wait_for_end();
        assert_eq!(code, Some(0), "{lines:?}");
        check_screen(&lines, columns);
        assert!(lines[1].starts_with("step 12/12  ") && lines[1].contains("100%  "), "{lines:?}");
        assert_eq!(count(&lines, "trained 12 steps in "), 1, "{lines:?}");
    }
}
