//! The turns of the tests of this program: a test that measures does so while no other one uses a browser, the
//! binary, or processes.
//! Two threads of one core slow each other down, which also lengthens processor times.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

static TURNS: Mutex<Turns> = Mutex::new(Turns { shared: 0, alone: None });
static ENDED: Condvar = Condvar::new();

struct Turns {
    shared: usize,
    /// The thread that has the only turn.
    alone: Option<ThreadId>,
}

/// A turn that several tests may have.
pub(crate) struct SharedTurn(());

/// A turn in which only its thread begins shared ones.
pub(crate) struct OnlyTurn(());

impl SharedTurn {
    /// Begins a turn as soon as no other thread has the only one. A test may have several shared ones.
    pub(crate) fn begin() -> Self {
        let is_other = |turns: &mut Turns| turns.alone.is_some_and(|alone| alone != thread::current().id());
        wait_while(is_other).shared += 1;
        Self(())
    }
}

impl OnlyTurn {
    /// Begins a turn as soon as there is no other one.
    pub(crate) fn begin() -> Self {
        wait_while(|turns| turns.shared > 0 || turns.alone.is_some()).alone = Some(thread::current().id());
        Self(())
    }
}

impl Drop for SharedTurn {
    fn drop(&mut self) {
        turns().shared -= 1;
        ENDED.notify_all();
    }
}

impl Drop for OnlyTurn {
    fn drop(&mut self) {
        turns().alone = None;
        ENDED.notify_all();
    }
}

// A test that fails leaves the turns right.
fn turns() -> MutexGuard<'static, Turns> {
    TURNS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wait_while(condition: impl FnMut(&mut Turns) -> bool) -> MutexGuard<'static, Turns> {
    ENDED.wait_while(turns(), condition).unwrap_or_else(PoisonError::into_inner)
}
