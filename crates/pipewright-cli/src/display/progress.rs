//! The choice between live display, plain lines and silence.

use pipewright::train::Metrics;

use crate::display::frame::header_text;
use crate::display::lines::Lines;
use crate::display::live::Live;
use crate::display::overview::Overview;
use crate::display::screen::{self, say};
use crate::display::summary::{Ending, Tally, summary};
use crate::quiet::is_quiet;

/// The display of one run.
pub(crate) struct Display {
    kind: Kind,
    overview: Overview,
    tally: Tally,
}

enum Kind {
    /// On a terminal.
    Live(Live),
    /// In a log.
    Lines(Lines),
    /// Nowhere.
    Silent,
}

impl Display {
    /// A display for a run of `steps` steps, of which the first `done` are behind it.
    pub(crate) fn new(overview: Overview, done: u64, steps: u64) -> Self {
        let kind = if is_quiet() {
            Kind::Silent
        } else if screen::is_terminal() {
            Kind::Live(Live::new(&overview, done, steps))
        } else {
            say(&header_text(&overview));
            Kind::Lines(Lines::new(done, steps))
        };
        Self { kind, overview, tally: Tally::default() }
    }

    /// Shows a step that is done.
    pub(crate) fn step(&mut self, metrics: &Metrics) {
        self.tally.step(metrics);
        match &mut self.kind {
            Kind::Live(live) => live.step(metrics),
            Kind::Lines(lines) => {
                if let Some(line) = lines.step(metrics) {
                    say(&line);
                }
            }
            Kind::Silent => {}
        }
    }

    /// Leaves the last state where it is: the steps are over.
    pub(crate) fn finish(&mut self) {
        if let Kind::Live(live) = &mut self.kind {
            live.finish();
        }
    }

    /// Says what became of the run.
    pub(crate) fn summarize(&self, ending: &Ending<'_>) {
        say(&summary(&self.overview, &self.tally, ending));
    }
}
