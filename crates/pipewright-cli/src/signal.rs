//! Signals that ask the process to end: the first is noted, the second ends it at once.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

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
            // In this order: the first signal finds the flag down, and raises it.
            flag::register_conditional_shutdown(signal, ENDED_BY_SIGNAL + signal, self.flag())?;
            flag::register(signal, self.flag())?;
        }
        Ok(())
    }
}
