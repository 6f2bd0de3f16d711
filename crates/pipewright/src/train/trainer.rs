//! Language-model training: each step takes a batch of token rows and returns its metrics.
//!
//! A [`Trainer`] holds a running [`Pipeline`], the data and the learning rate. The caller asks for one step
//! at a time and decides what to show and when to stop.

use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Map, Value as Json};

use crate::batch::{Batch, Purpose, SplitRule};
use crate::checkpoint::{Checkpoint, TrainingState};
use crate::pipeline::{Begin, Pipeline, PipelineError, StepSummary};
use crate::train::accumulation::{batches_at, joined};
use crate::train::expert_balance::ExpertBalance;
use crate::train::metrics::Metrics;
use crate::train::preference::{ReferenceLogProbs, log_probs_of};
use crate::train::rate_schedule::RateSchedule;
use crate::train::sample::{Limits, continue_texts};
use crate::train::token_batch::split;
use crate::train::validation::{Validation, ValidationLosses};
use pipewright_data::{Cursor, DataError, TokenRows};
use pipewright_schedule::Slices;

/// A pipeline with its data.
pub struct Trainer {
    pipeline: Pipeline,
    rows: TokenRows,
    learning_rate: Box<dyn RateSchedule>,
    /// The rows of a batch.
    batch_rows: usize,
    /// The batches of a step, after the steps in which their number rises.
    batches: NonZeroU32,
    /// The steps in which the number of batches rises from 1.
    rampup_steps: u64,
    expert_balance: Option<ExpertBalance>,
    validation: Option<Validation>,
    /// The reference of preference training.
    reference: Option<Arc<ReferenceLogProbs>>,
    /// The next steps whose first batches were begun during earlier ones.
    ahead: VecDeque<NextStep>,
    steps_done: u64,
    /// The time that the run took before it was stopped; 0 if it was not.
    earlier: Duration,
    /// The time at which this trainer began its first step.
    began: Option<Instant>,
}

/// A step whose batches are read and whose first batch was begun. If they could not be read, the first batch is
/// the error.
struct NextStep {
    learning_rate: f64,
    /// The batches that were not begun, and the one that ends the step, which is the last of them.
    rest: VecDeque<Batch>,
    /// The input tokens of all batches.
    tokens: usize,
    /// The number of the first batch, counted over all batches of the pipeline.
    number: u64,
    /// The position in the data before the step.
    start: Cursor,
    /// The position in the data after the step.
    end: DataPosition,
}

/// A position in the training data, as the metrics show it.
struct DataPosition {
    tokens: u64,
    epoch: f64,
    source_rows: Vec<u64>,
}

impl DataPosition {
    fn of(rows: &TokenRows) -> Self {
        let (tokens, epoch, source_rows) = (rows.tokens_seen(), rows.epochs_seen(), rows.given_rows());
        Self { tokens, epoch, source_rows }
    }
}

/// Why a run cannot resume from a checkpoint.
#[derive(thiserror::Error)]
pub enum ResumeError {
    /// The data differs from the data of the checkpoint's run.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The pipeline cannot restore the state.
    #[error(transparent)]
    Pipeline(#[from] PipelineError),
}

pipewright_schedule::message_as_debug!(ResumeError);

impl Trainer {
    /// Returns a trainer whose batches have `batch_rows` rows, a multiple of the program's microbatches.
    pub fn new(
        pipeline: Pipeline,
        rows: TokenRows,
        batch_rows: usize,
        learning_rate: impl RateSchedule + 'static,
    ) -> Self {
        Self {
            pipeline,
            rows,
            learning_rate: Box::new(learning_rate),
            batch_rows,
            batches: NonZeroU32::MIN,
            rampup_steps: 0,
            expert_balance: None,
            validation: None,
            reference: None,
            ahead: VecDeque::new(),
            steps_done: 0,
            earlier: Duration::ZERO,
            began: None,
        }
    }

