//! Runs the launcher of processes once, and watches it.

use std::io;
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;

use crate::failure::{Exit, Failure};
use crate::launch::watch::{Early, Limits, Order, Seen, Watch};

/// The time between two looks at the processes.
const PAUSE: Duration = Duration::from_millis(20);

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
    pub(super) status: ExitStatus,
    /// Why it was ended, if no process had left a fault.
    pub(super) early: Option<Early>,
    /// The time after which its processes had joined each other, if they had.
    pub(super) joined: Option<Duration>,
}

/// Starts the launcher and waits for its end. `see` returns the state of its processes, and whether they should save
/// a checkpoint and end, as after a signal. [`Watch`] decides when the launcher is ended.
///
/// # Errors
/// Fails if the launcher cannot be started, or cannot be ended.
pub(super) fn run(
    command: &mut Command,
    limits: Limits,
    stop: &Stop,
    mut see: impl FnMut() -> (Seen, bool),
) -> Result<AttemptEnd, Failure> {
    // The terminal sends Ctrl-C to this process alone, so that the processes can save a checkpoint.
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(command, 0);
    let program = command.get_program().display().to_string();
    let refused = |error: io::Error| Failure::input(format!("{program} cannot be started: {error}"));
    let mut child = command.spawn().map_err(refused)?;
    let (mut watch, mut last, mut is_stopping) = (Watch::new(limits), Instant::now(), false);
    loop {
        if let Some(status) = child.try_wait().map_err(refused)? {
            return Ok(AttemptEnd { status, early: watch.early(), joined: watch.joined() });
        }
        let (seen, is_asked) = see();
        if (stop.is_asked() || is_asked) && !std::mem::replace(&mut is_stopping, true) {
            // Launchers pass this signal on to their processes, and do not end them.
            send(&child, Signal::USR1);
        }
        let seen = Seen { is_stopped: is_stopped(&child), ..seen };
        let passed = std::mem::replace(&mut last, Instant::now()).elapsed();
        match watch.look(passed, seen) {
            Order::Wait => {}
            Order::End => send(&child, Signal::TERM),
            Order::Kill => send(&child, Signal::KILL),
            Order::GiveUp => {
                return Err(Failure::new(
                    Exit::RankFailed,
                    format!(
                        "{program} (process {}) was killed and does not end: end it, then resume",
                        child.id()
                    ),
                ));
            }
        }
        std::thread::sleep(PAUSE);
    }
}

fn send(child: &Child, signal: Signal) {
    // The process may have ended, which the next look shows.
    let _ = kill_process(Pid::from_child(child), signal);
}

/// Returns whether a process is stopped by a signal.
fn is_stopped(child: &Child) -> bool {
    let what = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    waitid(WaitId::Pid(Pid::from_child(child)), what).is_ok_and(|status| status.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::watch::GRACE;

    /// Starts a shell with `text`, whose processes join each other or do not. Checks why it is ended, and that it is.
    fn check(text: &str, has_joined: bool, milliseconds: u64, expected: impl Fn(Duration) -> Option<Early>) {
        let limit = Duration::from_millis(milliseconds);
        let limits = Limits { joining: limit, silence: limit, stopped: limit };
        let seen = Seen { has_joined, ..Seen::default() };
        let begun = Instant::now();
        let mut command = Command::new("sh");
        let end = run(command.args(["-c", text]), limits, &Stop::default(), || (seen, false));
        let end = end.expect("a shell is everywhere");
        let expected = expected(limit);
        assert_eq!(
            (end.early, end.status.success()),
            (expected, expected.is_none()),
            "{text}: {}",
            end.status
        );
        assert_eq!(end.joined.is_some(), has_joined, "{text}");
        assert!(begun.elapsed() < GRACE, "a launcher that is late has no time to end by itself");
    }

    #[test]
    fn a_launcher_whose_processes_do_not_come_is_ended() {
        check("sleep 0.4", true, 100, |_| None);
        check("sleep 0.01", false, 60_000, |_| None);
        check("exec sleep 60", false, 100, |limit| Some(Early::Late(limit)));
    }

    #[test]
    fn a_launcher_that_is_stopped_is_killed() {
        check("kill -STOP $$", true, 100, |limit| Some(Early::Stopped(limit)));
        check("(sleep 0.1; kill -CONT $$) & kill -STOP $$", true, 60_000, |_| None);
    }
}
