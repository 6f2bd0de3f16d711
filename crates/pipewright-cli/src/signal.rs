//! Signals that ask the process to end: SIGINT, SIGTERM, and SIGHUP, which a closed terminal sends. The first
//! signal sets a flag. A second SIGINT or SIGTERM ends the process immediately, with the cursor below the
//! live display, unless the run has ended and the process is about to end by itself: `srun` sends SIGTERM to the
//! other processes as soon as one has ended, and the exit code would no longer say that the run was saved.
//!
//! SIGUSR1, which `launch` sends through `mpirun` or `srun`, sets the flag too.
//!
//! SIGHUP never ends the process immediately: a shell may send it again when its terminal is closed. A
//! process that was started with SIGHUP ignored, by `nohup` for example, continues to ignore it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::{flag, low_level};

use crate::display::screen;

/// The number that a shell adds to a signal's number to form the exit code of a process that the signal
/// ended.
const ENDED_BY_SIGNAL: i32 = 128;

/// Whether the process was asked to end.
#[derive(Debug, Default)]
pub(crate) struct Interrupt {
    flag: Arc<AtomicBool>,
    /// Whether the process watches for the signals.
    is_watching: AtomicBool,
    /// Whether the run has ended.
    has_ended: Arc<AtomicBool>,
}

impl Interrupt {
    /// Returns the flag that a signal sets.
    pub(crate) fn flag(&self) -> Arc<AtomicBool> {
        self.flag.clone()
    }

    /// Asks the process to end, as a signal does.
    pub(crate) fn request(&self) {
        self.flag.store(true, Ordering::SeqCst);
    }

    /// Notes that the run has ended. From now on, no signal ends the process immediately.
    pub(crate) fn note_end(&self) {
        self.has_ended.store(true, Ordering::SeqCst);
    }

    /// Starts to watch for the signals. Before this call, they end the process. Further calls do nothing.
    ///
    /// # Errors
    /// Fails if the system refuses.
    pub(crate) fn watch(&self) -> io::Result<()> {
        if self.is_watching.swap(true, Ordering::SeqCst) {
            return Ok(());
        }
        let is_asked = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            let (was_asked, has_ended) = (is_asked.clone(), self.has_ended.clone());
            let end = move || {
                if was_asked.swap(true, Ordering::SeqCst) && !has_ended.load(Ordering::SeqCst) {
                    screen::leave_from_signal_handler();
                    low_level::exit(ENDED_BY_SIGNAL + signal);
                }
            };
            // SAFETY: the action reads atomics, writes to a file descriptor and ends the process. It does not
            // lock or allocate.
            unsafe { low_level::register(signal, end) }?;
            flag::register(signal, self.flag())?;
        }
        #[cfg(unix)]
        if !hangup::is_ignored() {
            flag::register(signal_hook::consts::SIGHUP, self.flag())?;
        }
        // Launchers of processes pass this signal on without ending the processes.
        #[cfg(unix)]
        flag::register(signal_hook::consts::SIGUSR1, self.flag())?;
        Ok(())
    }
}

/// The signal SIGHUP.
#[cfg(unix)]
mod hangup {
    use std::mem::MaybeUninit;
    use std::ptr;

    /// Returns whether this process ignores the signal.
    pub(super) fn is_ignored() -> bool {
        let mut action = MaybeUninit::<libc::sigaction>::uninit();
        // SAFETY: a null pointer asks for the present action without changing it, and the result is read only
        // if the call has filled it in.
        unsafe {
            libc::sigaction(libc::SIGHUP, ptr::null(), action.as_mut_ptr()) == 0
                && action.assume_init().sa_sigaction == libc::SIG_IGN
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_signal_ends_a_process_whose_run_has_ended() {
        let interrupt = Interrupt::default();
        interrupt.watch().expect("the system has signals");
        interrupt.note_end();
        // The second one would end the process of all tests.
        for _ in 0..3 {
            low_level::raise(SIGTERM).expect("the signal exists");
        }
        assert!(interrupt.flag().load(Ordering::SeqCst));
    }
}
