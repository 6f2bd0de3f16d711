//! The checkpoints of a run: the steps after which they are saved, and the handling of their outcomes and
//! failures.

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use pipewright::checkpoint::{CheckpointError, CheckpointFolder, CheckpointWriter, PartArrivals};
use pipewright::train::{Metrics, Trainer};
use pipewright_document::text::quoted;
use pipewright_schedule::error_text::with_causes as sentence;
use pipewright_system::failure::advice_for;
use serde_json::{Map, Value};

use crate::error::{ErrorKind, FailedRun, RunError};
use crate::fault::{Fault, launched_start};
use crate::observer::Observer;
use crate::recovery::leave_loss;
use crate::run_folder::{self, RunFolder, is_lost_folder};
use crate::settings::Settings;
use crate::training::checkpoint_space::CheckpointSpace;
use crate::training::checkpoint_timing::CheckpointTiming;
use crate::training::evaluations::Evaluations;
use crate::training::identity::LOSS;
use crate::training::launch::failure;
use crate::training::process_group::ProcessGroup;
use crate::training::remote_files::Files;

/// The checkpoints of a run.
pub(super) struct Checkpoints {
    pub(super) writer: CheckpointWriter,
    pub(super) timing: CheckpointTiming,
    /// The step whose checkpoint was requested last.
    requested: Option<u64>,
    pub(super) description: Map<String, Value>,
    newest: Option<PathBuf>,
    /// Whether this process sees the checkpoints that the first process completes.
    sees_checkpoints: bool,
    /// The last step whose checkpoint is complete; 0 if there is none.
    saved: u64,
    /// The run's folder.
    run: PathBuf,
    /// Whether the process reports its own failures, because another process reports the failures of the run.
    reports: bool,
    observer: Arc<dyn Observer>,
    space: CheckpointSpace,
}

/// Why a checkpoint is saved after a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct CheckpointReason {
    /// Enough steps have passed.
    pub(super) is_due: bool,
    /// The step has the lowest validation loss.
    pub(super) is_best: bool,
}

impl Checkpoints {
    pub(super) fn new(
        folder: &mut Option<RunFolder>,
        settings: &Settings,
        description: Map<String, Value>,
        saved: u64,
        evaluations: &Evaluations,
        space: CheckpointSpace,
        processes: &ProcessGroup,
    ) -> Result<Self, RunError> {
        let (observer, files) = (processes.observer().clone(), processes.files());
        let run = &settings.run;
        // The replicas of the first group each write their part, and tensor ranks their shards.
        let ranks = settings.mesh.writers(settings.pipeline.ranks);
        let reports = folder.is_none();
        let writer = match folder {
            Some(folder) => {
                let (keep, checkpoints) = (run.keep_checkpoints as usize, folder.take_checkpoints());
                // A kill may have come before the link to the best checkpoint, and a run may go back to an
                // earlier one.
                let best = evaluations.lowest().map(|(step, _)| step);
                checkpoints.set_best(best).map_err(RunError::input)?;
                let arrivals = match files {
                    Files::First(service) => service.arrivals(),
                    _ => PartArrivals::default(),
                };
                CheckpointWriter::start_receiving(checkpoints, keep, ranks, run.deadline(), arrivals)
            }
            None => {
                let checkpoints = run_folder::checkpoints_of(&run.out);
                match files {
                    Files::Remote(remote) => CheckpointFolder::own(&checkpoints)
                        .and_then(|folder| CheckpointWriter::send(folder, remote.upload(), run.deadline())),
                    _ => CheckpointWriter::join(&checkpoints, run.deadline()),
                }
            }
        };
        let sees_checkpoints = !matches!(files, Files::Remote(_));
        // A resumed run may already have the checkpoint of the step that it resumes from.
        let requested = (saved > 0).then_some(saved);
        let (writer, timing) = (writer.map_err(RunError::input)?, CheckpointTiming::new(settings));
        let (newest, run) = (None, run.out.clone());
        Ok(Self {
            writer,
            timing,
            requested,
            description,
            newest,
            sees_checkpoints,
            saved,
            run,
            reports,
            observer,
            space,
        })
    }

    /// Checks the outcome of earlier checkpoints, and records the losses for the next checkpoint.
    pub(super) fn poll(&mut self, metrics: &Metrics, evaluations: &Evaluations) -> Result<(), RunError> {
        self.description.insert(LOSS.to_owned(), metrics.loss.into());
        evaluations.describe(&mut self.description);
        let outcome = self.writer.poll();
        self.note(outcome, self.requested)
    }

    /// Writes the checkpoint of the last step again, with the results of the evaluation after it.
    pub(super) fn after_evaluation(
        &mut self,
        trainer: &mut Trainer,
        evaluations: &Evaluations,
        is_best: bool,
    ) -> Result<(), RunError> {
        evaluations.describe(&mut self.description);
        self.save(trainer, is_best)
    }

    /// Returns whether a checkpoint is due after step `done`, or no step has one but the last.
    pub(super) fn saves_or_never_does(&self, done: u64) -> bool {
        self.timing.is_only_at_end() || self.is_due(done)
    }

