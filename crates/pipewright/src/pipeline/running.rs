//! A running pipeline: how it runs a step or an evaluation. It splits the batch, checks it, agrees on it with
//! the other processes, plans the step, sends each rank its input, and merges the reports. `training_step.rs`
//! begins and finishes training steps, between which the caller may continue.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use crossbeam_channel::Receiver;
use pipewright_schedule::{Slices, ValidatedProgram};

use super::accumulation::Accumulation;
use super::answers::Answers;
use super::begun::{Begin, Condition, Running, Waiting};
use super::error::{Mistake, PipelineError};
use super::ranks::Ranks;
use super::report_link::ReportLink;
use super::setup::Setup;
use super::step_failure::StepFailure;
use super::step_gap::{AfterProgram, StepEnd};
use super::step_plan::{CheckedBatch, StepAttempt, StepPlan};
use super::summary::{EvalSummary, StepSummary, evaluation};
use super::verified_step::Verifier;
use crate::batch::{Batch, Purpose, SplitError, SplitRule, StepForm, UnsplitPart};
use crate::driver::{Command, FailedRank, StepReply};
use crate::executor::{Follow, OpenReport, RankReport, StepOrigin, agreed_before};
use crate::failure::{Cause, StepError};
use crate::ids::{Attempt, StepNumber, WorldRank};
use crate::mesh::Mesh;
use crate::tensor::{Boundary, pack};

/// The answers of all ranks to a step.
pub(super) struct StepAnswers {
    /// The reports of each rank.
    pub(super) results: Answers<Vec<RankReport>>,
    pub(super) any_updated: bool,
    /// The report of the rank of this process if the ranks have begun the next step, and the processes exchange
    /// their reports.
    pub(super) open: Option<OpenReport>,
    /// The last batch that all processes have, as far as the ranks know.
    pub(super) granted: Attempt,
    /// Whether the ranks have begun the batch before they had updated with the one before.
    pub(super) overlaps: bool,
    failed_ranks: Vec<FailedRank>,
    /// The error of a rank that did not stop in the next step, which the ranks got before this one failed.
    pub(super) lost: Option<StepError>,
}

/// Running ranks, each with its stages. Dropping the pipeline ends them. It stops a step that has begun and is
/// not finished, and waits for its ranks until the deadline.
pub struct Pipeline {
    pub(super) setup: Setup,
    pub(super) ranks: Ranks,
    pub(super) accumulation: Accumulation,
    pub(super) verifier: Verifier,
    /// The training batches that the ranks have and that are not finished, in order; an error if the ranks
    /// could not get the batch. At most three with the one that waits.
    pub(super) begun: VecDeque<Result<Running, PipelineError>>,
    /// The batches that the ranks get after the running ones.
    pub(super) waiting: VecDeque<Waiting>,
    /// In several processes, the last batch that all of them have: its ranks have begun it, or do so without further messages.
    pub(super) granted: Attempt,
    /// Exchanges reports between processes; `None` within one process.
    pub(super) report_link: Option<ReportLink>,
    /// How often the processes have compared batches with messages of their own.
    pub(super) comparisons: u64,
    /// The batches of the step that was begun last, as [`Running`](super::begun::Running) has them.
    pub(super) step_batches: Vec<Arc<CheckedBatch>>,
    /// The number of training batches that [`Pipeline::finish`] has ended.
    pub(super) finished_batches: u64,
    /// The end of the last training batch that is finished.
    pub(super) finished: Option<Instant>,
    /// The last step, if it failed.
    pub(super) failure: Option<StepFailure>,
    /// The end of the last command in which all ranks ran a program, if it was a training step.
    pub(super) last_end: Option<StepEnd>,
}

impl Pipeline {
    /// Lets the ranks find out which parameters their stages share, and returns the pipeline.
    pub(super) fn new(setup: Setup, ranks: Ranks) -> Result<Self, PipelineError> {
        let accumulation = Accumulation::new(&setup.config, None);
        let verifier = Verifier::new(setup.config.verify);
        let report_link = setup.reports().map(ReportLink::new);
        let mut pipeline = Self {
            setup,
            ranks,
            accumulation,
            verifier,
            begun: VecDeque::new(),
            waiting: VecDeque::new(),
            granted: Attempt::default(),
            report_link,
            comparisons: 0,
            step_batches: Vec::new(),
            finished_batches: 0,
            finished: None,
            failure: None,
            last_end: None,
        };
        pipeline.find_shared()?;
        Ok(pipeline)
    }

