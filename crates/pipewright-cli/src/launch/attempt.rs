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

/// How a launcher has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AttemptEnd {
    /// The launcher's status.
    pub(crate) status: ExitStatus,
    /// The time after which it was ended because its processes had not joined each other.
    pub(crate) late: Option<Duration>,
    /// The time after which its processes had joined each other, if they had.
    pub(crate) joined: Option<Duration>,
}

/// When the processes have joined each other.
pub(crate) struct Joining<F> {
    /// Returns whether they have.
    pub(crate) is_done: F,
    /// The longest time that it may take; `None` if it may take any time.
    pub(crate) limit: Option<Duration>,
}

/// Starts the launcher and waits for its end. If a signal asks for the end of the run, or `is_replaced` does,
/// the processes save a checkpoint and end. If `first_cause` is written and the launcher does not end, it is
/// ended. So is one whose processes do not join each other in time, at once.
pub(crate) fn run<F: Fn() -> bool>(
    command: &mut Command,
    first_cause: &Path,
    joining: &Joining<F>,
    stop: &Stop,
    mut is_replaced: impl FnMut() -> bool,
) -> io::Result<AttemptEnd> {
    // The terminal sends Ctrl-C to this process alone, so that the processes can save a checkpoint.
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(command, 0);
    let mut child = command.spawn()?;
    let begun = Instant::now();
    let (mut is_stopping, mut is_ending, mut failed) = (false, false, None);
    let (mut joined, mut late) = (None, None);
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(AttemptEnd { status, late, joined });
        }
        if (stop.is_asked() || is_replaced()) && !std::mem::replace(&mut is_stopping, true) {
            // Launchers pass this signal on to their processes, and do not end them.
            send(&child, Signal::USR1);
        }
        if failed.is_none() && first_cause.exists() {
            failed = Some(Instant::now());
        }
        if joined.is_none() && (joining.is_done)() {
            joined = Some(begun.elapsed());
        }
        if joined.is_none() && failed.is_none() {
            late = joining.limit.filter(|limit| begun.elapsed() > *limit);
            failed = late.map(|_| Instant::now());
        }
        let waited = failed.map_or(Duration::ZERO, |failed: Instant| failed.elapsed());
        // A launcher whose processes are late does not know of a failure, and does not end them by itself.
        let grace = if late.is_some() { Duration::ZERO } else { GRACE };
        // A second signal would interrupt the launcher while it ends its processes.
        if waited > grace && !std::mem::replace(&mut is_ending, true) {
            send(&child, Signal::TERM);
        }
        if waited > grace + LAST_GRACE {
            child.kill()?;
        }
        std::thread::sleep(PAUSE);
    }
}

fn send(child: &Child, signal: Signal) {
    // The process may have ended, which the next look shows.
    let _ = kill_process(Pid::from_child(child), signal);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `sleep` for a time, with processes that join each other or do not.
    fn check(seconds: &str, has_joined: bool, limit: Option<Duration>, expected: Option<Duration>) {
        let joining = Joining { is_done: || has_joined, limit };
        let begun = Instant::now();
        let mut command = Command::new("sleep");
        let end = run(command.arg(seconds), Path::new("no fault"), &joining, &Stop::default(), || false);
        let end = end.expect("sleep is everywhere");
        assert_eq!(end.late, expected, "{seconds} {has_joined}");
        assert_eq!(end.status.success(), expected.is_none(), "{seconds} {has_joined}: {}", end.status);
        assert_eq!(end.joined.is_some(), has_joined, "{seconds}");
        assert!(begun.elapsed() < GRACE, "a launcher that is late has no time to end by itself");
    }

    #[test]
    fn a_launcher_whose_processes_do_not_come_is_ended() {
        let limit = Some(Duration::from_millis(100));
        check("0.4", true, limit, None);
        check("0.01", false, limit, None);
        check("0.4", false, None, None);
        check("60", false, limit, limit);
    }
}
