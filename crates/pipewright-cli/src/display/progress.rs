//! The choice between live display and plain lines.

use std::io::{IsTerminal, Write};

use pipewright::trainer::Metrics;

use crate::display::lines::Lines;
use crate::display::live::Live;
use crate::quiet::is_quiet;

/// The display of one run.
pub(crate) enum Display {
    /// On a terminal.
    Live(Live),
    /// In a log.
    Lines(Lines),
}

impl Display {
    /// A display for a run of `steps` steps, of which the first `done` are behind it.
    pub(crate) fn new(done: u64, steps: u64) -> Self {
        if std::io::stderr().is_terminal() && !is_quiet() {
            Self::Live(Live::new(done, steps))
        } else {
            Self::Lines(Lines::new(done, steps))
        }
    }

    /// Shows a step that is done.
    pub(crate) fn step(&mut self, metrics: &Metrics) {
        match self {
            Self::Live(live) => live.step(metrics),
            Self::Lines(lines) => {
                if let Some(line) = lines.step(metrics) {
                    say(&line);
                }
            }
        }
    }

    /// Leaves the last state where it is.
    pub(crate) fn finish(self) {
        if let Self::Live(live) = self {
            live.finish();
        }
    }
}

/// Tells a person something, on standard error, unless `--quiet` was given.
pub(crate) fn say(words: &str) {
    if is_quiet() {
        return;
    }
    // Nobody is left to tell when standard error is closed.
    let _ = writeln!(std::io::stderr().lock(), "{words}");
}