    /// Lets the ranks find out which parameters their stages share.
    pub(super) fn find_shared(&mut self) -> Result<(), PipelineError> {
        let attempt = self.ranks.attempt();
        let replies = self.ranks.command(|reply| Command::FindShared { attempt, reply })?;
        self.ranks.await_ranks(&replies, |result| result)?;
        Ok(())
    }

    /// Returns how often the processes have compared batches with messages of their own, for tests.
    #[cfg(feature = "testing")]
    pub fn comparisons(&self) -> u64 {
        self.comparisons
    }

    /// Returns the program that the pipeline runs.
    pub fn program(&self) -> &ValidatedProgram {
        &self.setup.program
    }

    /// Returns the mesh of pipelines and replicas, which converts ranks of the world to ranks of the program.
    pub fn mesh(&self) -> Mesh {
        self.setup.mesh
    }

    /// Returns the number of microbatches of a step, over all replicas.
    pub fn microbatches(&self) -> u32 {
        self.setup.microbatches_for(Purpose::Accumulate)
    }

    /// Returns the number of microbatches of an evaluation, over all replicas.
    pub fn eval_microbatches(&self) -> u32 {
        self.setup.microbatches_for(Purpose::Evaluate)
    }

    /// Returns how the batch of a step is split.
    pub(crate) fn split_rule(&self) -> SplitRule {
        SplitRule::shared(self.microbatches(), &self.setup.config.batch_shares)
    }

    /// Returns how the batch of an evaluation is split.
    pub(crate) fn eval_split_rule(&self) -> SplitRule {
        SplitRule::shared(self.eval_microbatches(), &self.setup.config.batch_shares)
    }

    /// Returns the number of slices of a microbatch.
    pub(crate) fn slices(&self) -> Slices {
        self.setup.slices()
    }

    /// Splits a batch into the program's microbatches along dimension 0, trains on it, and takes one
    /// optimizer step.
    ///
    /// # Errors
    /// When the batch cannot be split, or a rank fails. A failed step changes no parameter, and the pipeline
    /// can take the next step. If this is not possible, the next step returns an error
    /// ([`PipelineError::Diverged`],
    /// [`Cause::LostPeer`](crate::failure::Cause::LostPeer)). When a step was begun and is not finished
    /// ([`Pipeline::begin`]).
    pub fn step(
        &mut self,
        inputs: impl Boundary,
        targets: impl Boundary,
        learning_rate: f64,
    ) -> Result<StepSummary, PipelineError> {
        let batch = split_whole(inputs, targets, &self.split_rule());
        self.train(batch, Purpose::Update { learning_rate })
    }

    /// Like [`Pipeline::step`], with a batch that is split already and may have side inputs.
    ///
    /// # Errors
    /// As [`Pipeline::step`].
    pub fn step_batch(&mut self, batch: Batch, learning_rate: f64) -> Result<StepSummary, PipelineError> {
        self.train(Ok(batch), Purpose::Update { learning_rate })
    }

    /// Like [`Pipeline::step_batch`], without an update. The gradients are kept, and the gradients of the
    /// next steps are added to them. The step that updates takes the mean over all rows since the last
    /// update, over all their tokens ([`Batch::weighted`]), or their sum ([`Batch::summed`]). All batches
    /// together are one step, with the random numbers of a batch that has all their rows. They may have
    /// different numbers of rows. A step that fails drops them.
    ///
    /// If suspicious steps are repeated ([`PipelineConfig::verify`](super::PipelineConfig::verify)), this
    /// call or a later one may compute the batch again: [`StepSummary::repeated`] of the later one then has
    /// the summary that counts.
    ///
    /// # Errors
    /// As [`Pipeline::step`].
    pub fn accumulate(&mut self, batch: Batch) -> Result<StepSummary, PipelineError> {
        self.train(Ok(batch), Purpose::Accumulate)
    }

    /// Runs the forward part of the program on a batch, or the program of evaluations
    /// ([`PipelineConfig::evaluation`](super::PipelineConfig::evaluation)), without a tape. With targets it
    /// returns losses too. Parameters and accumulated gradients do not change, but an evaluation that fails
    /// drops the gradients.
    ///
    /// # Errors
    /// As [`Pipeline::step`].
    pub fn eval(
        &mut self,
        inputs: impl Boundary,
        targets: Option<impl Boundary>,
    ) -> Result<EvalSummary, PipelineError> {
        let rule = self.eval_split_rule();
        let batch = match targets {
            Some(targets) => split_whole(inputs, targets, &rule),
            None => split_whole(inputs, (), &rule).map(Batch::without_targets),
        };
        self.evaluate(batch.map(Batch::keep_outputs))
    }

