//! Runs the steps for `train` and `resume`: shows and writes the metrics of each step, and saves checkpoints
//! between steps and always at the end.
//!
//! If there are several processes, only the leader shows and writes metrics. All processes save their ranks'
//! parts of a checkpoint after the same steps.

use pipewright::pipeline::PipelineError;
use pipewright::train::{Metrics, Trainer};
use serde_json::{Map, Value};

use crate::error::{ErrorKind, FailedRun, RunError};
use crate::fault::Fault;
use crate::observer::{Ending, Overview, Reason};
use crate::recovery::{Attempts, SLOW_RANKS};
use crate::run_folder::{RunFolder, TIMELINE};
use crate::settings::Settings;
use crate::settings::pipeline::TransportChoice;
use crate::training::checkpoint_space::CheckpointSpace;
use crate::training::efficiency::Efficiency;
use crate::training::evaluations::{Evaluated, Evaluations};
use crate::training::launch::{abandon, failure};
use crate::training::layer_mover::{LayerMover, MoveFailure};
use crate::training::process_group::ProcessGroup;
use crate::training::rank_hosts::RankHosts;
use crate::training::run_checkpoints::{CheckpointReason, Checkpoints};
use crate::training::run_log::RunLog;
use crate::training::state_copies::StateCopies;

/// Everything that the steps of a run need besides the ranks.
pub(crate) struct TrainingLoop<'a> {
    pub(crate) settings: &'a Settings,
    /// The overview of the run for its display.
    pub(crate) overview: Overview,
    /// The operations of the run per token, and the peak of its devices.
    pub(crate) efficiency: Efficiency,
    /// The description of the run for its checkpoints.
    pub(crate) description: Map<String, Value>,
    /// The evaluations on validation data.
    pub(crate) evaluations: Evaluations,
    /// The folder of the results; `None` in a process that does not write results.
    pub(crate) folder: Option<RunFolder>,
    /// The space that a checkpoint needs.
    pub(crate) space: CheckpointSpace,
    /// The hosts of the ranks, if the run verifies steps.
    pub(crate) hosts: RankHosts,
    /// Moves layers when ranks have become slower or faster, if the run does so.
    pub(crate) mover: Option<LayerMover>,
    /// The copies of the state in memory, if the run makes some.
    pub(crate) copies: Option<StateCopies>,
    /// The step of the newest checkpoint; 0 if there is none.
    pub(crate) saved: u64,
    /// The processes of the run.
    pub(crate) processes: &'a mut ProcessGroup,
    /// The attempts at the run. This is one of them.
    pub(crate) attempts: &'a Attempts,
}

impl TrainingLoop<'_> {
    /// Runs the remaining steps, or stops early at a signal or because the validation loss no longer falls,
    /// and saves a checkpoint of the last step.
    pub(crate) fn run(self, mut trainer: Trainer) -> Result<(), RunError> {
        let Self { settings, overview, efficiency, description, mut evaluations, space, hosts, .. } = self;
        let Self { mut folder, mut mover, mut copies, saved, processes, attempts, .. } = self;
        let (run, start) = (&settings.run, trainer.steps_done());
        let interrupt = attempts.interrupt();
        let observer = processes.observer().clone();
        let watched = observer.watch(interrupt, folder.is_some());
        watched.map_err(|error| RunError::input(format!("cannot watch for signals: {error}")))?;
        let mut checkpoints = Checkpoints::new(
            &mut folder,
            settings,
            description,
            saved,
            &evaluations,
            space.clone(),
            processes,
        )?;
        checkpoints.writer.on_progress(trainer.pipeline().keep_alive());
        copies.iter_mut().for_each(|copies| copies.on_progress(trainer.pipeline().keep_alive()));
        checkpoints.timing.announce(&mut trainer);
        if let Some(folder) = &folder {
            let refusal = |error| {
                let fault = Fault::of_full_disk(&error, start, || space.bytes());
                RunError::input(error).with_fault(fault)
            };
            let written = folder.write_overview(&overview).map_err(refusal);
            written.map_err(|error| abandon(&mut trainer, error))?;
            observer.begin(&overview, start, run.steps);
        }
        let mut log = RunLog::new(folder, observer, efficiency, start, settings, space, hosts)?;
        processes.leave_faults_in(&run.out);
        let mut saves = Saves { checkpoints: &mut checkpoints, copies: copies.as_mut() };
        let between = Between { evaluations: &mut evaluations, mover: mover.as_mut() };
        let taken = steps(&mut trainer, run.steps, attempts, between, &mut saves, &mut log);
        let taken = taken.map_err(|stop| match stop {
            Stop::Rank(error) => log.failed_step(trainer.pipeline().step_failure(), &error),
            Stop::Other(failure) => abandon(&mut trainer, failure),
        });
        // The display ends first, so that it does not draw over the error.
        let traced = log.finish();
        let taken = settle(settings, processes, taken);
        // If a step failed and the timeline cannot be written, the failed step is reported.
        let grows = taken?;
        traced?;
        let done = trainer.steps_done();
        let reason = match (done == run.steps, evaluations.are_exhausted()) {
            _ if evaluations.left_out().is_some() => Reason::Signal,
            (true, _) => Reason::Complete,
            (false, true) => Reason::LossNoLongerFalls,
            (false, false) => Reason::Signal,
        };
        let saved = settle(settings, processes, checkpoints.finish(&mut trainer))?;
        attempts.interrupt().note_end();
        copies.into_iter().for_each(|copies| copies.finish(saved.as_deref(), run.deadline()));
        processes.note_end();
        // `launch` continues a run whose slow host it replaces, or that it lets grow.
        let is_replaced = log.replaces_slow && SLOW_RANKS.find(&run.out).is_some();
        let continues = reason == Reason::Signal && (is_replaced || grows);
        if processes.is_leader() && !continues {
            let (saved, best) = (saved.as_deref(), evaluations.lowest());
            let has_timeline = run.out.join(TIMELINE).is_file();
            evaluations.left_out().into_iter().for_each(|step| log.note(&left_out(step)));
            log.end(&Ending { done, reason, saved, best, out: &run.out, has_timeline });
        }
        match reason {
            Reason::Complete | Reason::LossNoLongerFalls => Ok(()),
            Reason::Signal => {
                let sentence = "the end of the run was requested, and its state is saved";
                // The observer has already reported it.
                Err(RunError::new(ErrorKind::Interrupted, sentence).reported_elsewhere())
            }
        }
    }
}