    /// Sums the gradients of `batches` batches before each update. The update equals the update of one batch
    /// with as many rows.
    pub fn accumulating(self, batches: NonZeroU32) -> Self {
        Self { batches, ..self }
    }

    /// Raises the number of batches of a step from 1 to the number of [`Trainer::accumulating`], evenly over the
    /// first `steps` steps of the run.
    pub fn with_rampup(self, steps: u64) -> Self {
        Self { rampup_steps: steps, ..self }
    }

    /// Changes the corrections of routers after each step by this rule, unless the update was skipped. They
    /// are parameters that are not trained.
    pub fn with_expert_balance(self, balance: ExpertBalance) -> Self {
        Self { expert_balance: Some(balance), ..self }
    }

    /// Sets the data of [`Trainer::evaluate`].
    pub fn with_validation(self, validation: Validation) -> Self {
        Self { validation: Some(validation), ..self }
    }

    /// Computes the log-probabilities of all sequences of preference training under the reference: the model without its
    /// adapters. All processes of a run must call it before the first step.
    ///
    /// # Errors
    /// As [`Trainer::evaluate`].
    pub fn compute_reference(&mut self) -> Result<ReferenceLogProbs, PipelineError> {
        let (rows, pipeline) = (self.batch_rows, &mut self.pipeline);
        let training = log_probs_of(&self.rows, rows, pipeline)?;
        let validation =
            self.validation.as_ref().map(|validation| log_probs_of(validation.rows(), rows, pipeline));
        Ok(ReferenceLogProbs { training, validation: validation.transpose()?.unwrap_or_default() })
    }

    /// Sets the log-probabilities under the reference that the losses of steps and evaluations take.
    pub fn set_reference(&mut self, reference: ReferenceLogProbs) {
        self.reference = Some(Arc::new(reference));
    }

    /// Trains on the next batch, or on the next batches if gradients are accumulated.
    ///
    /// # Errors
    /// As [`Pipeline::step`].
    pub fn step(&mut self) -> Result<(Metrics, StepSummary), PipelineError> {
        self.step_ahead_by(0)
    }

    /// Like [`Trainer::step`], but the ranks also begin the next step ([`Pipeline::begin`]), each as soon as
    /// its own part of this one has ended. Losses and parameters have the same bits. The next call must be a
    /// step again: until then, everything that needs the state between two steps is an error
    /// ([`PipelineError::StepBegun`]), such as an evaluation or [`Trainer::state`].
    ///
    /// The next step does not begin if routers are corrected after each step
    /// ([`Trainer::with_expert_balance`]), and if
    /// [`PipelineConfig::interrupt`](crate::pipeline::PipelineConfig::interrupt) is raised before a rank begins
    /// it ([`Trainer::has_begun_next`]). If its data cannot be read, the next call reports that, in every
    /// process.
    ///
    /// # Errors
    /// As [`Pipeline::step`]. The next step has no effect then.
    pub fn step_ahead(&mut self) -> Result<(Metrics, StepSummary), PipelineError> {
        self.step_ahead_by(1)
    }

    /// Like [`Trainer::step_ahead`], but up to so many of the next steps begin. The second one begins only if batches overlap
    /// ([`PipelineConfig::delayed`](crate::pipeline::PipelineConfig::delayed)): under some schedules, and between processes, a
    /// step overlaps with the one before only if it has begun two steps ahead.
    ///
    /// # Errors
    /// As [`Trainer::step_ahead`].
    pub fn step_ahead_by(&mut self, steps: usize) -> Result<(Metrics, StepSummary), PipelineError> {
        self.take_step(if self.goes_ahead() { steps } else { 0 })
    }

    /// Returns whether [`Trainer::step_ahead`] begins the next step. It is the same in all processes.
    pub fn goes_ahead(&self) -> bool {
        self.expert_balance.is_none()
    }