    /// Like [`Pipeline::eval`], with a batch that is split already and may have side inputs.
    ///
    /// # Errors
    /// As [`Pipeline::step`].
    pub fn eval_batch(&mut self, batch: Batch) -> Result<EvalSummary, PipelineError> {
        self.evaluate(Ok(batch.keep_outputs()))
    }

    /// Like [`Pipeline::eval_batch`], without outputs unless the batch asks for them
    /// ([`Batch::keep_outputs`]). The logits of all microbatches of a language model take much memory.
    ///
    /// # Errors
    /// As [`Pipeline::step`].
    pub fn eval_losses(&mut self, batch: Batch) -> Result<EvalSummary, PipelineError> {
        self.evaluate(Ok(batch))
    }

    /// Adds the gap before this step to its summary, and notes the end of the step.
    pub(super) fn note_gap(&mut self, origin: Instant, summary: &mut StepSummary) {
        let StepSummary { timeline, sums, update, .. } = &*summary;
        let after = AfterProgram { sums, update };
        let end = StepEnd::new(origin, timeline, &after, self.setup.mesh.tensor);
        let last = self.last_end.replace(end);
        summary.gap = last.and_then(|last| last.gap_before(origin, &summary.timeline));
    }

    /// Runs the program of evaluations.
    fn evaluate(&mut self, batch: Result<Batch, PipelineError>) -> Result<EvalSummary, PipelineError> {
        self.require_none_begun()?;
        self.setup.prepare_evaluation()?;
        let purpose = Purpose::Evaluate;
        let batch = self.checked(batch, purpose);
        let batch = self.agreed(Waiting {
            batch,
            purpose,
            when: Begin::Always,
            common: None,
            start: Instant::now(),
        })?;
        let plan = StepPlan::evaluation(self.ranks.next_step(), &batch);
        let reports = self.run(&plan, batch)?;
        self.last_end = None;
        evaluation(&self.setup, plan, reports).map_err(PipelineError::slices)
    }

    /// Checks a batch.
    pub(super) fn checked(
        &self,
        batch: Result<Batch, PipelineError>,
        purpose: Purpose,
    ) -> Result<CheckedBatch, PipelineError> {
        CheckedBatch::new(&self.setup, self.ranks.ids(), batch?, purpose)
    }

    /// Returns whether all ranks of the world are in this process.
    pub(super) fn is_whole_world(&self) -> bool {
        self.setup.is_whole_world(self.ranks.ids().count())
    }

    /// Compares a batch with the other processes' batches. A batch that one process cannot use is an error in
    /// all of them, so that none waits.
    pub(super) fn agreed(&mut self, waiting: Waiting) -> Result<CheckedBatch, PipelineError> {
        let Waiting { batch, purpose, common, .. } = waiting;
        self.failure = None;
        if self.is_whole_world() {
            return batch;
        }
        let form = match &batch {
            Ok(batch) => batch.form(),
            Err(error) => StepForm::refused(purpose, error.to_string()),
        };
        if let Some(agreed) = agreed_before(common, form.clone()) {
            let mut batch = batch?;
            batch.adopt(&self.setup, agreed?);
            return Ok(batch);
        }
        self.comparisons += 1;
        let form = Arc::new(form);
        let (done, next) = (self.ranks.step(), self.ranks.next_step());
        self.ranks.begin(next);
        let replies = self.ranks.command(|reply| Command::Agree {
            step: next.step,
            attempt: next.attempt,
            form: form.clone(),
            reply,
        });
        let agreed = replies.and_then(|replies| {
            let agreed = self.ranks.await_ranks(&replies, |agreed| agreed);
            agreed.map_err(|error| self.fail(next.step, error, false))
        });
        self.ranks.return_to(done);
        let mut batch = batch?;
        if let Some(agreed) = agreed?.into_iter().next() {
            batch.adopt(&self.setup, agreed?);
        }
        Ok(batch)
    }

    /// Lets all ranks evaluate, and returns their reports.
    fn run(&mut self, plan: &StepPlan, batch: CheckedBatch) -> Result<Vec<RankReport>, PipelineError> {
        let replies = self.send_inputs(plan, batch, (&StepOrigin::default(), None), &Condition::None)?;
        let answers = self.collect(plan.at, &replies);
        self.conclude(plan.at, answers)
    }

