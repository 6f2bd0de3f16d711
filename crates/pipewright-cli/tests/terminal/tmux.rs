//! The live display in tmux with its default settings: redrawing must not fill the scrollback.
//!
//! If tmux is not installed, the tests print a note to standard error and pass. Continuous integration sets
//! `PIPEWRIGHT_REQUIRE_TMUX=1`, so that they fail instead.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use crate::{count, folder};

/// The longest time that a test waits.
const PATIENCE: Duration = Duration::from_secs(60);
/// The time in which the display is drawn about ten times.
const SEVERAL_FRAMES: Duration = Duration::from_secs(1);

/// A tmux server of its own, with one window.
struct Tmux<'a> {
    folder: &'a Path,
}

impl<'a> Tmux<'a> {
    /// Starts a shell command in a window of this size. Returns `None` if tmux is neither installed nor
    /// required.
    fn start(folder: &'a Path, [columns, rows]: [u16; 2], script: &str) -> Option<Self> {
        if !is_installed() {
            return None;
        }
        let tmux = Self { folder };
        let (columns, rows) = (columns.to_string(), rows.to_string());
        // The shell continues after Ctrl-C, so that the window stays after the end of the command.
        let script = format!("trap : INT; {script}; exec sleep 600");
        tmux.run(&["new-session", "-d", "-x", &columns, "-y", &rows, "sh", "-c", &script]);
        Some(tmux)
    }

    /// Runs a command of tmux and returns what it prints.
    fn run(&self, arguments: &[&str]) -> String {
        let output = self.try_run(arguments).expect("tmux starts");
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn try_run(&self, arguments: &[&str]) -> std::io::Result<Output> {
        let mut command = Command::new("tmux");
        command.current_dir(self.folder).env_remove("TMUX").env("TERM", "xterm-256color");
        // Without a file of settings, all settings are the defaults.
        command.args(["-f", "/dev/null", "-u", "-S", "socket"]).args(arguments).output()
    }

    fn resize(&self, [columns, rows]: [u16; 2]) {
        self.run(&["resize-window", "-x", &columns.to_string(), "-y", &rows.to_string()]);
    }

    /// Returns the lines of the scrollback and the screen, without the empty lines at the end.
    fn lines(&self) -> Vec<String> {
        let text = self.run(&["capture-pane", "-p", "-S", "-"]);
        text.trim_end().lines().map(str::to_owned).collect()
    }

    /// Returns the number of lines in the scrollback.
    fn scrolled(&self) -> usize {
        self.run(&["display-message", "-p", "#{history_size}"]).trim().parse().expect("a number")
    }

    fn wait_until(&self, is_so: impl Fn(&[String]) -> bool) -> Vec<String> {
        let start = Instant::now();
        loop {
            let lines = self.lines();
            if is_so(&lines) {
                return lines;
            }
            assert!(start.elapsed() < PATIENCE, "the screen does not come to this:\n{}", lines.join("\n"));
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Tmux<'_> {
    fn drop(&mut self) {
        // The server ends with its window's command. If it has ended already, this fails.
        let _ = self.try_run(&["kill-server"]);
    }
}

fn is_installed() -> bool {
    let is_installed = Command::new("tmux").arg("-V").output().is_ok();
    if !is_installed {
        let required = std::env::var("PIPEWRIGHT_REQUIRE_TMUX").is_ok_and(|value| value == "1");
        assert!(!required, "tmux is not installed; install tmux");
        // The test harness hides what `eprintln!` prints of a test that passes.
        let _said = writeln!(std::io::stderr(), "SKIPPED: no tmux to show the display in; install tmux");
    }
    is_installed
}

/// Returns a shell command that trains until it is stopped.
fn endless() -> String {
    let binary = assert_cmd::cargo::cargo_bin!("pipewright").display().to_string();
    format!("'{binary}' train small.toml --set run.steps=1000000")
}

/// Returns whether the lines end with one whole display for a window of 80 columns: its figures and the curve
/// of the loss.
fn has_whole_display(lines: &[String]) -> bool {
    count(lines, "tokens/s") == 1 && count(lines, "┤") == 8
}

#[test]
fn the_display_stays_out_of_the_scrollback() {
    let folder = folder();
    let Some(tmux) = Tmux::start(folder.path(), [80, 24], &endless()) else { return };
    tmux.wait_until(has_whole_display);
    std::thread::sleep(SEVERAL_FRAMES);
    assert_eq!(tmux.scrolled(), 0, "{:#?}", tmux.lines());
    tmux.run(&["send-keys", "C-c"]);
    let lines = tmux.wait_until(|lines| count(lines, "stopped by a signal") == 1);
    assert_eq!((count(&lines, "llama"), count(&lines, "tokens/s  ")), (1, 1), "{lines:#?}");
    assert_eq!(count(&lines, "^C"), 0, "{lines:#?}");
}

#[test]
fn the_display_stays_out_of_the_scrollback_below_other_text() {
    let folder = folder();
    let script = format!("seq 30; {}", endless());
    let Some(tmux) = Tmux::start(folder.path(), [80, 24], &script) else { return };
    // The window scrolls until the display has all its lines.
    tmux.wait_until(has_whole_display);
    let before = tmux.scrolled();
    std::thread::sleep(SEVERAL_FRAMES);
    assert_eq!(tmux.scrolled(), before, "{:#?}", tmux.lines());
    assert!(tmux.lines().starts_with(&(1..=30).map(|line| line.to_string()).collect::<Vec<_>>()));
}

#[test]
fn a_window_that_shrinks_and_grows_has_no_frame_in_the_scrollback_for_each_redraw() {
    let folder = folder();
    let Some(tmux) = Tmux::start(folder.path(), [80, 24], &endless()) else { return };
    tmux.wait_until(has_whole_display);
    for size in [[80, 10], [50, 10], [120, 30], [60, 6], [80, 24]] {
        tmux.resize(size);
        // A busy machine may draw the first frame of this size late.
        let is_still = || {
            let before = tmux.scrolled();
            std::thread::sleep(SEVERAL_FRAMES / 2);
            tmux.scrolled() == before
        };
        assert!((0..20).any(|_| is_still()), "at {size:?}: {:#?}", tmux.lines());
    }
    // When a window becomes narrower, tmux itself wraps the lines of the display and moves lines that no
    // longer fit. The window has become narrower twice.
    let lines = tmux.lines();
    assert!(count(&lines, "llama") <= 3 && has_whole_display(&lines[lines.len() - 13..]), "{lines:#?}");
}
