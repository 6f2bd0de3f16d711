//! Turns a panic of the command into one sentence and an exit code.
//!
//! A panic of a stage is handled elsewhere: the runtime catches it on the rank's thread and reports it as a
//! failure of that rank.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use pipewright_schedule::error_text::panic_message;

use crate::failure::{Exit, Failure};

/// The place where the command's own thread panicked last. A process has one panic hook, so this is a static
/// variable.
static PLACE: Mutex<Option<String>> = Mutex::new(None);

/// Runs a command and turns a panic in it into a [`Failure`] with [`Exit::Bug`].
pub fn guard(command: impl FnOnce() -> Result<(), Failure>) -> Result<(), Failure> {
    let own_thread = std::thread::current().id();
    let standard = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if std::env::var_os("PIPEWRIGHT_BACKTRACE").is_some() {
            standard(info);
        }
        if std::thread::current().id() == own_thread {
            let place = info.location().map(ToString::to_string);
            *PLACE.lock().unwrap_or_else(PoisonError::into_inner) = place;
        }
    }));
    // `AssertUnwindSafe` holds because no data of the command is used after a panic.
    catch_unwind(AssertUnwindSafe(command)).unwrap_or_else(|payload| {
        let place = PLACE.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or_default();
        Err(bug(&place, payload.as_ref()))
    })
}

fn bug(place: &str, payload: &(dyn std::any::Any + Send)) -> Failure {
    let message = panic_message(payload).replace('\n', " ");
    let text = format!(
        "{place}: Pipewright has a bug: {message}; please report this sentence with the command that you typed, and \
         with what it prints when PIPEWRIGHT_BACKTRACE=1 is set"
    );
    Failure::new(Exit::Bug, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_a_sentence_that_says_where() {
        let failure = guard(|| panic!("one is {}", 2)).expect_err("it panicked");
        assert_eq!(failure.kind, Exit::Bug);
        let text = format!("{failure:?}");
        assert!(text.contains("panic.rs:") && text.contains("has a bug: one is 2; please report"), "{text}");
    }
}
