//! [`Attempts`]: what lasts from one attempt at a run to the next, in the process whose threads are the
//! ranks.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use pipewright::hook::ActionHook;
use pipewright::ids::WorldRank;

use crate::error::{FailedRun, RunError};
use crate::interrupt::Interrupt;
use crate::recovery::disk_space::wait_for_space;
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
    /// The restarts of a run that its own process may restart, with the folder and the deadline of the run.
    run: Option<(Restarts, PathBuf, Duration)>,
    /// The restart that is not in the metrics yet.
    pending: Option<Restart>,
    /// Whether a restart has begun whose run has not resumed.
    is_resuming: bool,
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
        if is_local && self.run.is_none() {
            self.run = Some((Restarts::new(run.restarts), run.out.clone(), run.deadline()));
        }
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
        let is_asked = || self.interrupt.is_requested();
        let has_resumed = !std::mem::take(&mut self.is_resuming);
        let Some((restarts, folder, deadline)) = &mut self.run else { return Err(failure) };
        if is_asked() && (has_resumed || failure.fault().is_some()) {
            return Err(failure);
        }
        let mut next = restarts.next(failure, has_resumed)?;
        if let Some((space, sentence)) = next.space() {
            note(&sentence);
            let has_space = wait_for_space(folder, space, *deadline, is_asked);
            next = next.after_wait(has_space, is_asked(), *deadline)?;
        }
        (self.pending, self.is_resuming) = (Some(next.record), true);
        Ok(folder.clone())
    }

    /// Returns whether a signal has asked for the end of the run, and this process, which has all ranks, may end it
    /// at once. Several processes agree on the end with the results of a step or an evaluation.
    pub(crate) fn must_end(&self) -> bool {
        self.run.is_some() && self.interrupt.is_requested()
    }
}
