//! Signals that ask the process to end. The first signal sets a flag; the second ends the process immediately, with the
//! cursor below the live display.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::{flag, low_level};

use crate::display::screen;

/// The number that a shell adds to a signal's number to form the exit code of a process that the signal ended.
const ENDED_BY_SIGNAL: i32 = 128;

/// Whether the process was asked to end.
#[derive(Debug, Default)]
pub(crate) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Returns the flag that a signal sets.
    pub(crate) fn flag(&self) -> Arc<AtomicBool> {
        self.0.clone()
    }

    /// Starts to watch for SIGINT and SIGTERM. Before this call, they end the process.
    ///
    /// # Errors
    /// Fails if the system refuses.
    pub(crate) fn watch(&self) -> io::Result<()> {
        for signal in [SIGINT, SIGTERM] {
            let is_raised = self.flag();
            let end = move || {
                if is_raised.load(Ordering::SeqCst) {
                    screen::leave_from_signal_handler();
                    low_level::exit(ENDED_BY_SIGNAL + signal);
                }
            };
            // The order of the two actions matters: the first signal finds the flag unset, and then sets it.
            // SAFETY: the action reads atomics, writes to a file descriptor and ends the process. It does not lock or
            // allocate.
            unsafe { low_level::register(signal, end) }?;
            flag::register(signal, self.flag())?;
        }
        Ok(())
    }
}