/// Reports a failure if the ranks are processes, which a launcher ends as soon as one of them has failed.
/// Otherwise [`Run::train`](crate::run::Run::train) reports the failure, unless the run continues after it.
fn settle<T>(
    settings: &Settings,
    processes: &mut ProcessGroup,
    outcome: Result<T, RunError>,
) -> Result<T, RunError> {
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
    Other(RunError),
}

impl Stop {
    /// Why a step or an evaluation failed. Data that one process cannot read is its own failure: its ranks
    /// are well. In an evaluation, the other processes would wait for them.
    fn of_step(error: PipelineError) -> Self {
        match error {
            PipelineError::Data(_) => Self::Other(failure(&error)),
            error => Self::Rank(error),
        }
    }

    /// Why a move of layers failed.
    fn of_move(failure: MoveFailure) -> Self {
        match failure {
            MoveFailure::Rank(error) => Self::Rank(error),
            MoveFailure::Other(error) => Self::Other(error),
        }
    }
}

/// The parts that save the state of a run.
struct Saves<'a> {
    checkpoints: &'a mut Checkpoints,
    copies: Option<&'a mut StateCopies>,
}

/// The parts of a run that use the ranks between two steps.
struct Between<'a> {
    evaluations: &'a mut Evaluations,
    mover: Option<&'a mut LayerMover>,
}

/// The sentence of the leader if another process has received a signal.
const OTHER_PROCESS: &str =
    "a signal to another process of the run has arrived: the run ends with a checkpoint";

/// Says that the evaluation after a step is left to the resumed run.
fn left_out(step: u64) -> String {
    format!("the evaluation after step {step} is left out; the run makes up for it when it resumes")
}

/// Evaluates after the last step of the run, because an earlier process has left that out, and saves the results.
/// Returns whether the evaluation is left out again.
fn make_up(
    trainer: &mut Trainer,
    attempts: &Attempts,
    evaluations: &mut Evaluations,
    checkpoints: &mut Checkpoints,
    log: &mut RunLog,
) -> Result<bool, Stop> {
    let mut metrics = Metrics { step: trainer.steps_done(), ..Metrics::default() };
    let evaluated = evaluations.after_step(trainer, &mut metrics, attempts.must_end());
    let evaluated = evaluated.map_err(Stop::of_step)?;
    if evaluated == Evaluated::LeftOut {
        return Ok(true);
    }
    log.evaluation(&metrics).map_err(Stop::Other)?;
    let is_best = evaluated == Evaluated::Best;
    checkpoints.after_evaluation(trainer, evaluations, is_best).map_err(Stop::Other)?;
    Ok(false)
}

/// The reasons not to begin the next step during a step. They are the same in all processes.
#[derive(Clone, Copy, Debug, Default)]
struct AfterStep {
    /// The run has no further step.
    is_last: bool,
    /// A signal asks for the end of the run, which ends with this step.
    is_interrupted: bool,
    /// A checkpoint reads the state.
    is_checkpoint_due: bool,
    /// An evaluation uses the ranks.
    is_evaluation_due: bool,
    /// A copy in memory reads the state.
    is_copy_due: bool,
    /// Layers may move.
    is_move_due: bool,
    /// The run may end with the next step, for a reason that is known only after this one.
    may_end: bool,
}

impl AfterStep {
    /// Returns whether nothing after the step needs the ranks or their state before the next step.
    fn may_begin_next(self) -> bool {
        let Self { is_last, is_interrupted, is_checkpoint_due, is_evaluation_due, .. } = self;
        let Self { is_copy_due, is_move_due, may_end, .. } = self;
        let uses_state = is_checkpoint_due || is_evaluation_due || is_copy_due || is_move_due;
        !(is_last || is_interrupted || uses_state || may_end)
    }
}