    /// Sends every rank its input of a step, and returns the channel of their answers.
    pub(super) fn send_inputs(
        &mut self,
        plan: &StepPlan,
        batch: CheckedBatch,
        (origin, follow): (&StepOrigin, Option<&Follow>),
        condition: &Condition,
    ) -> Result<Receiver<(WorldRank, StepReply)>, PipelineError> {
        let mut inputs = plan.inputs_of(&self.setup, self.ranks.ids(), batch, (origin, follow)).into_iter();
        self.ranks.begin(plan.at);
        let replies = self.ranks.command(|reply| {
            let input = Box::new(inputs.next().expect("one input for each rank"));
            match condition {
                Condition::None => Command::Step { input, gate: None, reply },
                Condition::Gate { gate, .. } => Command::Step { input, gate: Some(gate.clone()), reply },
                Condition::Offer(_) => Command::NextStep { input, reply },
            }
        });
        // A refused command does not count as a step.
        self.ranks.return_to(if replies.is_ok() { plan.last_step() } else { plan.done() });
        replies
    }

    /// Waits for the answers of all ranks to the step `at`.
    pub(super) fn collect(
        &mut self,
        at: StepAttempt,
        replies: &Receiver<(WorldRank, StepReply)>,
    ) -> StepAnswers {
        let (mut any_updated, mut failed_ranks) = (false, Vec::<FailedRank>::new());
        let (mut open, mut granted, mut overlaps) = (None, Attempt::default(), false);
        let results = self.ranks.collect(at, replies, |reply: StepReply| {
            any_updated |= reply.has_updated;
            failed_ranks.extend(reply.failed);
            open = open.take().or(reply.open);
            granted = granted.max(reply.granted);
            overlaps |= reply.overlaps;
            reply.outcome
        });
        StepAnswers { results, any_updated, open, granted, overlaps, failed_ranks, lost: None }
    }

    /// Returns the reports of all ranks on the step `at`, or the first failure, which ends the step.
    pub(super) fn conclude(
        &mut self,
        at: StepAttempt,
        answers: StepAnswers,
    ) -> Result<Vec<RankReport>, PipelineError> {
        let StepAnswers { results, any_updated, failed_ranks, lost, .. } = answers;
        let reports = self.ranks.conclude(at, results).map_err(|error| {
            let (board, mesh) = (&self.setup.board, &self.setup.mesh);
            let failure = StepFailure::new(error.clone(), failed_ranks, board, mesh);
            self.failure = Some(StepFailure { lost, ..failure });
            self.fail(at.step, error, any_updated)
        });
        Ok(reports?.into_iter().flatten().collect())
    }

    /// Drops all gradients after the failed step `at`, and prepares the ranks for the next one. Returns the
    /// error of the step.
    pub(super) fn fail(&mut self, at: StepNumber, error: StepError, any_updated: bool) -> PipelineError {
        self.accumulation.drop_gradients();
        self.last_end = None;
        self.ranks.fail(at, error, any_updated)
    }

    /// Returns where the last step or evaluation failed, in the schedule and on each rank; `None` if it did
    /// not fail, or was refused before it began.
    pub fn step_failure(&self) -> Option<&StepFailure> {
        self.failure.as_ref()
    }

    /// Announces a number to all processes. The summary of a step has the number of the process of the first
    /// rank ([`StepSummary::announced`]), so the processes of a run can follow one decision, such as the
    /// number of steps between two checkpoints. A rank reads the number when it has updated, so the summary
    /// of a step that has begun already may have this number or the one before; the later summaries have it.
    pub fn announce(&self, number: u64) {
        self.setup.config.announcement.store(number, Ordering::Relaxed);
    }

    /// Returns a function that notifies the ranks of other processes that this process is busy between two
    /// steps, so that they wait for it longer than the deadline.
    pub fn keep_alive(&self) -> impl Fn() + Send + use<> {
        self.ranks.keep_alive()
    }

    /// Notifies the ranks of other processes that this process cannot continue, so that they do not wait for
    /// it.
    pub fn abandon(&self, reason: &str) {
        self.ranks.abandon(Cause::Abandoned { message: reason.to_owned() });
    }

    /// Like [`Pipeline::abandon`], because of a mistake of the user, such as a file that this process can no
    /// longer read ([`Cause::WrongInput`]).
    pub fn refuse(&self, mistake: &str) {
        self.ranks.abandon(Cause::WrongInput { message: mistake.to_owned() });
    }
}

/// Splits a whole batch. A process without the stages that take inputs and targets may pass `()` for both.
pub(crate) fn split_whole(
    inputs: impl Boundary,
    targets: impl Boundary,
    rule: &SplitRule,
) -> Result<Batch, PipelineError> {
    let batch = Batch::split_parts(&pack(inputs), &pack(targets), rule);
    batch.map_err(|UnsplitPart { what, source }| unsplit(what, source))
}

/// Returns the error of a part of a batch that cannot be split.
pub(crate) fn unsplit(what: &str, reason: SplitError) -> PipelineError {
    let sentence = format!("the {what} cannot be split into microbatches: {reason}");
    PipelineError::Batch(Mistake::caused(sentence, reason))
}
