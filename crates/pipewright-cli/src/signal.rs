//! Signals that ask the process to end: SIGINT, SIGTERM, and SIGHUP, which a closed terminal sends. The first
//! signal sets a flag. A second SIGINT or SIGTERM ends the process immediately, with the cursor below the
//! live display, unless the run has ended and the process is about to end by itself: `srun` sends SIGTERM to the
//! other processes as soon as one has ended, and the exit code would no longer say that the run was saved.
//!
//! SIGUSR1, which `launch` sends through `mpirun` or `srun`, sets the flag too.
//!
//! A run prints the name of the first signal at once, above the live display: the step that runs may take
//! long. A thread of its own prints it, because a signal handler must not lock the screen.
//!
//! SIGHUP never ends the process immediately: a shell may send it again when its terminal is closed. A
//! process that was started with SIGHUP ignored, by `nohup` for example, continues to ignore it.

use std::io::{self, PipeReader, PipeWriter, Read};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pipewright_planning::screen;
use pipewright_planning::screen::say;
use pipewright_run::interrupt::Interrupt;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGXFSZ};
use signal_hook::{flag, low_level};

/// Lets a write beyond the limit on the size of files (`ulimit -f`) fail with an error, which says which file it is,
/// instead of ending the process. Programs that this one starts have the usual behaviour.
pub(crate) fn outlive_limits() {
    // If the system refuses, the signal ends the process.
    let _ = flag::register(SIGXFSZ, Arc::default());
}

/// Lets SIGUSR1, with which a launch asks for the end, set a flag from now on instead of ending the process. Otherwise the
/// processes that already watch for signals would report the loss of this one.
pub(crate) fn keep_request() -> Arc<AtomicBool> {
    let is_asked = Arc::default();
    // If the system refuses, the signal ends the process.
    let _ = flag::register(SIGUSR1, Arc::clone(&is_asked));
    is_asked
}

/// The number that a shell adds to a signal's number to form the exit code of a process that the signal
/// ended.
const ENDED_BY_SIGNAL: i32 = 128;

/// Starts to watch for the signals, which ask for the end. Before this call, they end the process.
///
/// # Errors
/// Fails if the system refuses.
pub(crate) fn watch(interrupt: &Interrupt) -> io::Result<()> {
    let is_asked = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        let (was_asked, interrupt) = (is_asked.clone(), interrupt.clone());
        let end = move || {
            if was_asked.swap(true, Ordering::SeqCst) && !interrupt.has_ended() {
                screen::leave_from_signal_handler();
                low_level::exit(ENDED_BY_SIGNAL + signal);
            }
        };
        // SAFETY: the action reads atomics, writes to a file descriptor and ends the process. It does not
        // lock or allocate.
        unsafe { low_level::register(signal, end) }?;
    }
    watched().try_for_each(|signal| flag::register(signal, interrupt.flag()).map(drop))
}

/// Prints the name of the first signal.
///
/// # Errors
/// Fails if the system refuses.
pub(crate) fn say_first(interrupt: &Interrupt) -> io::Result<()> {
    let (names, writer) = io::pipe()?;
    let writer = Arc::new(writer);
    for signal in watched() {
        let writer = writer.clone();
        // SAFETY: the action writes to a file descriptor that stays open. It does not lock or allocate.
        unsafe { low_level::register(signal, move || send(&writer, signal)) }?;
    }
    let interrupt = interrupt.clone();
    let thread = std::thread::Builder::new().name("signals".to_owned());
    thread.spawn(move || read_first(names, &interrupt)).map(drop)
}

/// Returns the signals that ask the process to end. Launchers of processes pass SIGUSR1 on without ending the
/// processes.
fn watched() -> impl Iterator<Item = i32> {
    let hangup = (!ignores_hangup()).then_some(SIGHUP);
    [SIGINT, SIGTERM, SIGUSR1].into_iter().chain(hangup)
}

/// Returns whether this process ignores SIGHUP.
fn ignores_hangup() -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: a null pointer asks for the present action without changing it, and the result is read only if the
    // call has filled it in.
    unsafe {
        libc::sigaction(SIGHUP, ptr::null(), action.as_mut_ptr()) == 0
            && action.assume_init().sa_sigaction == libc::SIG_IGN
    }
}

/// Sends a signal's number to the thread that prints its name. A signal handler calls it.
fn send(writer: &PipeWriter, signal: i32) {
    // Only the first number is read. If it cannot be written, the run ends without the sentence.
    let _ = rustix::io::write(writer.as_fd(), &[signal as u8]);
}

/// Waits for the first signal and prints its name, unless the run has ended.
fn read_first(mut names: PipeReader, interrupt: &Interrupt) {
    let mut number = [0];
    if names.read_exact(&mut number).is_err() || interrupt.has_ended() {
        return;
    }
    let name = low_level::signal_name(number[0].into()).unwrap_or("a signal");
    say(&format!(
        "{name} has arrived: the run ends with a checkpoint as soon as the step or the batch of an evaluation that is \
         under way has ended; a second SIGINT or SIGTERM ends it at once, without a checkpoint"
    ));
}

#[cfg(test)]
mod tests {
    use pipewright_run::observer::Observer;

    use super::*;
    use crate::terminal::Terminal;

    #[test]
    fn a_request_of_a_launch_counts_before_the_steps_begin() {
        let (terminal, interrupt) = (Terminal::of_training(), Interrupt::default());
        low_level::raise(SIGUSR1).expect("the signal exists");
        // The signals of the other test would end the process otherwise.
        interrupt.note_end();
        terminal.watch(&interrupt, false).expect("the system has signals");
        assert!(interrupt.is_requested());
    }

    #[test]
    fn no_signal_ends_a_process_whose_run_has_ended() {
        let interrupt = Interrupt::default();
        watch(&interrupt).expect("the system has signals");
        interrupt.note_end();
        // The second one would end the process of all tests.
        for _ in 0..3 {
            low_level::raise(SIGTERM).expect("the signal exists");
        }
        assert!(interrupt.is_requested());
    }
}
