//! A running pipeline, and the road of a step or an evaluation through it: split the batch, check it, agree
//! on it with the other processes, plan the step, send each rank its input, and merge the reports.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use pipewright_schedule::{Slices, ValidatedProgram};

use super::accumulation::Accumulation;
use super::error::PipelineError;
use super::ranks::Ranks;
use super::setup::Setup;
use super::step_failure::StepFailure;
use super::step_gap::{AfterProgram, StepEnd};
use super::step_plan::{CheckedBatch, StepPlan};
use super::summary::{EvalSummary, StepSummary, evaluation, training};
use super::verified_step::Verifier;
use crate::batch::{Batch, Purpose, StepForm, UnsplitPart};
use crate::driver::{Command, FailedRank, StepReply};
use crate::executor::RankReport;
use crate::failure::StepError;
use crate::mesh::Mesh;
use crate::tensor::{Boundary, pack};

/// Running ranks, each with its stages. Dropping the pipeline ends them.
pub struct Pipeline {
    pub(super) setup: Setup,
    pub(super) ranks: Ranks,
    pub(super) accumulation: Accumulation,
    pub(super) verifier: Verifier,
    /// The last step, if it failed.
    failure: Option<StepFailure>,
    /// The end of the last command in which all ranks ran a program, if it was a training step.
    pub(super) last_end: Option<StepEnd>,
}

