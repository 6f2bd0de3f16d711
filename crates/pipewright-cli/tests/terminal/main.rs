//! Tests of the output on a terminal: the live display at several widths, and the screen after a run has
//! ended, failed or been stopped.
#![cfg(unix)]

mod emulator;
mod pty;
mod resize;
#[path = "../scratch/mod.rs"]
mod scratch;
mod tmux;

use std::fs;
use std::process::Command;

use tempfile::TempDir;

use crate::pty::{Terminal, pipewright};

const WIDTHS: [u16; 3] = [50, 80, 120];

fn folder() -> TempDir {
    scratch::folder(&scratch::small(2, 4, 40))
}

/// Starts training with these overrides.
fn train(folder: &TempDir, columns: u16, set: &[&str]) -> Terminal {
    let set = set.iter().flat_map(|set| ["--set", set]);
    let arguments: Vec<&str> = ["train", "small.toml"].into_iter().chain(set).collect();
    Terminal::start(pipewright(folder.path(), &arguments), columns, &[])
}

/// Returns the number of lines that contain the word.
fn count(lines: &[String], word: &str) -> usize {
    lines.iter().filter(|line| line.contains(word)).count()
}

/// Joins the lines, because a terminal wraps a long error.
fn joined(lines: &[String]) -> String {
    lines.concat()
}

/// Returns whether a screen ends with the whole error of a gradient that is not finite.
fn ends_with_the_error(text: &str) -> bool {
    text.contains("or look at the data of this step; the step was computed again with checks: `")
        && ["0", "1"].iter().any(|rank| text.ends_with(&format!(" of stage {rank} on rank {rank}")))
}

#[test]
fn the_error_of_a_failing_step_is_the_last_thing_on_the_screen() {
    for columns in WIDTHS {
        let folder = folder();
        let mut terminal =
            train(&folder, columns, &["optimizer.learning_rate=1e30", "optimizer.clip_norm=0"]);
        let (code, lines) = terminal.wait_for_end();
        assert_eq!(code, Some(4), "{lines:?}");
        let text = joined(&lines);
        assert!(text.contains("error: step 2: rank "), "at {columns} columns: {lines:?}");
        assert!(ends_with_the_error(&text), "{lines:?}");
        assert_eq!(count(&lines, "step 1/40"), 1, "the last figures are above it: {lines:?}");
        assert!(lines[0].starts_with("llama") && count(&lines, "llama") == 1, "{lines:?}");
    }
}

/// Returns the lines of a screen without the notice that a signal has arrived. It is above the display, or below it if the
/// run ends before the notice is written.
fn without_notice(lines: &[String]) -> Vec<String> {
    let begin = lines.iter().position(|line| line.starts_with("SIGINT has arrived: ")).unwrap_or_default();
    // The terminal may wrap it anywhere.
    let ends = |end: &usize| joined(&lines[begin..*end]).replace(' ', "").ends_with("withoutacheckpoint");
    let notice = begin..(begin..=lines.len()).find(ends).unwrap_or(begin);
    let is_other = |(at, line): (usize, &String)| (!notice.contains(&at)).then(|| line.clone());
    lines.iter().enumerate().filter_map(is_other).collect()
}

#[test]
fn the_error_of_a_full_disk_is_the_last_thing_on_the_screen() {
    for columns in WIDTHS {
        let folder = folder();
        // A limit of four KiB on the size of files simulates a full disk. Timelines would reach it before the
        // metrics.
        let mut command = Command::new("sh");
        let binary = assert_cmd::cargo::cargo_bin!("pipewright").display().to_string();
        let script =
            format!("trap '' XFSZ; ulimit -f 8; exec '{binary}' train small.toml --set run.timelines=0");
        command.current_dir(folder.path()).args(["-c", &script]);
        let mut terminal = Terminal::start(command, columns, &[]);
        let (code, lines) = terminal.wait_for_end();
        assert_eq!(code, Some(2), "{lines:?}");
        let text = joined(&lines);
        let place = text.find("error: ").expect("an error on the screen");
        assert!(
            text[place..].contains("metrics.jsonl: cannot be written: "),
            "at {columns} columns: {lines:?}"
        );
        assert!(text.contains("raise the limit on the size of files") && text.ends_with("/out"), "{lines:?}");
        assert_eq!(count(&lines, "tokens/s"), 1, "{lines:?}");
    }
}

