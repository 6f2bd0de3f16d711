//! [`Attempts`]: what lasts from one attempt at a run to the next, in the process whose threads are the
//! ranks.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use pipewright::hook::ActionHook;
use pipewright::ids::WorldRank;

use crate::error::RunError;
use crate::interrupt::Interrupt;
use crate::recovery::injected::InjectedFaults;
use crate::recovery::restart::Restart;
use crate::recovery::restarts::Restarts;
use crate::settings::Settings;
use crate::settings::pipeline::TransportChoice;

/// The attempts at a run: the first one and those after faults.
#[derive(Default)]
pub(crate) struct Attempts {
    interrupt: Interrupt,
    injected: Option<Arc<InjectedFaults>>,
    restarts: Restarts,
    run: Option<RestartableRun>,
    /// The restart that is not in the metrics yet.
    pending: Option<Restart>,
    /// Whether a restart has begun whose run has not resumed.
    is_resuming: bool,
}

/// A run that its own process may restart.
struct RestartableRun {
    folder: PathBuf,
    limit: u64,
    deadline: Duration,
}

impl Attempts {
    /// Returns the attempts at a run that has not begun.
    pub(crate) fn new() -> Result<Self, RunError> {
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
        self.is_resuming = false;
    }

    /// Takes the record of the restart that the run resumes after, if it is restarted.
    pub(crate) fn take_restart(&mut self) -> Option<Restart> {
        self.pending.take()
    }

    /// Returns the flag that a signal sets to end the run early.
    pub(crate) fn interrupt(&self) -> &Interrupt {
        &self.interrupt
    }

    /// Returns the hook that injects faults into a world of `ranks`, if there are some. `sends_gradients` returns
    /// whether a rank has a stage that sends gradients.
    ///
    /// # Errors
    /// Fails if a fault is for another rank, or cannot happen on its rank.
    pub(crate) fn hook(
        &self,
        ranks: u32,
        sends_gradients: impl Fn(WorldRank) -> bool,
    ) -> Result<Option<Arc<dyn ActionHook>>, RunError> {
        let Some(injected) = &self.injected else { return Ok(None) };
        injected.require(ranks, sends_gradients)?;
        Ok(Some(injected.clone()))
    }

    /// Prepares the run to continue after a failure. Returns the folder of the run.
    ///
    /// # Errors
    /// Returns the failure if the run ends with it. A signal that asked for the end of the run ends it.
    pub(crate) fn after(&mut self, failure: RunError, note: impl Fn(&str)) -> Result<PathBuf, RunError> {
        if std::mem::take(&mut self.is_resuming) && failure.fault().is_none() {
            return Err(self.restarts.not_resumed(failure));
        }
        let Some(run) = &self.run else { return Err(failure) };
        if self.is_stopped() {
            return Err(failure);
        }
        let next = self.restarts.next(failure, run.limit)?;
        let next = next.after_space(&run.folder, run.deadline, note, || self.is_stopped())?;
        let folder = run.folder.clone();
        (self.pending, self.is_resuming) = (Some(next.record), true);
        Ok(folder)
    }

    /// Returns whether a signal has asked for the end of the run, and this process, which has all ranks, may end it
    /// at once. Several processes agree on the end with the results of a step or an evaluation.
    pub(crate) fn must_end(&self) -> bool {
        self.run.is_some() && self.is_stopped()
    }

    /// Returns whether a signal has asked for the end of the run.
    fn is_stopped(&self) -> bool {
        self.interrupt.is_requested()
    }
}