/// Runs steps until all are finished or one is interrupted. Returns whether this process has asked for the
/// end so that the run can grow.
fn steps(
    trainer: &mut Trainer,
    steps: u64,
    attempts: &Attempts,
    Between { evaluations, mut mover }: Between<'_>,
    Saves { checkpoints, copies }: &mut Saves<'_>,
    log: &mut RunLog,
) -> Result<bool, Stop> {
    let (mut grows, mut interrupted) = (false, false);
    if evaluations.left_out().is_some() {
        interrupted = make_up(trainer, attempts, evaluations, checkpoints, log)?;
    }
    while trainer.steps_done() < steps && !evaluations.are_exhausted() {
        interrupted |= attempts.must_end();
        if interrupted && !trainer.has_begun_next() {
            break;
        }
        let number = trainer.steps_done() + 1;
        if checkpoints.saves_or_never_does(number) && log.is_growth_requested() {
            attempts.interrupt().request();
            grows = true;
        }
        // An interval that was chosen since the next step began counts from that step on.
        let is_due = checkpoints.is_due(number) && !trainer.has_begun_after_next();
        let after_step = |number| AfterStep {
            is_last: number == steps,
            is_interrupted: interrupted,
            is_checkpoint_due: checkpoints.is_due(number),
            is_evaluation_due: evaluations.are_due(number),
            is_copy_due: copies.as_ref().is_some_and(|copies| copies.are_due(number)),
            is_move_due: mover.as_ref().is_some_and(|mover| mover.is_due(number)),
            // `launch` ends the run after any step to replace the host of a slow rank. To let it grow, this
            // process asks for the end before the step with the checkpoint begins. Without checkpoints it may
            // ask before any step, and the steps that have begun by then are finished.
            may_end: log.replaces_slow || log.can_grow() && checkpoints.is_due(number + 1),
        };
        let after = AfterStep { is_checkpoint_due: is_due, ..after_step(number) };
        let ahead = match (after.may_begin_next(), after_step(number + 1).may_begin_next()) {
            (false, _) => 0,
            (true, false) => 1,
            (true, true) => 2,
        };
        let step = trainer.step_ahead_by(ahead);
        let (mut metrics, report) = step.map_err(Stop::of_step)?;
        let was_interrupted = interrupted;
        interrupted |= report.interrupted || attempts.must_end();
        let evaluated = evaluations.after_step(trainer, &mut metrics, interrupted).map_err(Stop::of_step)?;
        interrupted |= evaluated == Evaluated::LeftOut;
        if interrupted && !was_interrupted && !attempts.interrupt().is_requested() {
            log.note(OTHER_PROCESS);
        }
        copies.iter_mut().for_each(|copies| copies.settle());
        log.require_folder().map_err(|error| Stop::Other(checkpoints.lost(&error)))?;
        checkpoints.timing.step(&report);
        checkpoints.poll(&metrics, evaluations).map_err(Stop::Other)?;
        let chosen = checkpoints.timing.describe(&mut metrics);
        mover.iter_mut().filter(|_| log.is_leader()).for_each(|mover| mover.observe(&report.timeline));
        log.step(&mut metrics, report).map_err(Stop::Other)?;
        log.note_interval(chosen);
        log.note_samples(&metrics);
        // A step that has begun is finished.
        let ends = (interrupted && !trainer.has_begun_next())
            || evaluations.are_exhausted()
            || trainer.steps_done() == steps;
        // The last state is saved on the disk at once.
        if let Some(copies) = copies.as_mut().filter(|_| !ends) {
            copies.begin_copy(trainer, &checkpoints.description).map_err(Stop::Other)?;
        }
        let is_best = evaluated == Evaluated::Best;
        checkpoints.after_step(trainer, CheckpointReason { is_due, is_best }).map_err(Stop::Other)?;
        if ends {
            break;
        }
        if let Some(mover) = mover.as_mut().filter(|_| after.is_move_due) {
            let moved = mover.after_step(trainer, log.is_leader(), |sentence| log.note(sentence));
            if let Some(moved) = moved.map_err(Stop::of_move)? {
                log.moved(&moved).map_err(Stop::Other)?;
            }
        }
    }
    Ok(grows)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(change: impl Fn(&mut AfterStep), expected: bool) {
        let mut after = AfterStep::default();
        change(&mut after);
        assert_eq!(after.may_begin_next(), expected, "{after:?}");
    }

    #[test]
    fn a_step_begins_early_if_nothing_needs_the_state_before_it() {
        check(|_| (), true);
        check(|after| after.is_last = true, false);
        check(|after| after.is_interrupted = true, false);
        check(|after| after.is_checkpoint_due = true, false);
        check(|after| after.is_evaluation_due = true, false);
        check(|after| after.is_copy_due = true, false);
        check(|after| after.is_move_due = true, false);
        check(|after| after.may_end = true, false);
        check(|after| (after.is_copy_due, after.may_end) = (true, true), false);
    }
}