    /// Takes a step, during which up to `ahead` of the next ones begin.
    fn take_step(&mut self, ahead: usize) -> Result<(Metrics, StepSummary), PipelineError> {
        self.began.get_or_insert_with(Instant::now);
        let step = match self.ahead.pop_front() {
            Some(begun) if begun.number != self.pipeline.next_to_finish() => {
                return Err(PipelineError::FinishedElsewhere);
            }
            Some(begun) => begun,
            None if self.pipeline.has_begun() => return Err(PipelineError::StepBegun),
            None => self.begin(self.steps_done, Begin::Always)?,
        };
        let NextStep { learning_rate, rest, tokens, end, .. } = step;
        let report = self.finish(rest, learning_rate, ahead);
        // A failure drops the steps after this one.
        self.take_back_from(if report.is_err() { 0 } else { self.pipeline.next_to_begin() });
        let report = report?;
        if let Some(balance) = self.expert_balance.as_ref().filter(|_| !report.skipped) {
            self.pipeline.shift(balance.shifts(&report.expert_loads))?;
        }
        self.steps_done += 1;
        Ok((self.metrics(&report, learning_rate, tokens, end), report))
    }

    /// Goes back in the data to the step of a batch that has not begun: the pipeline has withdrawn it, because the interrupt
    /// flag was raised before a rank began it, or has dropped it.
    fn take_back_from(&mut self, batch: u64) {
        while let Some(taken_back) = self.ahead.pop_back_if(|step| step.number >= batch) {
            // The cursor was here, so the row exists.
            let _ = self.rows.seek(taken_back.start);
        }
    }

    /// Returns whether the ranks have begun the next step ([`Trainer::step_ahead`]). It is the same in all
    /// processes.
    pub fn has_begun_next(&self) -> bool {
        !self.ahead.is_empty()
    }

    /// Returns whether the ranks have begun the step after the next one too ([`Trainer::step_ahead_by`]). It is the same in all
    /// processes.
    pub fn has_begun_after_next(&self) -> bool {
        self.ahead.len() > 1
    }

    /// Reads the batches of the step after `done` steps, and begins the first of them, or the error if one
    /// cannot be read.
    fn begin(&mut self, done: u64, when: Begin) -> Result<NextStep, PipelineError> {
        let (start, learning_rate) = (self.rows.cursor(), self.learning_rate.at(done));
        let (read, number) = (self.next_batches(done), self.pipeline.next_to_begin());
        let batches = read.as_ref().map_or(0, VecDeque::len);
        let rest = match read {
            Ok(mut rest) => {
                self.begin_next(&mut rest, learning_rate, when)?;
                rest
            }
            Err(error) => {
                self.pipeline.begin_for(Err(error), Purpose::Update { learning_rate }, when)?;
                VecDeque::new()
            }
        };
        let tokens = batches * self.batch_rows * self.rows.seq_len();
        Ok(NextStep { learning_rate, rest, tokens, number, start, end: DataPosition::of(&self.rows) })
    }

    /// Begins the next batch of a step, which ends it if it is the last one.
    fn begin_next(
        &mut self,
        rest: &mut VecDeque<Batch>,
        learning_rate: f64,
        when: Begin,
    ) -> Result<(), PipelineError> {
        let Some(batch) = rest.pop_front() else { return Ok(()) };
        let purpose = if rest.is_empty() { Purpose::Update { learning_rate } } else { Purpose::Accumulate };
        self.pipeline.begin_for(Ok(batch), purpose, when)
    }

    /// Waits for the results of a step whose first batch was begun. Each of the others begins during the one
    /// before it.
    fn finish(
        &mut self,
        mut rest: VecDeque<Batch>,
        learning_rate: f64,
        ahead: usize,
    ) -> Result<StepSummary, PipelineError> {
        let mut earlier = Vec::new();
        while !rest.is_empty() {
            self.begin_next(&mut rest, learning_rate, Begin::Always)?;
            earlier.push(self.pipeline.finish()?);
        }
        while self.ahead.len() < ahead && self.pipeline.can_begin() {
            let done = self.steps_done + 1 + self.ahead.len() as u64;
            let next = self.begin(done, Begin::UnlessInterrupted)?;
            self.ahead.push_back(next);
        }
        Ok(joined(earlier, self.pipeline.finish()?))
    }

