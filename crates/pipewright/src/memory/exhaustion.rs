//! A handler for failed allocations.
//!
//! An allocation that fails cannot unwind, and most callers then abort the process. A program can report the
//! failure first: it registers a function with [`on_exhaustion`], which is called on the thread whose
//! allocation failed.

use std::cell::Cell;
use std::fmt;
use std::sync::OnceLock;
use std::time::Duration;

use super::count::{RankPosition, of_this_thread};
use crate::ids::StepNumber;

/// An allocation that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exhaustion {
    /// Bytes that were asked for.
    pub bytes: usize,
    /// The rank that made the request, and its position; `None` if no rank made it.
    pub place: Option<RankPosition>,
    /// Bytes that the rank holds.
    pub held: u64,
}

/// Prints, for example, `step 3: rank 1, stage 1, microbatch 0, action 1F0: no memory is left: ...`. A rank
/// that runs no action makes its stages before step 1, and updates them after its last action of a step.
impl fmt::Display for Exhaustion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(RankPosition { rank, step, action }) = self.place {
            write!(f, "step {step}: rank {rank}")?;
            match action {
                Some(action) => {
                    write!(f, ", stage {}", action.stage())?;
                    if let Some(microbatch) = action.microbatch() {
                        write!(f, ", microbatch {microbatch}")?;
                    }
                    write!(f, ", action {action}")?;
                }
                None if step == StepNumber::default() => f.write_str(", while its stages are made")?,
                None => {
                    f.write_str(", after its last action: in the update or in a copy for a checkpoint")?;
                }
            }
            f.write_str(": ")?;
        }
        write!(f, "no memory is left: {} bytes were asked for", self.bytes)?;
        match self.place {
            Some(_) => write!(f, ", and the rank holds {} bytes", self.held),
            None => Ok(()),
        }
    }
}

static HANDLER: OnceLock<fn(&Exhaustion) -> !> = OnceLock::new();

/// Set by the first thread whose allocation fails.
static FIRST: OnceLock<()> = OnceLock::new();

thread_local! {
    /// Whether this thread is in the handler.
    static REPORTING: Cell<bool> = const { Cell::new(false) };
}

/// Registers a function that is called when [`TrackingAllocator`](super::TrackingAllocator) gets no memory.
/// Only the first registered function is used. It is called once, on the thread that requested the memory,
/// and ends the process. Its own allocations may fail, so it should not allocate. Other threads whose
/// allocations fail meanwhile sleep.
///
/// If the system kills the process, for example because it exceeds its control group's limit, the function is
/// not called. A limit that is not above the system's prevents that ([`limit_memory`](super::limit_memory)).
pub fn on_exhaustion(handler: fn(&Exhaustion) -> !) {
    let _ = HANDLER.set(handler);
}

/// Calls the handler if there is one.
pub(super) fn report(bytes: usize) {
    let Some(handler) = HANDLER.get() else { return };
    // The handler's own allocation has failed.
    if REPORTING.replace(true) {
        return;
    }
    if FIRST.set(()).is_err() {
        // The thread that failed first is about to end the process.
        loop {
            std::thread::sleep(Duration::from_secs(1));
        }
    }
    let count = of_this_thread();
    let place = count.as_ref().and_then(|count| count.place());
    let held = count.as_ref().map_or(0, |count| count.held());
    handler(&Exhaustion { bytes, place, held });
}
