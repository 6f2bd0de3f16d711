//! The output of a run after each step: reports, the metrics, the timeline, and events for
//! TensorBoard. Only the leader has a folder and reports; in other processes nothing is written.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;

use pipewright::pipeline::{PipelineError, StepFailure, StepSummary};
use pipewright::train::{CheckpointChoice, EventFile, EventFileError, Metrics, Sample, StepPrediction};
use pipewright_document::text::quoted;
use pipewright_schedule::Timeline;
use pipewright_schedule::error_text::with_causes as sentence;
use pipewright_schedule::picture::{PictureSettings, html};
use pipewright_schedule::slow_ranks::SlowRanks;
use pipewright_system::failure::disk_advice;

use crate::error::{ErrorKind, FailedRun, RunError};
use crate::fault::{Fault, Start, launched_start};
use crate::fingerprints::StepFingerprint;
use crate::observer::{Ending, Observer};
use crate::recovery::{GROWTH, LayerMove, SLOW_RANKS, SlowRank, VerifiedStep};
use crate::run_folder::{RunFolder, RunFolderError};
use crate::run_record::RunEvent;
use crate::settings::Settings;
use crate::training::checkpoint_space::CheckpointSpace;
use crate::training::efficiency::Efficiency;
use crate::training::exact::uses_amx;
use crate::training::launch::failure;
use crate::training::rank_hosts::RankHosts;
use crate::training::run_checkpoints::lost_folder;
use crate::training::timeline_recorder::TimelineRecorder;

/// The leader's output: reports to the observer, the metrics and the timeline.
pub(super) struct RunLog {
    folder: Option<RunFolder>,
    observer: Arc<dyn Observer>,
    efficiency: Efficiency,
    /// The timeline of the last successful step.
    timeline: Option<Timeline>,
    /// The steps before it that overlap with it or with each other, at most two, and their timelines.
    before: VecDeque<(u64, Timeline)>,
    recorder: TimelineRecorder,
    prediction: StepPrediction,
    slow_ranks: SlowRanks,
    /// The hosts of ranks with wrong bits.
    hosts: RankHosts,
    /// Whether the run adds products in the order of AMX.
    uses_amx: bool,
    /// The number of ranks that compute each stage together.
    tensor_ranks: u32,
    /// Whether `launch` is asked to replace the host of a slow rank.
    pub(super) replaces_slow: bool,
    /// Whether `launch` continues the run without the host of a rank that has computed wrong bits.
    replaces_wrong: bool,
    /// The steps over which the number of batches rises.
    rampup_steps: u64,
    /// The milliseconds of a step that the plan of the run predicts.
    planned_step_ms: Option<f64>,
    /// The event file for TensorBoard, if one is asked for.
    tensorboard: Option<EventFile>,
    /// Whether a timeline could not be written, and the user was warned.
    lacks_timelines: bool,
    space: CheckpointSpace,
}

impl RunLog {
    /// Returns the output of a run whose first `done` steps are finished.
    pub(super) fn new(
        folder: Option<RunFolder>,
        observer: Arc<dyn Observer>,
        efficiency: Efficiency,
        done: u64,
        settings: &Settings,
        space: CheckpointSpace,
        hosts: RankHosts,
    ) -> Result<Self, RunError> {
        let run = &settings.run;
        let asks = folder.as_ref().filter(|_| run.tensorboard);
        let tensorboard = asks.map(|folder| EventFile::create(folder.path(), done)).transpose();
        Ok(Self {
            folder,
            observer,
            efficiency,
            timeline: None,
            before: VecDeque::new(),
            recorder: TimelineRecorder::new(done, run.steps, run.timelines),
            prediction: StepPrediction::default(),
            slow_ranks: SlowRanks::default(),
            hosts,
            uses_amx: uses_amx(run),
            tensor_ranks: settings.mesh.tensor_parallel,
            replaces_slow: run.replace_slow && launched_start().is_some(),
            replaces_wrong: run.replace_wrong
                && Start::of_this_process().is_some_and(|start| start.leaves_out_hosts),
            rampup_steps: run.rampup_steps,
            planned_step_ms: run.planned_step_ms,
            tensorboard: tensorboard.map_err(RunError::input)?,
            lacks_timelines: false,
            space,
        })
    }

    /// Returns whether `launch` asks for the end of the run after a checkpoint, so that it can grow. Only the
    /// leader knows.
    pub(super) fn is_growth_requested(&self) -> bool {
        self.can_grow() && self.folder.as_ref().is_some_and(|folder| GROWTH.is_left(folder.path()))
    }

    /// Returns whether `launch` may ask for the end of the run so that it can grow. It is the same in all
    /// processes.
    pub(super) fn can_grow(&self) -> bool {
        launched_start().is_some()
    }

    /// Checks that the run's folder is still at its path, if this process writes to it.
    pub(super) fn require_folder(&self) -> Result<(), RunFolderError> {
        self.folder.as_ref().map_or(Ok(()), RunFolder::require)
    }

