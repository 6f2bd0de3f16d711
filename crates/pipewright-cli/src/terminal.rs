//! [`Terminal`]: shows what a run reports, and ends the run with a checkpoint when a signal arrives.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pipewright::pipeline::UndeferredParameter;
use pipewright::train::{CheckpointChoice, Metrics};
use pipewright_planning::failure;
use pipewright_planning::plans::print::span;
use pipewright_planning::screen::say;
use pipewright_run::error::RunError;
use pipewright_run::interrupt::Interrupt;
use pipewright_run::observer::{Ending, Observer, Overview};
use pipewright_schedule::words::counted;
use pipewright_system::machine_memory::most_bytes;

use crate::display::{Display, milliseconds};
use crate::{exhaustion, signal};

/// The receiver of what a run reports.
#[derive(Default)]
pub(crate) struct Terminal {
    /// The display of the run's steps.
    display: Mutex<Option<Display>>,
    /// Whether the process watches for signals.
    is_watching: AtomicBool,
    /// Whether a launch has asked for the end of the run before the process watches for signals.
    is_asked_early: Arc<AtomicBool>,
}

impl Terminal {
    /// Returns a receiver for a run.
    pub(crate) fn shared() -> Arc<Self> {
        Arc::default()
    }

    /// Like [`Terminal::shared`], for a run that this process trains, perhaps with others that a launch has started.
    pub(crate) fn of_training() -> Arc<Self> {
        Arc::new(Self { is_asked_early: signal::keep_request(), ..Self::default() })
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
        let mut display = self.display.lock().unwrap_or_else(PoisonError::into_inner);
        // A display that ends closes the screen, so the display of an earlier attempt ends before the next one begins.
        *display = None;
        *display = Some(Display::new(overview.clone(), done, steps));
    }

    fn watch(&self, interrupt: &Interrupt, is_leader: bool) -> io::Result<()> {
        if self.is_watching.swap(true, Ordering::SeqCst) {
            return Ok(());
        }
        signal::watch(interrupt)?;
        if self.is_asked_early.load(Ordering::SeqCst) {
            interrupt.request();
        }
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
        say(&sentence(choice));
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

/// Says what was chosen and why.
fn sentence(choice: CheckpointChoice) -> String {
    let CheckpointChoice { steps, cost, step, written_in, between_failures } = choice;
    let ms = |span: Duration| milliseconds(span.as_secs_f64() * 1e3);
    let reason = if written_in > 0 && steps == written_in + 1 {
        format!(", and it is written during {}", counted(written_in, "step"))
    } else {
        String::new()
    };
    format!(
        "checkpoints: every {}: one adds {} to steps of {}, a failure is expected every {}{reason}",
        if steps == 1 { "step".to_owned() } else { counted(steps, "step") },
        ms(cost),
        ms(step),
        span(between_failures.as_secs_f64() / 86_400.0),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_has_its_reasons() {
        let choice = CheckpointChoice {
            steps: 268,
            cost: Duration::from_millis(100),
            step: Duration::from_millis(100),
            written_in: 2,
            between_failures: Duration::from_secs(3600),
        };
        let expected = "checkpoints: every 268 steps: one adds 100 ms to steps of 100 ms, a failure is expected every 1.00 hours";
        assert_eq!(sentence(choice), expected);
        let slow = sentence(CheckpointChoice { steps: 8, written_in: 7, ..choice });
        assert!(slow.ends_with(", and it is written during 7 steps"), "{slow}");
        let each = sentence(CheckpointChoice { steps: 1, written_in: 0, ..choice });
        assert!(each.starts_with("checkpoints: every step: ") && !each.contains("written"), "{each}");
    }
}
