//! Runs the steps for `train` and `resume`: shows and writes the metrics of each step, and saves checkpoints
//! between steps and always at the end.
//!
//! If there are several processes, only the leader shows and writes metrics. All processes save their ranks'
//! parts of a checkpoint after the same steps.

use std::error::Error;
use std::path::PathBuf;
use std::time::Instant;

use pipewright::checkpoint::{CheckpointError, CheckpointWriter};
use pipewright::pipeline::{PipelineError, StepFailure, StepSummary};
use pipewright::train::{EventFile, Metrics, Sample, StepPrediction, Trainer};
use pipewright_schedule::Timeline;
use pipewright_schedule::picture::{PictureSettings, html};
use pipewright_schedule::slow_ranks::SlowRanks;
use serde_json::{Map, Value};

use crate::config::Settings;
use crate::config::pipeline::TransportChoice;
use crate::display::{Display, Ending, Overview, Reason, say};
use crate::failure::{Exit, Failure, sentence};
use crate::fault::{Fault, is_full, launched_restart};
use crate::recovery::{Attempts, SlowRank};
use crate::run_folder::{self, RunFolder, RunFolderError, TIMELINE, is_lost_folder};
use crate::text::quoted;
use crate::training::checkpoint_space::CheckpointSpace;
use crate::training::checkpoint_timing::CheckpointTiming;
use crate::training::efficiency::Efficiency;
use crate::training::evaluations::Evaluations;
use crate::training::identity::LOSS;
use crate::training::launch::{abandon, failure};
use crate::training::process_group::ProcessGroup;
use crate::training::state_copies::StateCopies;
use crate::training::timeline_recorder::TimelineRecorder;

/// Everything that the steps of a run need besides the ranks.
pub(crate) struct TrainingLoop<'a> {
    pub(crate) settings: &'a Settings,
    /// The overview of the run for its display.
    pub(crate) overview: Overview,
    /// What the run computes per token, and the peak of its devices.
    pub(crate) efficiency: Efficiency,
    /// The description of the run for its checkpoints.
    pub(crate) description: Map<String, Value>,
    /// The evaluations on validation data.
    pub(crate) evaluations: Evaluations,
    /// The folder of the results; `None` in a process that does not write results.
    pub(crate) folder: Option<RunFolder>,
    /// The space that a checkpoint needs.
    pub(crate) space: CheckpointSpace,
    /// The copies of the state in memory, if the run makes some.
    pub(crate) copies: Option<StateCopies>,
    /// The step of the newest checkpoint; 0 if there is none.
    pub(crate) saved: u64,
    /// The processes of the run.
    pub(crate) processes: &'a mut ProcessGroup,
    /// The attempts at the run, of which this is one.
    pub(crate) attempts: &'a Attempts,
}