#[test]
fn the_report_of_exhausted_memory_is_the_last_thing_on_the_screen() {
    // Parameters of 134 MB and more, with gradients and optimizer state: the first or the second step does
    // not fit.
    let large =
        ["model.vocab_size=16384", "model.hidden_size=1024", "data.seq_len=16", "pipeline.microbatches=2"];
    let set: String = large.iter().map(|set| format!(" --set {set}")).collect();
    for columns in WIDTHS {
        let folder = folder();
        let mut command = Command::new("sh");
        let binary = assert_cmd::cargo::cargo_bin!("pipewright").display().to_string();
        let script = format!("ulimit -v 1000000; exec '{binary}' train small.toml {set}");
        command.current_dir(folder.path()).args(["-c", &script]);
        let mut terminal = Terminal::start(command, columns, &[]);
        let (code, lines) = terminal.wait_for_end();
        assert_eq!(code, Some(4), "{lines:?}");
        let text = joined(&lines);
        assert!(text.contains("error: step ") && text.contains(": rank "), "at {columns} columns: {lines:?}");
        assert!(text.ends_with("or give the process more memory"), "at {columns} columns: {lines:?}");
        assert!(lines[0].starts_with("llama") && count(&lines, "/40") == 1, "the display: {lines:?}");
    }
}

#[test]
fn the_display_goes_on_after_a_restart() {
    let folder = folder();
    let mut command = pipewright(
        folder.path(),
        &["train", "small.toml", "--set", "run.restarts=1", "--set", "run.steps=1000000"],
    );
    command.env("PIPEWRIGHT_FAULT", "panic:1:3");
    let mut terminal = Terminal::start(command, 80, &[]);
    // The last frame before the restart stays above the message.
    let step = |lines: &[String]| -> u64 {
        let line = lines.iter().rev().find_map(|line| line.strip_prefix("step ")?.split('/').next());
        line.and_then(|step| step.replace(',', "").parse().ok()).unwrap_or(0)
    };
    let lines = terminal.wait_until(|lines| step(lines) > 20);
    assert_eq!(count(&lines, "restart 1 of 1"), 1, "{lines:?}");
    terminal.interrupt();
    terminal.wait_for_end();
}

#[test]
fn the_display_fits_every_width_that_it_is_given_in_turn() {
    let folder = folder();
    let mut terminal = train(&folder, 120, &["run.steps=1000000"]);
    // The words that differ between the widths.
    let shown = [
        (120, "4 layers", "predicted"),
        (80, "4 microbatches", "memory"),
        (50, "1f1b", "ms  bubble"),
        (120, "4 layers", "predicted"),
        (50, "1f1b", "ms  bubble"),
        (80, "4 microbatches", "memory"),
    ];
    for (columns, header, speed) in shown {
        terminal.resize(columns);
        let fits = |lines: &[String]| {
            // Each rank and the curve of the loss are shown from 80 columns on.
            let count = if columns < 80 { 4 } else { 13 };
            let is_frame =
                lines.len() == count && lines[0].starts_with("llama  ") && lines[1].starts_with("step ");
            let has_ranks =
                lines.get(4).is_none_or(|line| line.contains(" busy ") && line.contains("rank 1 ━"));
            let is_frame = is_frame && has_ranks;
            // The terminal has cut off a line that reaches the last column. The display draws it again soon.
            let is_whole = lines.iter().all(|line| line.chars().count() < columns.into());
            is_frame && is_whole && lines[0].contains(header) && lines[3].contains(speed)
        };
        let lines = terminal.wait_until(fits);
        assert!(lines[3].contains(" tokens/s  "), "{lines:?}");
        assert!(lines[1].contains("/1000000  ") && lines[1].contains(':'), "{lines:?}");
        assert!(
            lines[2].starts_with("loss ") && lines[2].contains("norm ") && lines[2].contains(" 3.00e-4"),
            "{lines:?}"
        );
        assert_eq!(terminal.cursor(), (0, 0), "the next output takes the display's place");
    }
    terminal.interrupt();
    let (code, lines) = terminal.wait_for_end();
    assert_eq!(code, Some(5), "{lines:?}");
    for word in ["llama", "/1000000  ", "norm ", "stopped by a signal after step "] {
        assert_eq!(count(&lines, word), 1, "{word}: {lines:?}");
    }
    assert!(!joined(&lines).contains("^C"), "{lines:?}");
    let shown = without_notice(&lines);
    assert!(shown[0].starts_with("llama") && shown[5].starts_with("stopped by a signal"), "{lines:?}");
    assert_eq!(count(&lines, "pipewright resume out"), 1, "{lines:?}");
    assert_eq!(terminal.cursor(), (lines.len() as u16, 0));
}