    /// Returns whether this process writes results and reports.
    pub(super) fn is_leader(&self) -> bool {
        self.folder.is_some()
    }

    /// Shows and writes a move of layers. The steps after it are not the ones that were predicted.
    pub(super) fn moved(&mut self, moved: &LayerMove) -> Result<(), RunError> {
        let Some(folder) = &mut self.folder else { return Ok(()) };
        let run = folder.path().to_owned();
        folder.append(moved).map_err(|error| unwritten(&run, error, moved.step, &self.space))?;
        self.observer.event(&RunEvent::LayerMove(moved.clone()));
        (self.prediction, self.planned_step_ms) = (StepPrediction::default(), None);
        Ok(())
    }

    /// Shows and writes the results of a step. Fails if they cannot be written, or, in all processes, if a
    /// rank has computed wrong bits and `launch` continues the run without its host.
    pub(super) fn step(&mut self, metrics: &mut Metrics, report: StepSummary) -> Result<(), RunError> {
        let verified = report.verification.as_ref().map(|verification| {
            let counts = !self.replaces_wrong;
            VerifiedStep::of(metrics.step, verification, counts, |ranks| self.hosts.of(ranks))
        });
        let wrong = verified.as_ref().and_then(|verified| self.wrong_bits(verified));
        let (Some(folder), observer) = (&mut self.folder, &*self.observer) else {
            return wrong.map_or(Ok(()), Err);
        };
        metrics.planned_step_ms = self.planned_step_ms;
        self.efficiency.observe(metrics);
        // The steps before have fewer batches.
        if metrics.step > self.rampup_steps {
            self.prediction.observe(metrics, &report);
        }
        let kept = self.recorder.record(folder, metrics.step, &report.timeline);
        note_timeline(kept, &mut self.lacks_timelines, observer)?;
        write_events(&mut self.tensorboard, observer, |events| events.step(metrics));
        let done = metrics.step;
        let run = folder.path().to_owned();
        let unwritten = |error: RunFolderError| unwritten(&run, error, done, &self.space);
        folder.append(metrics).map_err(unwritten)?;
        if let Some(fingerprint) = report.fingerprint {
            let fingerprint = StepFingerprint {
                unlike_replicas: report.unlike_replicas,
                uses_amx: Some(self.uses_amx),
                ..StepFingerprint::new(done, fingerprint)
            };
            folder.append_fingerprint(&fingerprint).map_err(unwritten)?;
            fingerprint.warning().iter().for_each(|warning| observer.note(warning));
        }
        if let Some(verified) = verified {
            folder.append(&verified).map_err(unwritten)?;
            if let Some(wrong) = wrong {
                // The step is computed again without the hosts, from the state before it.
                return Err(wrong);
            }
            observer.event(&RunEvent::VerifiedStep(verified));
        }
        let mut slow_ranks = Vec::new();
        for change in self.slow_ranks.observe(&report.timeline) {
            let changed = SlowRank::after(done, &change, self.tensor_ranks);
            folder.append(&changed).map_err(unwritten)?;
            observer.event(&RunEvent::SlowRank(changed.clone()));
            slow_ranks.extend(Some(changed).filter(|_| change.is_slow));
        }
        if self.replaces_slow && !slow_ranks.is_empty() {
            // Best effort: the run continues with the slow ranks.
            let _ = SLOW_RANKS.leave(folder.path(), &slow_ranks);
        }
        let before = self.timeline.replace(report.timeline);
        if report.overlaps {
            self.before.extend(before.map(|before| (done - 1, before)));
            self.before.drain(..self.before.len().saturating_sub(2));
        } else {
            self.before.clear();
        }
        observer.step(metrics, &report.undeferred);
        Ok(())
    }

    /// Shows the results of the evaluation after the last step of the run, and adds them to the line of that step.
    pub(super) fn evaluation(&mut self, metrics: &Metrics) -> Result<(), RunError> {
        let Some(folder) = &mut self.folder else { return Ok(()) };
        write_events(&mut self.tensorboard, &*self.observer, |events| events.evaluation(metrics));
        let run = folder.path().to_owned();
        folder
            .write_evaluation(metrics)
            .map_err(|error| unwritten(&run, error, metrics.step, &self.space))?;
        self.observer.evaluation(metrics);
        self.note_samples(metrics);
        Ok(())
    }

    /// Reports the texts with which the model has continued prompts.
    pub(super) fn note_samples(&self, metrics: &Metrics) {
        for Sample { prompt, text } in &metrics.samples {
            self.note(&format!("step {}: {prompt:?} continues {text:?}", metrics.step));
        }
    }

