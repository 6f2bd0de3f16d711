//! Ends processes of a run on this machine that their launcher has left behind: it was killed, or they were stopped.
//!
//! The environment of each process of a run has the start that made it ([`Start`]), with a name that no other launch
//! has. So the processes are found although neither their launcher nor the folder of the run is left.

use std::time::{Duration, Instant};

use sysinfo::{Process, ProcessRefreshKind, ProcessesToUpdate, Signal, System, UpdateKind};

use pipewright_run::fault::{LAUNCHED, Start};

/// The time between two looks at the processes.
const PAUSE: Duration = Duration::from_millis(20);

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
            let _ = process.kill_with(Signal::Kill);
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
    use std::process::{Child, Command};

    use rustix::process::{Pid, kill_process};

    use super::*;

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
        kill_process(Pid::from_child(&earlier), rustix::process::Signal::STOP).expect("it is ours");
        assert_eq!(end_before(&start(2, "a"), Duration::from_secs(30)), [0; 0]);
        assert!(!earlier.wait().expect("it is ours").success());
        for other in &mut others {
            assert_eq!(other.try_wait().expect("it is ours"), None, "another start or launch");
            other.kill().and_then(|()| other.wait()).expect("it is ours");
        }
    }
}