#[test]
fn a_run_that_is_ended_at_once_leaves_the_display_above_the_cursor() {
    let folder = folder();
    // Each step takes many seconds, and the first signal waits for the end of the step.
    fs::write(folder.path().join("text.txt"), "to be or not to be ".repeat(20_000)).expect("a file");
    let mut terminal = train(&folder, 80, &["data.seq_len=64", "pipeline.microbatches=5000"]);
    // A busy machine may show no frame in some seconds.
    let elapsed = |lines: &[String]| -> Option<u64> {
        joined(lines).split("elapsed 0:").nth(1).and_then(|rest| rest.get(..2)?.parse().ok())
    };
    let lines = terminal.wait_until(|lines| elapsed(lines) > Some(0));
    let has_guess = ["remaining", "eta", "left"].iter().any(|word| joined(&lines).contains(word));
    assert!(lines.len() == 2 && !has_guess, "nothing is foretold before the first step: {lines:?}");
    assert!(lines[1].ends_with("the first step is under way"), "{lines:?}");
    terminal.interrupt();
    // The display draws over the echo of the key.
    let before = elapsed(&lines);
    terminal.wait_until(|lines| elapsed(lines) > before && !joined(lines).contains("^C"));
    terminal.interrupt();
    let (code, lines) = terminal.wait_for_end();
    assert_eq!(code, Some(130), "{lines:?}");
    // The notice of the first signal has three lines.
    assert_eq!(terminal.cursor(), (3 + 2, 0), "the shell's prompt goes below the display: {lines:?}");
}

#[test]
fn a_run_ends_with_its_figures_and_the_next_commands() {
    let folder = folder();
    let mut terminal = train(&folder, 80, &["run.checkpoint_every=20"]);
    let (code, lines) = terminal.wait_for_end();
    assert_eq!(code, Some(0), "{lines:?}");
    assert!(lines[1].starts_with("step 40/40  ━━━") && lines[1].contains(" 100%  "), "{lines:?}");
    assert!(
        lines[5].starts_with("trained 40 steps in 0:0") && lines[5].contains(": 1,280 tokens at "),
        "{lines:?}"
    );
    assert!(lines[6].starts_with("loss ") && lines[6].contains(" at first, "), "{lines:?}");
    let last: Vec<&str> = lines[lines.len() - 7..].iter().map(|line| line.trim_start()).collect();
    assert_eq!(last[0], "results in out");
    assert!(last[1].starts_with("pipewright resume out --set run.steps=80 "), "{lines:?}");
    assert!(
        last[2].starts_with("pipewright inspect out ") && last[4].starts_with("pipewright export out DIR ")
    );
    assert!(last[3].starts_with("pipewright generate out --prompt TEXT "), "{lines:?}");
    assert!(last[5].starts_with("pipewright report out -o out/report.html "), "{lines:?}");
    assert!(last[6].starts_with("pipewright view out -o out/view.html "), "{lines:?}");
    for arguments in [
        &["report", "out", "-o", "out/report.html"][..],
        &["view", "out", "-o", "out/view.html"],
        &["resume", "out", "--set", "run.steps=80"],
        &["inspect", "out"],
        &["generate", "out", "--prompt", "TEXT"],
        &["export", "out", "DIR"],
    ] {
        let output = pipewright(folder.path(), arguments).output().expect("the binary starts");
        assert!(output.status.success(), "the next commands work as printed: {arguments:?}");
    }
}

