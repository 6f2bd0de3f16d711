//! Runs long work without the interpreter's lock, so that other threads of Python run meanwhile and Ctrl-C
//! ends the call.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use pipewright_schedule::error_text::panic_message;
use pyo3::prelude::*;

use crate::errors::internal;

/// The time between two looks for signals. A result that is ready before is returned at once.
const POLL: Duration = Duration::from_millis(50);

/// Whether the call that waits for some work was interrupted.
#[derive(Debug, Clone, Default)]
pub(crate) struct Interrupted(Arc<AtomicBool>);

impl Interrupted {
    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Returns the result of `work`, which runs on a thread of its own without the interpreter's lock.
///
/// If a signal's handler raises an exception, such as `KeyboardInterrupt`, this returns it at once. Work that
/// asks [`Interrupted::is_set`] then stops; other work runs to its end, and its result is dropped.
pub(crate) fn interruptible<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce(&Interrupted) -> T + Send + 'static,
) -> PyResult<T> {
    let interrupted = Interrupted::default();
    let (sender, mut receiver) = channel();
    let seen = interrupted.clone();
    let run = move || {
        let result = catch_unwind(AssertUnwindSafe(|| work(&seen)));
        // Nobody receives the result of an interrupted call.
        let _unsent = sender.send(result);
    };
    thread::Builder::new().name("pipewright".to_owned()).spawn(run)?;
    loop {
        let (returned, received) = py.detach(move || wait(receiver));
        receiver = returned;
        match received {
            Ok(Ok(result)) => return Ok(result),
            Ok(Err(panic)) => return Err(internal(py, &panic_message(panic.as_ref()))),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(internal(py, "the work ended without a result"));
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
        if let Err(error) = py.check_signals() {
            interrupted.0.store(true, Ordering::Relaxed);
            return Err(error);
        }
    }
}

/// Waits for a result, and gives the receiver back.
fn wait<T>(receiver: Receiver<T>) -> (Receiver<T>, Result<T, RecvTimeoutError>) {
    let received = receiver.recv_timeout(POLL);
    (receiver, received)
}