impl TrainingLoop<'_> {
    /// Runs the remaining steps, or stops early at a signal or because the validation loss no longer falls,
    /// and saves a checkpoint of the last step.
    pub(crate) fn run(self, mut trainer: Trainer) -> Result<(), Failure> {
        let Self { settings, overview, efficiency, description, mut evaluations, space, .. } = self;
        let Self { mut folder, mut copies, saved, processes, attempts, .. } = self;
        let (run, start) = (&settings.run, trainer.steps_done());
        let watched = attempts.interrupt().watch();
        watched.map_err(|error| Failure::input(format!("cannot watch for signals: {error}")))?;
        let mut checkpoints =
            Checkpoints::new(&mut folder, settings, description, saved, &evaluations, space.clone())?;
        checkpoints.writer.on_progress(trainer.pipeline().keep_alive());
        copies.iter_mut().for_each(|copies| copies.on_progress(trainer.pipeline().keep_alive()));
        checkpoints.timing.announce(&mut trainer);
        let display = folder.is_some().then(|| Display::new(overview, start, run.steps));
        let mut log = Log::new(folder, display, efficiency, start, settings, space)?;
        processes.leave_faults_in(&run.out);
        let mut saves = Saves { checkpoints: &mut checkpoints, copies: copies.as_mut() };
        let taken = steps(&mut trainer, run.steps, attempts, &mut evaluations, &mut saves, &mut log);
        let taken = taken.map_err(|stop| match stop {
            Stop::Rank(error) => log.failed_step(trainer.pipeline().step_failure(), &error),
            Stop::Other(failure) => abandon(&mut trainer, failure),
        });
        // The display ends first, so that it does not draw over the error.
        let traced = log.finish();
        let taken = settle(settings, processes, taken);
        // If a step failed and the timeline cannot be written, the failed step is reported.
        taken?;
        traced?;
        let done = trainer.steps_done();
        let reason = match (done == run.steps, evaluations.are_exhausted()) {
            (true, _) => Reason::Complete,
            (false, true) => Reason::LossNoLongerFalls,
            (false, false) => Reason::Signal,
        };
        let saved = settle(settings, processes, checkpoints.finish(&mut trainer))?;
        copies.into_iter().for_each(|copies| copies.finish(saved.as_deref(), run.deadline()));
        // `launch` continues a run whose slow host it replaces.
        let is_replaced =
            reason == Reason::Signal && log.replaces_slow && !SlowRank::find(&run.out).is_empty();
        if processes.is_leader() && !is_replaced {
            let (saved, best) = (saved.as_deref(), evaluations.lowest());
            let has_timeline = run.out.join(TIMELINE).is_file();
            log.summarize(&Ending { done, reason, saved, best, out: &run.out, has_timeline });
        }
        match reason {
            Reason::Complete | Reason::LossNoLongerFalls => Ok(()),
            Reason::Signal => Err(Failure::already_reported(Exit::Interrupted)),
        }
    }
}

/// Reports a failure if the ranks are processes, which a launcher ends as soon as one of them has failed.
/// Otherwise the command reports the failure, unless the run continues after it.
fn settle<T>(
    settings: &Settings,
    processes: &mut ProcessGroup,
    outcome: Result<T, Failure>,
) -> Result<T, Failure> {
    match settings.pipeline.transport {
        TransportChoice::Local => outcome,
        TransportChoice::Mpi => processes.settle(outcome),
    }
}

/// The reason why the steps end early.
enum Stop {
    /// A rank failed.
    Rank(PipelineError),
    /// Another failure, which only this process knows of.
    Other(Failure),
}

impl Stop {
    /// Why a step or an evaluation failed. Data that one process cannot read is its own failure: its ranks
    /// are well, and the others would wait for them.
    fn of_step(error: PipelineError) -> Self {
        match error {
            PipelineError::Data(_) => Self::Other(failure(&error)),
            error => Self::Rank(error),
        }
    }
}

/// What saves the state of a run.
struct Saves<'a> {
    checkpoints: &'a mut Checkpoints,
    copies: Option<&'a mut StateCopies>,
}

/// Runs steps until all are finished or one is interrupted.
fn steps(
    trainer: &mut Trainer,
    steps: u64,
    attempts: &Attempts,
    evaluations: &mut Evaluations,
    Saves { checkpoints, copies }: &mut Saves<'_>,
    log: &mut Log,
) -> Result<(), Stop> {
    while trainer.steps_done() < steps {
        attempts.begin_step(trainer.steps_done() + 1);
        let (mut metrics, report) = trainer.step().map_err(Stop::of_step)?;
        let interrupted = report.interrupted;
        let is_best = evaluations.after_step(trainer, &mut metrics).map_err(Stop::of_step)?;
        copies.iter_mut().for_each(|copies| copies.settle());
        log.require_folder().map_err(|error| Stop::Other(checkpoints.lost(&error)))?;
        checkpoints.timing.step(&report);
        checkpoints.poll(&metrics, evaluations).map_err(Stop::Other)?;
        let chosen = checkpoints.timing.describe(&mut metrics);
        log.step(&mut metrics, report).map_err(Stop::Other)?;
        log.note(chosen);
        let step = metrics.step;
        for Sample { prompt, text } in metrics.samples {
            log.note(Some(format!("step {step}: {prompt:?} continues {text:?}")));
        }
        let ends = interrupted || evaluations.are_exhausted() || trainer.steps_done() == steps;
        // The last state is saved on the disk at once.
        if let Some(copies) = copies.as_mut().filter(|_| !ends) {
            copies.begin_copy(trainer, &checkpoints.description).map_err(Stop::Other)?;
        }
        checkpoints.after_step(trainer, is_best).map_err(Stop::Other)?;
        if ends {
            break;
        }
    }
    Ok(())
}

