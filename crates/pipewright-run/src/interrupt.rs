//! [`Interrupt`]: the request to end a run with a checkpoint.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The request to end a run with a checkpoint, as soon as the step or the batch of an evaluation that is under way
/// has ended. Clones are the same request.
#[derive(Clone, Debug, Default)]
pub struct Interrupt {
    flag: Arc<AtomicBool>,
    has_ended: Arc<AtomicBool>,
}

impl Interrupt {
    /// Returns the flag of the request. A handler of signals may set it.
    pub fn flag(&self) -> Arc<AtomicBool> {
        self.flag.clone()
    }

    /// Asks for the end of the run.
    pub fn request(&self) {
        self.flag.store(true, Ordering::SeqCst);
    }

    /// Returns whether the end of the run is requested.
    pub fn is_requested(&self) -> bool {
        self.flag.load(Ordering::SeqCst)
    }

    /// Notes that the run has saved its last state, so that a request has no effect any more.
    pub fn note_end(&self) {
        self.has_ended.store(true, Ordering::SeqCst);
    }

    /// Returns whether the run has saved its last state.
    pub fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::SeqCst)
    }
}
