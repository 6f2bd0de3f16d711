//! The launcher of a start on this machine, and the processes of a run that it leaves behind when it is killed or they
//! are stopped.
//!
//! The environment of each process of a run has the start that made it ([`Start`]), with a name that no other launch
//! has. So the processes are found although neither their launcher nor the folder of the run is left.

use std::io;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use sysinfo::{Process, ProcessRefreshKind, ProcessesToUpdate, System, UpdateKind};

use crate::error::{ErrorKind, RunError};
use crate::fault::{LAUNCHED, Start};
use crate::launch::watch::Order;

/// The time between two looks at processes that were killed.
const PAUSE: Duration = Duration::from_millis(20);

/// A launcher that runs.
pub(super) struct Launcher {
    child: Child,
    program: String,
}

impl Launcher {
    /// Starts a launcher.
    ///
    /// # Errors
    /// Fails if it cannot be started.
    pub(super) fn start(mut command: Command) -> Result<Self, RunError> {
        // The terminal sends Ctrl-C to this process alone, so that the processes can save a checkpoint.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let program = command.get_program().display().to_string();
        match command.spawn() {
            Ok(child) => Ok(Self { child, program }),
            Err(error) => Err(refused(&program, &error)),
        }
    }

    /// Returns the status of a launcher that has ended.
    ///
    /// # Errors
    /// Fails if the system does not tell.
    pub(super) fn status(&mut self) -> Result<Option<ExitStatus>, RunError> {
        self.child.try_wait().map_err(|error| refused(&self.program, &error))
    }

    /// Returns whether it is stopped by a signal.
    pub(super) fn is_stopped(&self) -> bool {
        let what = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        waitid(WaitId::Pid(Pid::from_child(&self.child)), what).is_ok_and(|status| status.is_some())
    }

    /// Does what the state machine orders.
    ///
    /// # Errors
    /// Fails if the launcher cannot be ended.
    pub(super) fn obey(&self, order: Order) -> Result<(), RunError> {
        let signal = match order {
            Order::Wait => return Ok(()),
            Order::Save => Signal::USR1,
            Order::End => Signal::TERM,
            Order::Kill => Signal::KILL,
            Order::GiveUp => {
                let (program, id) = (&self.program, self.child.id());
                let text =
                    format!("{program} (process {id}) was killed and does not end: end it, then resume");
                return Err(RunError::new(ErrorKind::RankFailed, text));
            }
        };
        // The process may have ended, which the next look shows.
        let _ = kill_process(Pid::from_child(&self.child), signal);
        Ok(())
    }
}

fn refused(program: &str, error: &io::Error) -> RunError {
    RunError::input(format!("{program} cannot be started: {error}"))
}

/// Ends the processes of the starts before `start` of its launch, also those that are stopped, and waits for their end,
/// at most for `patience`. Returns the numbers of those that have not ended.
pub(super) fn end_before(start: &Start, patience: Duration) -> Vec<u32> {
    let since = Instant::now();
    let own = std::process::id();
    loop {
        let mut system = System::new();
        let what = ProcessRefreshKind::nothing().with_environ(UpdateKind::Always).without_tasks();
        system.refresh_processes_specifics(ProcessesToUpdate::All, true, what);
        let is_left = |process: &&Process| start_of(process).is_some_and(|found| found.is_before(start));
        let left: Vec<&Process> = system
            .processes()
            .values()
            .filter(is_left)
            .filter(|process| process.pid().as_u32() != own)
            .collect();
        if left.is_empty() || since.elapsed() > patience {
            return left.iter().map(|process| process.pid().as_u32()).collect();
        }
        for process in left {
            // It may have ended meanwhile.
            let _ = process.kill_with(sysinfo::Signal::Kill);
        }
        std::thread::sleep(PAUSE);
    }
}

/// Returns the start that made a process.
fn start_of(process: &Process) -> Option<Start> {
    let prefix = format!("{LAUNCHED}=");
    process.environ().iter().find_map(|variable| Start::read(variable.to_str()?.strip_prefix(&prefix)?))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::launch::watch::{Early, GRACE, Limits, Seen, Watch};

    fn start(number: u64, mark: &str) -> Start {
        Start {
            number,
            mark: Some(PathBuf::from(format!("/{mark}-{}", std::process::id()))),
            ..Start::default()
        }
    }

    fn process(start: &Start) -> Child {
        let child = Command::new("sleep").arg("60").env(LAUNCHED, start.to_string()).spawn();
        child.expect("sleep is everywhere")
    }

    #[test]
    fn the_processes_of_earlier_starts_are_ended_also_when_they_are_stopped() {
        let mut earlier = process(&start(1, "a"));
        let mut others = [process(&start(2, "a")), process(&start(1, "b"))];
        kill_process(Pid::from_child(&earlier), Signal::STOP).expect("it is ours");
        assert_eq!(end_before(&start(2, "a"), Duration::from_secs(30)), [0; 0]);
        assert!(!earlier.wait().expect("it is ours").success());
        for other in &mut others {
            assert_eq!(other.try_wait().expect("it is ours"), None, "another start or launch");
            other.kill().and_then(|()| other.wait()).expect("it is ours");
        }
    }

    /// Starts a shell with `text`, whose processes join each other or do not. Checks why it is ended, and that it is.
    fn check(text: &str, has_joined: bool, milliseconds: u64, expected: impl Fn(Duration) -> Option<Early>) {
        let limit = Duration::from_millis(milliseconds);
        let mut watch = Watch::new(Limits { joining: limit, silence: limit, stopped: limit });
        let begun = Instant::now();
        let mut command = Command::new("sh");
        command.args(["-c", text]);
        let mut launcher = Launcher::start(command).expect("a shell is everywhere");
        let mut last = Instant::now();
        let status = loop {
            if let Some(status) = launcher.status().expect("it is ours") {
                break status;
            }
            let seen = Seen { has_joined, is_stopped: launcher.is_stopped(), ..Seen::default() };
            let order = watch.look(std::mem::replace(&mut last, Instant::now()).elapsed(), seen);
            launcher.obey(order).expect("it ends");
            std::thread::sleep(PAUSE);
        };
        let expected = expected(limit);
        assert_eq!((watch.early(), status.success()), (expected, expected.is_none()), "{text}: {status}");
        assert_eq!(watch.joined().is_some(), has_joined, "{text}");
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