#[test]
fn the_summary_fits_the_terminal() {
    for columns in WIDTHS {
        let folder = folder();
        let (code, lines) = train(&folder, columns, &["run.checkpoint_every=20"]).wait_for_end();
        assert_eq!(code, Some(0), "{lines:?}");
        let fits = |line: &String| line.chars().count() <= columns.into();
        assert!(lines.iter().all(fits), "the terminal breaks a line of {columns} columns: {lines:?}");
        assert_eq!(count(&lines, "┤"), 8, "{lines:?}");
        let text = lines.join(" ").split_whitespace().collect::<Vec<_>>().join(" ");
        for words in
            [" tokens/s loss ", " at best (step ", "trains further", "writes a Hugging Face directory"]
        {
            assert!(text.contains(words), "{words} at {columns} columns: {lines:?}");
        }
        assert_eq!(count(&lines, "  pipewright resume out --set run.steps=80"), 1, "{lines:?}");
    }
}

#[test]
fn a_run_is_watched_on_another_terminal() {
    let folder = folder();
    let set = ["train", "small.toml", "--quiet", "--set", "run.steps=4000"];
    let mut trained = pipewright(folder.path(), &set).spawn().expect("the binary starts");
    let begun = std::time::Instant::now();
    let has_begun =
        || fs::read_to_string(folder.path().join("out/metrics.jsonl")).is_ok_and(|lines| lines.len() > 9000);
    while !has_begun() {
        assert!(begun.elapsed().as_secs() < 60, "the run has written fewer than 9000 bytes of metrics");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let mut terminal = Terminal::start(pipewright(folder.path(), &["watch", "out"]), 80, &[]);
    let is_curve =
        |lines: &[String]| lines.len() == 13 && lines[1].contains("/4000") && lines[5].contains("┤");
    let first = terminal.wait_until(is_curve);
    terminal.wait_until(|lines| is_curve(lines) && lines[1] != first[1] && lines[3] != first[3]);
    terminal.interrupt();
    let (code, lines) = terminal.wait_for_end();
    assert_eq!(code, Some(0), "{lines:?}");
    assert!(count(&lines, "/4000") == 1 && !joined(&lines).contains("NaN"), "one frame stays: {lines:?}");
    assert_eq!(lines.last().map(String::as_str), Some("the run continues without this display"), "{lines:?}");
    trained.kill().and_then(|()| trained.wait()).expect("the process is ours");
}

#[test]
fn colour_can_be_turned_off() {
    let folder = folder();
    let colours = |variables: &[(&str, &str)]| {
        let command = pipewright(folder.path(), &["train", "small.toml"]);
        let mut terminal = Terminal::start(command, 80, variables);
        terminal.wait_for_end();
        terminal.written().contains("\x1b[1m")
    };
    assert!(colours(&[]));
    assert!(!colours(&[("NO_COLOR", "1")]));
    assert!(colours(&[("NO_COLOR", "")]), "an empty NO_COLOR says nothing");
}

#[test]
fn what_is_piped_is_plain_lines() {
    let folder = folder();
    let output = pipewright(folder.path(), &["train", "small.toml"]).output().expect("the binary starts");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!text.contains('\x1b') && !text.contains('\r'), "{text}");
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("llama  4 layers  ") && lines[0].ends_with("  device flex"), "{text}");
    assert!(lines[1].starts_with("step 1/40  loss "), "{text}");
    assert!(text.contains("\nstep 40/40  loss ") && text.contains("\ntrained 40 steps in "), "{text}");
}
