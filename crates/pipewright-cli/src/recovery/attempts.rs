//! [`Attempts`]: what lasts from one attempt at a run to the next, in the process whose threads are the ranks.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use pipewright::hook::ActionHook;

use crate::config::Settings;
use crate::config::pipeline::TransportChoice;
use crate::display::say;
use crate::failure::Failure;
use crate::recovery::injected::InjectedFaults;
use crate::recovery::restarts::{Restarts, wait_for_space};
use crate::signal::Interrupt;

/// The attempts at a run: the first one and those after faults.
#[derive(Default)]
pub(crate) struct Attempts {
    interrupt: Interrupt,
    injected: Option<Arc<InjectedFaults>>,
    restarts: Restarts,
    run: Option<RestartableRun>,
}

/// A run that its own process may restart.
struct RestartableRun {
    folder: PathBuf,
    limit: u64,
    deadline: Duration,
}

impl Attempts {
    /// Returns the attempts at a run that has not begun.
    pub(crate) fn new() -> Result<Self, Failure> {
        Ok(Self { injected: InjectedFaults::of_environment()?, ..Self::default() })
    }

    /// Notes the run that begins or resumes. A run of several processes is restarted by `launch`.
    pub(crate) fn begin(&mut self, settings: &Settings) {
        let run = &settings.run;
        let is_local = settings.pipeline.transport == TransportChoice::Local;
        self.run = is_local.then(|| RestartableRun {
            folder: run.out.clone(),
            limit: run.restarts,
            deadline: run.deadline(),
        });
    }

    /// Returns the flag that a signal sets to end the run early.
    pub(crate) fn interrupt(&self) -> &Interrupt {
        &self.interrupt
    }

    /// Returns the hook that injects faults, if there are some.
    pub(crate) fn hook(&self) -> Option<Arc<dyn ActionHook>> {
        self.injected.clone().map(|injected| injected as _)
    }

    /// Notes the step that runs next.
    pub(crate) fn begin_step(&self, step: u64) {
        if let Some(injected) = &self.injected {
            injected.begin(step);
        }
    }

    /// Prepares the run to continue after a failure. Returns the folder of the run.
    ///
    /// # Errors
    /// Returns the failure if the run ends with it.
    pub(crate) fn after(&mut self, failure: Failure) -> Result<PathBuf, Failure> {
        let Some(run) = &self.run else { return Err(failure) };
        let restart = self.restarts.next(failure, run.limit)?;
        if self.restarts.is_disk_full() {
            say(&format!("{}; the run waits for space on the disk", restart.cause));
            wait_for_space(&run.folder, run.deadline);
        }
        restart.leave(&run.folder).map_err(|error| {
            Failure::input(format!(
                "{}: the run cannot continue in this folder: {error}",
                run.folder.display()
            ))
        })?;
        Ok(run.folder.clone())
    }
}