impl Pipeline {
    /// Lets the ranks find out which parameters their stages share, and returns the pipeline.
    pub(super) fn new(setup: Setup, ranks: Ranks) -> Result<Self, PipelineError> {
        let accumulation = Accumulation::new(setup.loss_scale());
        let verifier = Verifier::new(setup.config().verify);
        let mut pipeline = Self { setup, ranks, accumulation, verifier, failure: None, last_end: None };
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

    /// Returns the program that the pipeline runs.
    pub fn program(&self) -> &ValidatedProgram {
        self.setup.program()
    }

    /// Returns the mesh of pipelines and replicas, which converts ranks of the world to ranks of the program.
    pub fn mesh(&self) -> Mesh {
        *self.setup.mesh()
    }

    /// Returns the number of microbatches of a step, over all replicas.
    pub fn microbatches(&self) -> u32 {
        self.setup.microbatches_for(Purpose::Accumulate)
    }

    /// Returns the number of microbatches of an evaluation, over all replicas.
    pub fn eval_microbatches(&self) -> u32 {
        self.setup.microbatches_for(Purpose::Evaluate)
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
    /// [`Cause::LostPeer`](crate::failure::Cause::LostPeer)).
    pub fn step(
        &mut self,
        inputs: impl Boundary,
        targets: impl Boundary,
        learning_rate: f64,
    ) -> Result<StepSummary, PipelineError> {
        let batch = split_whole(inputs, targets, self.microbatches());
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
    /// If suspicious steps are repeated ([`PipelineConfig::verify`](super::PipelineConfig::verify)), this call or a
    /// later one may compute the batch again: [`StepSummary::repeated`] of the later one then has the summary that
    /// counts.
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
        let microbatches = self.eval_microbatches();
        let batch = match targets {
            Some(targets) => split_whole(inputs, targets, microbatches),
            None => split_whole(inputs, (), microbatches).map(Batch::without_targets),
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

    /// Takes a training step. A suspicious one is repeated with all its batches, if the configuration says so.
    fn train(
        &mut self,
        batch: Result<Batch, PipelineError>,
        purpose: Purpose,
    ) -> Result<StepSummary, PipelineError> {
        if self.setup.program().is_forward_only() {
            return Err(PipelineError::ForwardOnly);
        }
        let start = Instant::now();
        let mut batch = self.agreed(batch, purpose)?;
        self.verifier.keep(&batch, !self.accumulation.is_pending());
        let (done, mut repeated) = (self.ranks.step(), Vec::new());
        loop {
            batch = match self.compute(batch, start) {
                Ok(summary) => match self.verifier.next_batch() {
                    Some(next) => {
                        repeated.push(summary);
                        next
                    }
                    None => {
                        if matches!(purpose, Purpose::Update { .. }) {
                            self.verifier.end_update(summary.gradient_norm);
                        }
                        return Ok(StepSummary { repeated, ..summary });
                    }
                },
                Err(error) => {
                    let Some(first) = self.verifier.repeat(&error) else {
                        if let Some(failure) = &mut self.failure {
                            self.verifier.describe(failure);
                        }
                        return Err(error);
                    };
                    repeated.clear();
                    self.ranks.return_to(done);
                    self.failure = None;
                    first
                }
            }
        }
    }

    /// Lets all ranks compute a batch, and update if it is the last one of its step. `start` is the time of the
    /// call.
    fn compute(&mut self, batch: CheckedBatch, start: Instant) -> Result<StepSummary, PipelineError> {
        let unit = self.accumulation.unit(batch.unit())?;
        let (at, loss_scale) = (self.ranks.next_step(), self.accumulation.loss_scale());
        let plan = StepPlan::training(at, &batch, unit, loss_scale, self.verifier.verification());
        let updates = plan.updates();
        let origin = Instant::now();
        let mut reports = self.run(&plan, batch, origin)?;
        let difference = reports.iter_mut().find_map(|report| report.difference.take());
        // The ranks have the gradients, also if their reports do not fit together.
        self.accumulation.end_batch((!updates).then_some(unit));
        let summary = training(&self.setup, plan, reports, start.elapsed());
        let mut summary = summary.map_err(|source| PipelineError::Cut { source })?;
        self.note_gap(origin, &mut summary);
        if updates {
            self.accumulation.update(self.setup.config().loss_scaling, &mut summary);
        } else {
            self.accumulation.add(&mut summary);
        }
        self.verifier.end_batch(difference, &mut summary);
        Ok(summary)
    }

    /// Adds the gap before this step to its summary, and notes the end of the step.
    fn note_gap(&mut self, origin: Instant, summary: &mut StepSummary) {
        let StepSummary { timeline, sums, update, .. } = &*summary;
        let after = AfterProgram { sums, update };
        let end = StepEnd::new(origin, timeline, &after, self.setup.mesh().tensor);
        let last = self.last_end.replace(end);
        summary.gap = last.and_then(|last| last.gap_before(origin, &summary.timeline));
    }

    /// Runs the program of evaluations.
    fn evaluate(&mut self, batch: Result<Batch, PipelineError>) -> Result<EvalSummary, PipelineError> {
        self.setup.prepare_evaluation()?;
        let batch = self.agreed(batch, Purpose::Evaluate)?;
        let plan = StepPlan::evaluation(self.ranks.next_step(), &batch);
        let reports = self.run(&plan, batch, Instant::now())?;
        self.last_end = None;
        evaluation(&self.setup, plan, reports).map_err(|source| PipelineError::Cut { source })
    }

    /// Checks a batch, and compares it with the other processes' batches. A batch that one process cannot use
    /// is an error in all of them, so that none waits.
    fn agreed(
        &mut self,
        batch: Result<Batch, PipelineError>,
        purpose: Purpose,
    ) -> Result<CheckedBatch, PipelineError> {
        self.failure = None;
        let batch = batch.and_then(|batch| CheckedBatch::new(&self.setup, self.ranks.ids(), batch, purpose));
        if self.setup.is_whole_world(self.ranks.ids().count()) {
            return batch;
        }
        let form = Arc::new(match &batch {
            Ok(batch) => batch.form(),
            Err(error) => StepForm::refused(purpose, error.to_string()),
        });
        let (done, next) = (self.ranks.step(), self.ranks.next_step());
        self.ranks.begin(next);
        let replies = self.ranks.command(|reply| Command::Agree {
            step: next.step,
            attempt: next.attempt,
            form: form.clone(),
            reply,
        });
        let agreed = replies.and_then(|replies| {
            self.ranks.await_ranks(&replies, |agreed| agreed).map_err(|error| self.fail(error, false))
        });
        self.ranks.return_to(done);
        let mut batch = batch?;
        if let Some(agreed) = agreed?.into_iter().next() {
            batch.adopt(&self.setup, agreed?);
        }
        Ok(batch)
    }

    /// Lets all ranks take a step whose timeline starts at `origin`, and returns their reports.
    fn run(
        &mut self,
        plan: &StepPlan,
        batch: CheckedBatch,
        origin: Instant,
    ) -> Result<Vec<RankReport>, PipelineError> {
        let mut inputs = plan.inputs_of(&self.setup, self.ranks.ids(), batch, origin).into_iter();
        let done = self.ranks.step();
        self.ranks.begin(plan.at());
        let replies = self.ranks.command(|reply| {
            let input = inputs.next().expect("one input for each rank");
            Command::Step { input: Box::new(input), reply }
        });
        // A refused command does not count as a step.
        let replies = replies.inspect_err(|_| self.ranks.return_to(done))?;
        let (mut any_updated, mut failed_ranks) = (false, Vec::<FailedRank>::new());
        let reports = self.ranks.await_ranks(&replies, |StepReply { outcome, has_updated, failed }| {
            any_updated |= has_updated;
            failed_ranks.extend(failed);
            outcome
        });
        let reports = reports.map_err(|error| {
            let failure =
                StepFailure::new(error.clone(), failed_ranks, self.setup.board(), self.setup.mesh());
            self.failure = Some(failure);
            self.fail(error, any_updated)
        });
        if !plan.updates() {
            // Only an update ends a step. Random numbers depend on the step, and a resumed run must draw the
            // same ones.
            self.ranks.return_to(done);
        }
        Ok(reports?.into_iter().flatten().collect())
    }

    /// Drops all gradients after a failed step, and prepares the ranks for the next one. Returns the error of
    /// the step.
    pub(super) fn fail(&mut self, error: StepError, any_updated: bool) -> PipelineError {
        self.accumulation.drop_gradients();
        self.last_end = None;
        self.ranks.fail(error, any_updated)
    }

    /// Returns where the last step or evaluation failed, in the schedule and on each rank; `None` if it did
    /// not fail, or was refused before it began.
    pub fn step_failure(&self) -> Option<&StepFailure> {
        self.failure.as_ref()
    }

    /// Announces a number to all processes. The summary of a step has the number of the process of the first
    /// rank ([`StepSummary::announced`]), so the processes of a run can follow one decision, such as the number of
    /// steps between two checkpoints.
    pub fn announce(&self, number: u64) {
        self.setup.config().announcement.store(number, Ordering::Relaxed);
    }

    /// Returns a function that notifies the ranks of other processes that this process is busy between two
    /// steps, so that they wait for it longer than the deadline.
    pub fn keep_alive(&self) -> impl Fn() + Send + use<> {
        self.ranks.keep_alive()
    }

    /// Notifies the ranks of other processes that this process cannot continue, so that they do not wait for
    /// it.
    pub fn abandon(&self, reason: &str) {
        self.ranks.abandon(reason);
    }
}

/// Splits a whole batch. A process without the stages that take inputs and targets may pass `()` for both.
pub(crate) fn split_whole(
    inputs: impl Boundary,
    targets: impl Boundary,
    microbatches: u32,
) -> Result<Batch, PipelineError> {
    let batch = Batch::split_parts(&pack(inputs), &pack(targets), &microbatches.into());
    batch.map_err(|UnsplitPart { what, source }| PipelineError::Split { what, source })
}
