//! Runs the launcher of processes once, and watches it.

use std::io;
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;

/// The time between two looks at the processes.
const PAUSE: Duration = Duration::from_millis(20);
/// The time that the launcher has to end the remaining processes after the first failure. It takes about five
/// seconds to end a process that is stopped.
const GRACE: Duration = Duration::from_secs(8);
/// The time between a request to end and the end by force.
const LAST_GRACE: Duration = Duration::from_secs(3);

/// Whether this process was asked to end the run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Starts to watch for the signals that end a run.
    pub(crate) fn watch() -> io::Result<Self> {
        let stop = Self::default();
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            // A second signal ends this process, and the processes end by themselves.
            flag::register_conditional_shutdown(signal, 128 + signal, stop.0.clone())?;
            flag::register(signal, stop.0.clone())?;
        }
        Ok(stop)
    }

    /// Asks for the end as a signal does.
    pub(crate) fn request(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// Returns whether a signal has come.
    pub(crate) fn is_asked(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// Starts the launcher and waits for its end. If a signal asks for the end of the run, or `is_replaced` does,
/// the processes save a checkpoint and end. If `first_cause` is written and the launcher does not end, it is
/// ended.
pub(crate) fn run(
    command: &mut Command,
    first_cause: &Path,
    stop: &Stop,
    mut is_replaced: impl FnMut() -> bool,
) -> io::Result<ExitStatus> {
    // The terminal sends Ctrl-C to this process alone, so that the processes can save a checkpoint.
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(command, 0);
    let mut child = command.spawn()?;
    let (mut is_stopping, mut is_ending, mut failed) = (false, false, None);
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if (stop.is_asked() || is_replaced()) && !std::mem::replace(&mut is_stopping, true) {
            // Launchers pass this signal on to their processes, and do not end them.
            send(&child, Signal::USR1);
        }
        if failed.is_none() && first_cause.exists() {
            failed = Some(Instant::now());
        }
        let waited = failed.map_or(Duration::ZERO, |failed: Instant| failed.elapsed());
        // A second signal would interrupt the launcher while it ends its processes.
        if waited > GRACE && !std::mem::replace(&mut is_ending, true) {
            send(&child, Signal::TERM);
        }
        if waited > GRACE + LAST_GRACE {
            child.kill()?;
        }
        std::thread::sleep(PAUSE);
    }
}

fn send(child: &Child, signal: Signal) {
    // The process may have ended, which the next look shows.
    let _ = kill_process(Pid::from_child(child), signal);
}
