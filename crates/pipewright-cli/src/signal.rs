//! Signals that ask the process to end: the first is noted, the second ends it at once, below what the display shows.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::{flag, low_level};

use crate::display::screen;

/// What a shell adds to a signal's number for the exit code of a process that it ended.
const ENDED_BY_SIGNAL: i32 = 128;

/// Whether the process was asked to end.
#[derive(Debug, Default)]
pub(crate) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// The flag that a signal raises.
    pub(crate) fn flag(&self) -> Arc<AtomicBool> {
        self.0.clone()
    }

    /// Watches for SIGINT and SIGTERM from here on; before, they end the process.
    ///
    /// # Errors
    /// When the system refuses.
    pub(crate) fn watch(&self) -> io::Result<()> {
        for signal in [SIGINT, SIGTERM] {
            let is_raised = self.flag();
            let end = move || {
                if is_raised.load(Ordering::SeqCst) {
                    screen::leave_from_signal_handler();
                    low_level::exit(ENDED_BY_SIGNAL + signal);
                }
            };
            // In this order: the first signal finds the flag down, and raises it.
            // SAFETY: the action reads atomics, writes to a file descriptor and ends the process at once; it takes no
            // lock and no memory.
            unsafe { low_level::register(signal, end) }?;
            flag::register(signal, self.flag())?;
        }
        Ok(())
    }
}