    /// Reads all batches of the step after `done` steps before any is computed. If one cannot be read, the next
    /// step begins with the same rows.
    fn next_batches(&mut self, done: u64) -> Result<VecDeque<Batch>, PipelineError> {
        let start = self.rows.cursor();
        let batches = batches_at(done, self.batches, self.rampup_steps);
        let read = (0..batches).map(|_| self.next_batch()).collect();
        if Result::is_err(&read) {
            // The cursor was here, so the row exists.
            let _ = self.rows.seek(start);
        }
        read
    }

    fn next_batch(&mut self) -> Result<Batch, PipelineError> {
        let reference = self.reference.as_ref().map(|reference| &*reference.training);
        let rule = (&self.pipeline.split_rule(), self.pipeline.slices());
        next_batch(&mut self.rows, self.batch_rows, rule, reference)
    }

    /// Returns the mean cross entropy per token of the validation data, in nats; `None` if there is no
    /// validation data. All processes of a run must call it after the same step.
    ///
    /// # Errors
    /// As [`Pipeline::eval`], and between two batches if
    /// [`PipelineConfig::interrupt`](crate::pipeline::PipelineConfig::interrupt) was raised in any process
    /// ([`PipelineError::Interrupted`]).
    pub fn evaluate(&mut self) -> Result<Option<f64>, PipelineError> {
        Ok(self.evaluate_sources()?.map(|losses| losses.loss))
    }

    /// Does what [`Trainer::evaluate`] does, and also returns the loss of each source of a mixture. An
    /// evaluation takes the rows of a mixture in an order in which as many microbatches as possible have rows
    /// of one source. A source's loss is the mean over these microbatches, so it takes no further time.
    ///
    /// # Errors
    /// As [`Trainer::evaluate`].
    pub fn evaluate_sources(&mut self) -> Result<Option<ValidationLosses>, PipelineError> {
        let pipeline = &mut self.pipeline;
        let reference = self.reference.as_ref().map(|reference| &*reference.validation);
        self.validation.as_mut().map(|validation| validation.losses(pipeline, reference)).transpose()
    }

    /// Returns the most likely tokens after each prompt: at most `tokens`, until one of `ends`, and at most
    /// until the prompt with them is as long as a row of the data. A process without the last stage gets
    /// none. Each token takes an evaluation of as many rows as a batch has.
    ///
    /// The model sees no side inputs, and rows of the length of the data. In a model in which a token depends
    /// on later ones or on the length, such as a mixture of depths, the rest of the row has an effect.
    ///
    /// # Errors
    /// When the first output of the model is not its logits (rows, tokens, vocabulary), or as
    /// [`Trainer::evaluate`], between two tokens.
    ///
    /// # Panics
    /// When a prompt has no token.
    pub fn sample(
        &mut self,
        prompts: &[Vec<u32>],
        tokens: usize,
        ends: &[u32],
    ) -> Result<Vec<Vec<u32>>, PipelineError> {
        let shape = [self.batch_rows, self.rows.seq_len()];
        continue_texts(&mut self.pipeline, prompts, shape, Limits { tokens, ends })
    }

    /// Returns the number of optimizer steps so far, including those before a checkpoint.
    pub fn steps_done(&self) -> u64 {
        self.steps_done
    }

    /// Returns the time since the run's first step began, without the time between a stop and the resumption
    /// ([`Trainer::set_earlier`]).
    pub fn elapsed(&self) -> Duration {
        self.earlier + self.began.map_or(Duration::ZERO, |began| began.elapsed())
    }