    /// Returns the failure of a step in which ranks have computed wrong bits, if `launch` continues the run
    /// without their hosts.
    fn wrong_bits(&self, verified: &VerifiedStep) -> Option<RunError> {
        let fault = verified.fault().filter(|_| self.replaces_wrong)?;
        Some(RunError::new(ErrorKind::RankFailed, verified.sentence()).with_fault(Some(fault)))
    }

    /// Reports the chosen steps between two checkpoints, if they have changed.
    pub(super) fn note_interval(&self, chosen: Option<CheckpointChoice>) {
        if let (Some(_), Some(choice)) = (&self.folder, chosen) {
            self.observer.checkpoint_interval(choice);
        }
    }

    /// Reports a sentence.
    pub(super) fn note(&self, sentence: &str) {
        if self.folder.is_some() {
            self.observer.note(sentence);
        }
    }

    /// Returns the failure of a step, below the schedule around the failing action, and draws the step into
    /// the folder. If `launch` continues the run without the hosts of ranks with wrong bits, the failure
    /// names them in all processes.
    pub(super) fn failed_step(&mut self, failed: Option<&StepFailure>, error: &PipelineError) -> RunError {
        let Some(failed) = failed else { return failure(error) };
        let mut context = format!("{failed}\n");
        let verified = VerifiedStep::failed(failed, |ranks| self.hosts.of(ranks));
        let fault = verified.as_ref().and_then(VerifiedStep::fault).filter(|_| self.replaces_wrong);
        if let Some(folder) = &mut self.folder {
            if let Some(verified) = &verified {
                context += &format!("{}\n", verified.sentence());
                // The failure is reported in any case.
                let _ = folder.append(verified);
            }
            let title = failed.error.to_string();
            let title = format!("failed: {}", title.lines().next().unwrap_or_default());
            let settings = PictureSettings { title: &title, ..PictureSettings::default() };
            // The picture is an addition: the failure of the step is reported in any case.
            context += &match folder.write_failed_step(failed.error.step, &html(&failed.timeline, &settings))
            {
                Ok(path) => format!("the step until its failure is drawn in {}\n", path.display()),
                Err(error) => format!("the step is not drawn: {}\n", sentence(&error)),
            };
        }
        let failure = failure(error).below(context);
        if fault.is_some() { failure.with_fault(fault) } else { failure }
    }

    pub(super) fn finish(&mut self) -> Result<(), RunError> {
        if self.folder.is_some() {
            self.observer.end_steps();
        }
        match (&self.folder, self.timeline.take()) {
            (Some(folder), Some(timeline)) => {
                let written = self.recorder.keep(folder, self.before.drain(..));
                let written = written.and_then(|()| folder.write_timeline(&timeline.chrome_trace()));
                note_timeline(written, &mut self.lacks_timelines, &*self.observer)
            }
            _ => Ok(()),
        }
    }

    pub(super) fn end(&self, ending: &Ending<'_>) {
        if self.folder.is_some() {
            self.observer.end(ending);
        }
    }
}

/// Writes events for TensorBoard, if they are asked for. Event files are an addition to the run, as timelines are.
fn write_events(
    tensorboard: &mut Option<EventFile>,
    observer: &dyn Observer,
    write: impl FnOnce(&mut EventFile) -> Result<(), EventFileError>,
) {
    if let Some(Err(error)) = tensorboard.as_mut().map(write) {
        *tensorboard = None;
        observer.note(&format!(
            "warning: events for TensorBoard are not written, and the training continues without them: {}",
            sentence(&error)
        ));
    }
}

/// Warns once if a timeline could not be written, because a run is worth more than its timelines. Fails if
/// the run's folder is gone.
fn note_timeline(
    written: Result<(), RunFolderError>,
    is_noted: &mut bool,
    observer: &dyn Observer,
) -> Result<(), RunError> {
    match written {
        Err(error) if error.is_lost_folder() => Err(write_failure(error)),
        Err(error) => {
            if !std::mem::replace(is_noted, true) {
                let reason = error.reason();
                observer.note(&format!(
                    "warning: a timeline is not written, and the training continues without it: {reason}"
                ));
            }
            Ok(())
        }
        Ok(()) => Ok(()),
    }
}

/// Returns the failure for results of step `done` that cannot be written, and how the run continues after a full
/// disk.
fn unwritten(run: &Path, error: RunFolderError, done: u64, space: &CheckpointSpace) -> RunError {
    let fault = Fault::of_full_disk(&error, done, || space.bytes());
    let failure = match &error {
        RunFolderError::Write { source, .. } if disk_advice(source).is_some() => {
            let run = quoted(&run.to_string_lossy());
            RunError::input(format!(
                "{error}; the run continues from its newest checkpoint: pipewright resume {run}"
            ))
        }
        _ => write_failure(error),
    };
    failure.with_fault(fault)
}

/// Returns the failure for results that cannot be written.
fn write_failure(error: RunFolderError) -> RunError {
    if error.is_lost_folder() { lost_folder(sentence(&error)) } else { RunError::input(error) }
}