/// The leader's output: the display, the metrics and the timeline.
struct Log {
    folder: Option<RunFolder>,
    display: Option<Display>,
    efficiency: Efficiency,
    /// The timeline of the last successful step.
    timeline: Option<Timeline>,
    recorder: TimelineRecorder,
    prediction: StepPrediction,
    slow_ranks: SlowRanks,
    /// The number of ranks that compute each stage together.
    tensor_ranks: u32,
    /// Whether `launch` is asked to replace the host of a slow rank.
    replaces_slow: bool,
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

impl Log {
    /// Returns the output of a run whose first `done` steps are finished.
    fn new(
        folder: Option<RunFolder>,
        display: Option<Display>,
        efficiency: Efficiency,
        done: u64,
        settings: &Settings,
        space: CheckpointSpace,
    ) -> Result<Self, Failure> {
        let run = &settings.run;
        let asks = folder.as_ref().filter(|_| run.tensorboard);
        let tensorboard = asks.map(|folder| EventFile::create(folder.path(), done)).transpose();
        Ok(Self {
            folder,
            display,
            efficiency,
            timeline: None,
            recorder: TimelineRecorder::new(done, run.steps, run.timelines),
            prediction: StepPrediction::default(),
            slow_ranks: SlowRanks::default(),
            tensor_ranks: settings.mesh.tensor_parallel,
            replaces_slow: run.replace_slow && launched_restart().is_some(),
            rampup_steps: run.rampup_steps,
            planned_step_ms: run.planned_step_ms,
            tensorboard: tensorboard.map_err(Failure::input)?,
            lacks_timelines: false,
            space,
        })
    }

    /// Checks that the run's folder is still at its path, if this process writes to it.
    fn require_folder(&self) -> Result<(), RunFolderError> {
        self.folder.as_ref().map_or(Ok(()), RunFolder::require)
    }

    fn step(&mut self, metrics: &mut Metrics, report: StepSummary) -> Result<(), Failure> {
        let (Some(folder), Some(display)) = (&mut self.folder, &mut self.display) else { return Ok(()) };
        metrics.planned_step_ms = self.planned_step_ms;
        self.efficiency.observe(metrics);
        // The steps before have fewer batches.
        if metrics.step > self.rampup_steps {
            self.prediction.observe(metrics, &report);
        }
        let kept = self.recorder.record(folder, metrics.step, &report.timeline);
        note_timeline(kept, &mut self.lacks_timelines)?;
        if let Some(Err(error)) = self.tensorboard.as_mut().map(|tensorboard| tensorboard.step(metrics)) {
            // Event files are an addition to the run, as timelines are.
            self.tensorboard = None;
            say(&format!(
                "warning: events for TensorBoard are not written, and the training continues without them: {}",
                sentence(&error)
            ));
        }
        let done = metrics.step;
        let unwritten = |error: RunFolderError| {
            let fault = Fault::of_full_disk(&error, done, || self.space.bytes());
            write_failure(error).with_fault(fault)
        };
        folder.write_metrics(metrics).map_err(unwritten)?;
        let mut slow_ranks = Vec::new();
        for change in self.slow_ranks.observe(&report.timeline) {
            let changed = SlowRank::after(done, &change, self.tensor_ranks);
            folder.write_slow_rank(&changed).map_err(unwritten)?;
            say(&changed.sentence());
            slow_ranks.extend(Some(changed).filter(|_| change.is_slow));
        }
        if self.replaces_slow && !slow_ranks.is_empty() {
            // Best effort: the run continues with the slow ranks.
            let _ = SlowRank::leave(&slow_ranks, folder.path());
        }
        self.timeline = Some(report.timeline);
        display.step(metrics);
        // Only the first step lists them.
        display.note_undeferred(&report.undeferred);
        Ok(())
    }