    /// Sets the time that the run had taken before it was stopped. A checkpoint does not have it, so that equal
    /// runs have equal checkpoints.
    pub fn set_earlier(&mut self, earlier: Duration) {
        self.earlier = earlier;
    }

    /// Returns the current state of the run, with a description for the manifest.
    ///
    /// # Errors
    /// As [`Pipeline::state`].
    pub fn state(&mut self, description: Map<String, Json>) -> Result<TrainingState, PipelineError> {
        let ranks = self.pipeline.state()?;
        Ok(TrainingState { step: self.steps_done, cursor: self.rows.cursor(), description, ranks })
    }

    /// Resumes where the checkpoint was taken. The data must be the data of the checkpoint's run; this is not
    /// checked here. [`Trainer::set_earlier`] sets the time that the run has taken.
    ///
    /// # Errors
    /// When the data has no such row, or as [`Pipeline::restore`].
    pub fn resume(&mut self, checkpoint: &Arc<Checkpoint>) -> Result<(), ResumeError> {
        if self.has_begun_next() || self.pipeline.has_begun() {
            return Err(PipelineError::StepBegun.into());
        }
        self.rows.seek(checkpoint.manifest().cursor)?;
        self.pipeline.restore(checkpoint)?;
        self.steps_done = checkpoint.step();
        Ok(())
    }

    /// Returns the pipeline, for example for evaluations. After [`Trainer::step_ahead`] it runs the next
    /// step, which only the trainer may finish: after a call of [`Pipeline::finish`], the next step is an
    /// error ([`PipelineError::FinishedElsewhere`]).
    pub fn pipeline(&mut self) -> &mut Pipeline {
        &mut self.pipeline
    }

    fn metrics(&self, report: &StepSummary, learning_rate: f64, tokens: usize, end: DataPosition) -> Metrics {
        Metrics {
            step: self.steps_done,
            elapsed_s: self.elapsed().as_secs_f64(),
            tokens: end.tokens,
            epoch: Some(end.epoch),
            source_rows: end.source_rows,
            ..Metrics::of(report, learning_rate, tokens as u64)
        }
    }
}

/// Reads the rows of a batch and splits them into microbatches.
fn next_batch(
    rows: &mut TokenRows,
    batch_rows: usize,
    rule: (&SplitRule, Slices),
    reference: Option<&[f32]>,
) -> Result<Batch, PipelineError> {
    let ignores = rows.ignores_targets();
    split(rows.next_batch(batch_rows)?, rule, ignores, reference)
}

/// The sizes of the steps of a run.
#[derive(Clone, Debug)]
pub struct StepSizes {
    /// The rows of a batch.
    pub batch_rows: usize,
    /// See [`Trainer::accumulating`].
    pub batches: NonZeroU32,
    /// See [`Trainer::with_rampup`].
    pub rampup_steps: u64,
}

impl StepSizes {
    /// Returns the number of rows of the first `steps` steps.
    pub fn rows_of(&self, steps: u64) -> u64 {
        let risen = steps.min(self.rampup_steps);
        let rising: u64 =
            (0..risen).map(|done| u64::from(batches_at(done, self.batches, self.rampup_steps))).sum();
        let batches = rising + (steps - risen) * u64::from(self.batches.get());
        batches.saturating_mul(self.batch_rows as u64)
    }

    /// Reads the batches of the step after `done` steps, as [`Trainer::step`] does, for whole microbatches.
    ///
    /// # Errors
    /// When the data cannot be read, or the rows cannot be split.
    pub fn read(
        &self,
        rows: &mut TokenRows,
        done: u64,
        rule: &SplitRule,
    ) -> Result<Vec<Batch>, PipelineError> {
        let batches = batches_at(done, self.batches, self.rampup_steps);
        (0..batches).map(|_| next_batch(rows, self.batch_rows, (rule, Slices::ONE), None)).collect()
    }
}
