//! The `--quiet` flag: if it is given, only errors are written to standard error.
//!
//! The flag is global because standard error belongs to the whole process.

use std::sync::atomic::{AtomicBool, Ordering};

static IS_QUIET: AtomicBool = AtomicBool::new(false);

/// Sets the flag.
pub(crate) fn set(is_quiet: bool) {
    IS_QUIET.store(is_quiet, Ordering::Relaxed);
}

/// Returns the flag.
pub(crate) fn is_quiet() -> bool {
    IS_QUIET.load(Ordering::Relaxed)
}