    /// Prints a sentence about the run.
    fn note(&self, sentence: Option<String>) {
        if let (Some(_), Some(sentence)) = (&self.display, sentence) {
            say(&sentence);
        }
    }

    /// Returns the failure of a step, below the schedule around the failing action, and draws the step into
    /// the folder.
    fn failed_step(&self, failed: Option<&StepFailure>, error: &PipelineError) -> Failure {
        let Some(failed) = failed else { return failure(error) };
        let mut context = format!("{failed}\n");
        if let Some(folder) = &self.folder {
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
        failure(error).below(context)
    }

    fn finish(&mut self) -> Result<(), Failure> {
        if let Some(display) = &mut self.display {
            display.finish();
        }
        match (&self.folder, self.timeline.take()) {
            (Some(folder), Some(timeline)) => {
                let written = folder.write_timeline(&timeline.chrome_trace());
                note_timeline(written, &mut self.lacks_timelines)
            }
            _ => Ok(()),
        }
    }

    fn summarize(&self, ending: &Ending<'_>) {
        if let Some(display) = &self.display {
            display.summarize(ending);
        }
    }
}

/// Warns once if a timeline could not be written, because a run is worth more than its timelines. Fails if
/// the run's folder is gone.
fn note_timeline(written: Result<(), RunFolderError>, is_noted: &mut bool) -> Result<(), Failure> {
    match written {
        Err(error) if error.is_lost_folder() => Err(write_failure(error)),
        Err(error) => {
            if !std::mem::replace(is_noted, true) {
                let reason = error.reason();
                say(&format!(
                    "warning: a timeline is not written, and the training continues without it: {reason}"
                ));
            }
            Ok(())
        }
        Ok(()) => Ok(()),
    }
}

/// Returns the failure for results that cannot be written.
fn write_failure(error: RunFolderError) -> Failure {
    if error.is_lost_folder() { Failure::new(Exit::RankFailed, error) } else { Failure::input(error) }
}

/// The checkpoints of a run.
struct Checkpoints {
    writer: CheckpointWriter,
    timing: CheckpointTiming,
    /// The step whose checkpoint was requested last.
    requested: Option<u64>,
    description: Map<String, Value>,
    newest: Option<PathBuf>,
    /// The last step whose checkpoint is complete; 0 if there is none.
    saved: u64,
    /// The run's folder.
    run: PathBuf,
    /// Whether the process reports its own failures, because another process reports those of the run.
    reports: bool,
    space: CheckpointSpace,
}

impl Checkpoints {
    fn new(
        folder: &mut Option<RunFolder>,
        settings: &Settings,
        description: Map<String, Value>,
        saved: u64,
        evaluations: &Evaluations,
        space: CheckpointSpace,
    ) -> Result<Self, Failure> {
        let run = &settings.run;
        // The replicas of the first shard group each write their part, and tensor ranks their shards.
        let ranks = settings.pipeline.ranks * settings.mesh.shards() * settings.mesh.tensor_parallel;
        let reports = folder.is_none();
        let writer = match folder {
            Some(folder) => {
                let (keep, checkpoints) = (run.keep_checkpoints as usize, folder.take_checkpoints());
                // A kill may have come before the link to the best checkpoint, and a run may go back to an
                // earlier one.
                let best = evaluations.lowest().map(|(step, _)| step);
                checkpoints.set_best(best).map_err(Failure::input)?;
                CheckpointWriter::start(checkpoints, keep, ranks, run.deadline())
            }
            None => CheckpointWriter::join(&run_folder::checkpoints_of(&run.out), run.deadline()),
        };
        // A resumed run may already have the checkpoint of the step that it resumes from.
        let requested = (saved > 0).then_some(saved);
        let (writer, timing) = (writer.map_err(Failure::input)?, CheckpointTiming::new(settings));
        let (newest, run) = (None, run.out.clone());
        Ok(Self { writer, timing, requested, description, newest, saved, run, reports, space })
    }

