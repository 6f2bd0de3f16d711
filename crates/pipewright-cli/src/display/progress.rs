//! [`Terminal`]: shows what a run reports, as a live display, as plain lines, or not at all.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use pipewright::pipeline::UndeferredParameter;
use pipewright::train::{CheckpointChoice, Metrics};
use pipewright_system::machine_memory::most_bytes;

use crate::display::frame::header_text;
use crate::display::lines::Lines;
use crate::display::live::Live;
use crate::display::screen::is_quiet;
use crate::display::screen::{self, say};
use crate::display::summary::{Tally, summary};
use crate::display::{checkpoint_choice, undeferred};
use crate::{exhaustion, failure, signal};
use pipewright_run::error::RunError;
use pipewright_run::interrupt::Interrupt;
use pipewright_run::observer::{Ending, Observer, Overview};

/// The receiver of what a run reports. It also ends the run with a checkpoint when a signal arrives.
#[derive(Default)]
pub(crate) struct Terminal {
    /// The display of the run's steps.
    display: Mutex<Option<Display>>,
    /// Whether the process watches for signals.
    is_watching: AtomicBool,
}

impl Terminal {
    /// Returns a receiver for a run.
    pub(crate) fn shared() -> Arc<Self> {
        Arc::default()
    }

    fn show(&self, show: impl FnOnce(&mut Display)) {
        if let Some(display) = &mut *self.display.lock().unwrap_or_else(PoisonError::into_inner) {
            show(display);
        }
    }
}

impl Observer for Terminal {
    fn note(&self, sentence: &str) {
        say(sentence);
    }

    fn before_ranks(&self) {
        exhaustion::watch_run(most_bytes());
    }

    fn begin(&self, overview: &Overview, done: u64, steps: u64) {
        let display = Display::new(overview.clone(), done, steps);
        *self.display.lock().unwrap_or_else(PoisonError::into_inner) = Some(display);
    }

    fn watch(&self, interrupt: &Interrupt, is_leader: bool) -> io::Result<()> {
        if self.is_watching.swap(true, Ordering::SeqCst) {
            return Ok(());
        }
        signal::watch(interrupt)?;
        if is_leader { signal::say_first(interrupt) } else { Ok(()) }
    }

    fn step(&self, metrics: &Metrics, undeferred: &[UndeferredParameter]) {
        self.show(|display| {
            display.step(metrics);
            display.note_undeferred(undeferred);
        });
    }

    fn evaluation(&self, metrics: &Metrics) {
        self.show(|display| display.evaluation(metrics));
    }

    fn checkpoint_interval(&self, choice: CheckpointChoice) {
        say(&checkpoint_choice::sentence(choice));
    }

    fn end_steps(&self) {
        self.show(Display::finish);
    }

    fn end(&self, ending: &Ending<'_>) {
        self.show(|display| display.summarize(ending));
    }

    fn failed(&self, error: &RunError) {
        failure::report(error);
    }
}

/// The display of the steps of an attempt.
struct Display {
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
    fn new(overview: Overview, done: u64, steps: u64) -> Self {
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

    /// Shows a finished step.
    fn step(&mut self, metrics: &Metrics) {
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
    fn evaluation(&mut self, metrics: &Metrics) {
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
    fn note_undeferred(&self, found: &[UndeferredParameter]) {
        if let Some(note) = undeferred::note(&self.overview, found) {
            say(&note);
        }
    }

    /// Ends the live display after the last step. Its last frame stays on the terminal.
    fn finish(&mut self) {
        if let Kind::Live(live) = &mut self.kind {
            live.finish();
        }
    }

    /// Prints the summary of the run.
    fn summarize(&self, ending: &Ending<'_>) {
        say(&summary(&self.overview, &self.tally, ending, screen::columns()));
    }
}
