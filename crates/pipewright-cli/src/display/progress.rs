//! The display of a run: a live display, plain lines, or nothing.

use pipewright::pipeline::UndeferredParameter;
use pipewright::train::Metrics;
use pipewright_planning::screen::{self, is_quiet, say};
use pipewright_run::observer::{Ending, Overview};

use crate::display::frame::header_text;
use crate::display::lines::Lines;
use crate::display::live::Live;
use crate::display::summary::{Tally, summary};
use crate::display::undeferred;

/// The display of the steps of an attempt.
pub(crate) struct Display {
    kind: Kind,
    overview: Overview,
    tally: Tally,
}

enum Kind {
    /// The live display, on a terminal.
    Live(Live),
    /// Plain lines, in a log.
    Lines(Lines),
    /// No output.
    Silent,
}

impl Display {
    /// Returns a display for a run of `steps` steps whose first `done` steps are finished.
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

    /// Shows the steps that another process has finished before.
    pub(crate) fn recall(&mut self, steps: &[Metrics]) {
        match &mut self.kind {
            Kind::Live(live) => live.recall(steps),
            Kind::Lines(lines) => lines.recall(steps).iter().for_each(|line| say(line)),
            Kind::Silent => {}
        }
    }

    /// Shows a finished step.
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

    /// Shows the results of an evaluation after an earlier step.
    pub(crate) fn evaluation(&mut self, metrics: &Metrics) {
        if let Kind::Live(live) = &mut self.kind {
            live.evaluation(metrics.validation_loss);
        }
        if let Some(loss) = metrics.validation_loss {
            let step = metrics.step;
            say(&format!(
                "step {step}  validation {loss:.4}  (the evaluation that the stop of the run left out)"
            ));
        }
    }

    /// Notes the parameters whose gradients cannot wait for `W`.
    pub(crate) fn note_undeferred(&self, found: &[UndeferredParameter]) {
        if let Some(note) = undeferred::note(&self.overview, found) {
            say(&note);
        }
    }

    /// Ends the live display after the last step. Its last frame stays on the terminal.
    pub(crate) fn finish(&mut self) {
        if let Kind::Live(live) = &mut self.kind {
            live.finish();
        }
    }

    /// Prints the summary of the run.
    pub(crate) fn summarize(&self, ending: &Ending<'_>) {
        say(&summary(&self.overview, &self.tally, ending, screen::columns()));
    }
}