    /// Checks the outcome of earlier checkpoints, and records the losses for the next checkpoint.
    fn poll(&mut self, metrics: &Metrics, evaluations: &Evaluations) -> Result<(), Failure> {
        self.description.insert(LOSS.to_owned(), metrics.loss.into());
        evaluations.describe(&mut self.description);
        let outcome = self.writer.poll();
        self.note(outcome, self.requested)
    }

    /// Saves a checkpoint if one is due (`run.checkpoint_every`), and after a step with the lowest validation
    /// loss.
    fn after_step(&mut self, trainer: &mut Trainer, is_best: bool) -> Result<(), Failure> {
        let is_due = self.timing.is_due(trainer.steps_done(), self.requested.unwrap_or(0));
        if is_best || is_due {
            self.save(trainer, is_best)?;
        }
        self.timing.announce(trainer);
        Ok(())
    }

    fn save(&mut self, trainer: &mut Trainer, is_best: bool) -> Result<(), Failure> {
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
    fn finish(mut self, trainer: &mut Trainer) -> Result<Option<PathBuf>, Failure> {
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
    ) -> Result<(), Failure> {
        match outcome {
            Ok(Some(path)) => {
                self.newest = Some(path);
                self.timing.complete();
                self.saved = step.unwrap_or(self.saved);
                Ok(())
            }
            Ok(None) => Ok(()),
            // The leader learns of these by itself.
            Err(error) if is_lost_folder(&error) => Err(self.lost(&error)),
            Err(error @ CheckpointError::NotFinite { .. }) => {
                Err(Failure::new(Exit::RankFailed, self.with_resumption(&error)))
            }
            Err(error) => {
                let fault = Fault::of_full_disk(&error, step.unwrap_or(self.saved), || self.space.bytes());
                let mut failure = Failure::input(self.with_resumption(&error)).with_fault(fault);
                // Only this process knows of the failure, so it reports the failure even if it is not the
                // leader.
                if self.reports {
                    failure.report();
                    if let Some(fault) = failure.fault().filter(|_| launched_restart().is_some()) {
                        fault.leave(&self.run, &failure.full_text());
                    }
                }
                Err(failure)
            }
        }
    }

    /// Returns the failure of a run whose folder is gone.
    fn lost(&self, error: &(dyn Error + 'static)) -> Failure {
        let lost = match self.saved {
            0 => "no step of this run is saved".to_owned(),
            saved => format!(
                "the steps after {saved} are not saved, and the checkpoint of step {saved} is only where the folder was \
                 moved to"
            ),
        };
        Failure::new(Exit::RankFailed, format!("{}; {lost}", sentence(error)))
    }

    /// Returns the message of an error, and how the run can be resumed.
    fn with_resumption(&self, error: &CheckpointError) -> String {
        let (message, run) = (sentence(error), quoted(&self.run.to_string_lossy()));
        let is_full = is_full(error);
        let advice = match error {
            _ if is_full && self.saved == 0 => {
                return format!("{message}; no step of this run is saved: free some space, then start again");
            }
            _ if self.saved == 0 => return format!("{message}; no step of this run is saved"),
            _ if is_full => "free some space, then resume with",
            CheckpointError::NotFinite { .. } => "resume with other settings of [optimizer] (`--set`)",
            _ => "resume with",
        };
        format!("{message}; earlier checkpoints are complete: {advice}: pipewright resume {run}")
    }
}