    /// Returns whether a checkpoint is due after step `done` (`run.checkpoint_every`). It is asked before the
    /// step, so a choice of the interval counts from the step after the one whose report has it.
    pub(super) fn is_due(&self, done: u64) -> bool {
        self.timing.is_due(done, self.requested.unwrap_or(0))
    }

    /// Saves a checkpoint if one is due, and after a step with the lowest validation loss.
    pub(super) fn after_step(
        &mut self,
        trainer: &mut Trainer,
        CheckpointReason { is_due, is_best }: CheckpointReason,
    ) -> Result<(), RunError> {
        if is_best || is_due {
            self.save(trainer, is_best)?;
        }
        self.timing.announce(trainer);
        Ok(())
    }

    fn save(&mut self, trainer: &mut Trainer, is_best: bool) -> Result<(), RunError> {
        let begun = Instant::now();
        let state = trainer.state(self.description.clone()).map_err(|error| failure(&error))?;
        let earlier = self.requested.replace(state.step);
        let outcome = if is_best { self.writer.save_best(state) } else { self.writer.save(state) };
        self.note(outcome, earlier)?;
        self.timing.begin(begun.elapsed());
        Ok(())
    }

    /// Saves the state of the last step unless it is already saved, and waits for the writer. Returns the
    /// path of the newest checkpoint.
    pub(super) fn finish(mut self, trainer: &mut Trainer) -> Result<Option<PathBuf>, RunError> {
        if self.requested != Some(trainer.steps_done()) {
            self.save(trainer, false)?;
        }
        let outcome = self.writer.wait();
        self.note(outcome, self.requested)?;
        Ok(self.newest)
    }

    /// Records the outcome of the checkpoint of `step`.
    fn note(
        &mut self,
        outcome: Result<Option<PathBuf>, CheckpointError>,
        step: Option<u64>,
    ) -> Result<(), RunError> {
        match outcome {
            Ok(Some(path)) => {
                self.newest = Some(path).filter(|_| self.sees_checkpoints);
                self.timing.complete();
                self.saved = step.unwrap_or(self.saved);
                Ok(())
            }
            Ok(None) => Ok(()),
            // The leader learns of these by itself.
            Err(error) if is_lost_folder(&error) => Err(self.lost(&error)),
            Err(error @ CheckpointError::NotFinite { .. }) => {
                Err(RunError::new(ErrorKind::RankFailed, self.with_resumption(&error)))
            }
            // No mistake of the user: the run may be restarted.
            Err(error @ CheckpointError::Unanswered(_)) => {
                Err(RunError::new(ErrorKind::RankFailed, self.with_resumption(&error)))
            }
            Err(error) => {
                let fault = Fault::of_full_disk(&error, step.unwrap_or(self.saved), || self.space.bytes());
                let mut failure = RunError::input(self.with_resumption(&error)).with_fault(fault);
                // Only this process knows of the failure, so it reports the failure even if it is not the
                // leader.
                if self.reports {
                    self.observer.failed(&failure);
                    failure = failure.reported_elsewhere();
                    if let Some(fault) = failure.fault().filter(|_| launched_start().is_some()) {
                        fault.leave(&self.run, &failure.full_text());
                    }
                }
                Err(failure)
            }
        }
    }

    /// Returns the failure of a run whose folder is gone.
    pub(super) fn lost(&self, error: &(dyn Error + 'static)) -> RunError {
        let lost = match self.saved {
            0 => "no step of this run is saved".to_owned(),
            saved => format!(
                "the steps after {saved} are not saved, and the checkpoint of step {saved} is only where the folder was \
                 moved to"
            ),
        };
        lost_folder(format!("{}; {lost}", sentence(error)))
    }

    /// Returns the message of an error, and how the run can be resumed.
    fn with_resumption(&self, error: &CheckpointError) -> String {
        let (message, run) = (sentence(error), quoted(&self.run.to_string_lossy()));
        let disk = advice_for(error);
        let resumption = disk.map(|advice| format!("{advice}, then resume with"));
        let advice = match error {
            // The path of the folder is one of another host.
            _ if !self.sees_checkpoints => return message,
            _ if self.saved == 0 => {
                let advice = disk.map(|advice| format!(": {advice}, then start again")).unwrap_or_default();
                return format!("{message}; no step of this run is saved{advice}");
            }
            _ if resumption.is_some() => resumption.as_deref().unwrap_or_default(),
            CheckpointError::NotFinite { .. } => "resume with other settings of [optimizer] (`--set`)",
            _ => "resume with",
        };
        format!("{message}; earlier checkpoints are complete: {advice}: pipewright resume {run}")
    }
}

/// Returns the failure of a run whose folder is gone. `launch` reports it, because it also learns of the loss when no
/// process is left that could report it.
pub(super) fn lost_folder(sentence: String) -> RunError {
    let is_left = leave_loss(&sentence);
    let failure = RunError::new(ErrorKind::RankFailed, sentence);
    if is_left { failure.reported_elsewhere() } else { failure }
}
