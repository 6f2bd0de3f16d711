//! A running pipeline: steps, evaluation, parameters, checkpoints.

use std::collections::BTreeSet;
use std::mem::Discriminant;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pipewright_schedule::ValidatedProgram;
use pipewright_schedule::lower::forward_part;

use super::assembly::Assembly;
use super::error::PipelineError;
use super::replies::End;
use super::step_failure::StepFailure;
use super::step_inputs::{StepAttempt, StepKind};
use super::summary::{EvalSummary, StepSummary, TakenStep, TimelineRows, Unmatched, evaluation, training};
use crate::batch::{Batch, LossFactors, Purpose, Reduction, SplitError, StepForm, joined_slices, split};
use crate::checkpoint::{Checkpoint, RankState};
use crate::driver::{Command, FailedRank, RankThread, StepReply};
use crate::executor::{NamedParameter, RankReport, UndeferredParameter};
use crate::failure::{Cause, StepError};
use crate::ids::{Attempt, StepNumber, WorldRank};
use crate::loss_scale::LossScale;
use crate::mesh::Mesh;
use crate::stage::RestoredPaths;
use crate::tensor::{Boundary, Values, pack};

/// Running ranks, each with its stages. Dropping the pipeline ends them.
pub struct Pipeline {
    pub(super) assembly: Assembly,
    pub(super) ranks: Vec<RankThread>,
    pub(super) step: StepNumber,
    /// The number of the last command that all ranks run together.
    pub(super) attempt: Attempt,
    /// Whether the current step ends with an update.
    pub(super) updates: bool,
    /// Whether gradients wait for an update.
    pub(super) pending: bool,
    /// How the batches whose gradients wait for an update reduce their losses, and the unit of their weights.
    pub(super) reduction: Option<(Discriminant<Reduction>, Option<f64>)>,
    /// The parameters that batches have reported since the last update ([`StepSummary::undeferred`]).
    pub(super) undeferred: Vec<UndeferredParameter>,
    /// The loss scale of the next step; `None` if losses are not scaled.
    pub(super) loss_scale: Option<LossScale>,
    /// How long the pipeline waits without progress on any rank. It is longer than the ranks' own deadline, because
    /// their errors name the missing message.
    pub(super) patience: Duration,
    /// Why the pipeline accepts no further command; `None` while it accepts commands.
    pub(super) end: Option<End>,
    /// The last step, if it failed.
    pub(super) failure: Option<StepFailure>,
}

impl Pipeline {
    /// Lets the ranks find out which parameters their stages share.
    pub(super) fn find_shared(&mut self) -> Result<(), PipelineError> {
        let attempt = self.attempt;
        let found = self.command(|reply| Command::FindShared { attempt, reply })?;
        self.await_ranks(&found, |found| found)?;
        Ok(())
    }

    /// Returns where the last step or evaluation failed, in the schedule and on each rank; `None` if it did not fail, or
    /// was refused before it began.
    pub fn step_failure(&self) -> Option<&StepFailure> {
        self.failure.as_ref()
    }

    /// Returns the program that the pipeline runs.
    pub fn program(&self) -> &ValidatedProgram {
        &self.assembly.program
    }

    /// Returns the mesh of pipelines and replicas, which converts ranks of the world to ranks of the program.
    pub fn mesh(&self) -> Mesh {
        self.assembly.mesh
    }

    /// Splits a batch into the program's microbatches along dimension 0, trains on it, and takes one optimizer step.
    ///
    /// # Errors
    /// When the batch cannot be split, or a rank fails. A failed step changes no parameter, and the pipeline can take
    /// the next step. If this is not possible, the next step returns an error ([`PipelineError::Diverged`],
    /// [`Cause::LostPeer`]).
    pub fn step(
        &mut self,
        inputs: impl Boundary,
        targets: impl Boundary,
        learning_rate: f64,
    ) -> Result<StepSummary, PipelineError> {
        let batch = self.split_batch(inputs, targets, self.assembly.microbatches());
        self.train(batch, Purpose::Update { learning_rate })
    }

    /// Returns the number of microbatches of a step, over all replicas.
    pub fn microbatches(&self) -> u32 {
        self.assembly.microbatches()
    }

    /// Returns the number of microbatches of an evaluation, over all replicas.
    pub fn eval_microbatches(&self) -> u32 {
        self.assembly.eval_microbatches()
    }

    /// Splits a batch into so many microbatches, for [`Pipeline::step_batch`] or [`Pipeline::eval_batch`].
    pub(crate) fn split_batch(
        &self,
        inputs: impl Boundary,
        targets: impl Boundary,
        microbatches: u32,
    ) -> Result<Batch, PipelineError> {
        let inputs = split_into("inputs", inputs, microbatches)?;
        Ok(Batch::of_parts(inputs, split_into("targets", targets, microbatches)?))
    }

    /// As [`Pipeline::step`], with a batch that is split already and may have side inputs.
    ///
    /// # Errors
    /// As [`Pipeline::step`].
    pub fn step_batch(&mut self, batch: Batch, learning_rate: f64) -> Result<StepSummary, PipelineError> {
        self.train(Ok(batch), Purpose::Update { learning_rate })
    }

    /// As [`Pipeline::step_batch`], without an update. The gradients are kept, and those of the next steps are added to
    /// them. The step that updates takes the mean over all rows since the last update, over all their tokens
    /// ([`Batch::weighted`]), or their sum ([`Batch::summed`]). All batches together are one step, with the random numbers of
    /// a batch that has all their rows. They may have different numbers of rows. A step that fails drops them.
    ///
    /// # Errors
    /// As [`Pipeline::step`].
    pub fn accumulate(&mut self, batch: Batch) -> Result<StepSummary, PipelineError> {
        self.train(Ok(batch), Purpose::Accumulate)
    }

    fn train(
        &mut self,
        batch: Result<Batch, PipelineError>,
        purpose: Purpose,
    ) -> Result<StepSummary, PipelineError> {
        if self.assembly.program.is_forward_only() {
            return Err(PipelineError::ForwardOnly);
        }
        let start = Instant::now();
        let batch = self.agreed(batch, purpose)?;
        let (own, pending) =
            ((batch.reduction_kind(), batch.unit()), self.reduction.filter(|_| self.pending));
        let (reduction, unit) = pending.unwrap_or(own);
        if own.0 != reduction {
            return Err(PipelineError::MixedReductions);
        }
        let (learning_rate, update) = match purpose {
            Purpose::Update { learning_rate } => (learning_rate, true),
            Purpose::Accumulate | Purpose::Evaluate => (0.0, false),
        };
        let kind = StepKind::Train { learning_rate, loss_scale: self.loss_factor(), update };
        let factors = batch.loss_factors(unit);
        let taken = TakenStep::new(&self.assembly, (self.step.next(), self.loss_scale), &batch, factors)?;
        self.reduction = Some((reduction, unit));
        let reports = self.run(batch, &taken.factors, kind)?;
        self.pending = !self.updates;
        let loss_scale = self.loss_scale;
        let summary = training(taken, reports, start.elapsed());
        let mut summary = summary.map_err(|source| PipelineError::Cut { source })?;
        self.undeferred.append(&mut summary.undeferred);
        summary.undeferred.clone_from(&self.undeferred);
        if self.updates {
            self.undeferred.clear();
            self.loss_scale =
                loss_scale.map(|scale| scale.after(summary.skipped, self.assembly.config.loss_scaling));
        }
        Ok(summary)
    }

    fn timeline_rows(&self) -> TimelineRows {
        let Assembly { mesh, program, .. } = &self.assembly;
        TimelineRows { count: mesh.pipeline * mesh.data, slices: program.slices() }
    }

    /// Returns the factor of the losses of the next step.
    fn loss_factor(&self) -> f64 {
        self.loss_scale.map_or(1.0, |scale| scale.factor)
    }

    /// Runs the forward part of the program on a batch, or the program of evaluations
    /// ([`PipelineConfig::evaluation`](super::PipelineConfig::evaluation)), without a tape. With targets it returns losses
    /// too. Parameters and accumulated gradients do not change, but an evaluation that fails drops the gradients.
    ///
    /// # Errors
    /// As [`Pipeline::step`].
    pub fn eval(
        &mut self,
        inputs: impl Boundary,
        targets: Option<impl Boundary>,
    ) -> Result<EvalSummary, PipelineError> {
        let microbatches = self.assembly.eval_microbatches();
        let batch = split_into("inputs", inputs, microbatches).and_then(|inputs| {
            let targets = targets.map(|targets| split_into("targets", targets, microbatches)).transpose()?;
            Ok(Batch::of_parts(inputs, targets.unwrap_or_default()).keep_outputs())
        });
        self.evaluate(batch)
    }

    /// As [`Pipeline::eval`], with a batch that is split already and may have side inputs.
    ///
    /// # Errors
    /// As [`Pipeline::step`].
    pub fn eval_batch(&mut self, batch: Batch) -> Result<EvalSummary, PipelineError> {
        self.eval_losses(batch.keep_outputs())
    }

    /// As [`Pipeline::eval_batch`], without outputs unless the batch asks for them ([`Batch::keep_outputs`]). The logits of
    /// all microbatches of a language model take much memory.
    ///
    /// # Errors
    /// As [`Pipeline::step`].
    pub fn eval_losses(&mut self, batch: Batch) -> Result<EvalSummary, PipelineError> {
        self.evaluate(Ok(batch))
    }

    fn evaluate(&mut self, batch: Result<Batch, PipelineError>) -> Result<EvalSummary, PipelineError> {
        if self.assembly.evaluation.is_none() {
            let program = forward_part(&self.assembly.program).map_err(PipelineError::NoEvaluation)?;
            self.assembly.evaluation = Some(Arc::new(program));
        }
        let batch = self.agreed(batch, Purpose::Evaluate)?;
        let factors = batch.loss_factors(None);
        let mut reports = self.run(batch, &factors, StepKind::Evaluate)?;
        let joined = reports.iter_mut().try_for_each(|report| self.join_outputs(report));
        joined.map_err(|source| PipelineError::Cut { source })?;
        Ok(evaluation(factors.shares, self.timeline_rows(), reports))
    }

    /// Joins the outputs of the slices of each microbatch.
    fn join_outputs(&self, report: &mut RankReport) -> Result<(), SplitError> {
        let slices = self.assembly.program.slices();
        let lists = report.stage_outputs.iter_mut().map(|(_, outputs)| outputs);
        for outputs in lists.chain([&mut report.outputs]) {
            *outputs = joined_slices(std::mem::take(outputs), slices)?;
        }
        Ok(())
    }

    /// Returns the parameters of all stages of this process. If they are sharded over several processes, each process
    /// has only parts of them, so all processes must call it.
    ///
    /// # Errors
    /// When a rank fails or no longer answers. Accumulated gradients are dropped then.
    pub fn parameters(&mut self) -> Result<Vec<NamedParameter>, PipelineError> {
        if self.assembly.config.is_sharded() {
            // Ranks exchange messages for this, as in a step.
            self.attempt = self.attempt.next();
        }
        let attempt = self.attempt;
        let replies = self.command(|reply| Command::Parameters { attempt, reply })?;
        let of_ranks = self.await_ranks(&replies, |parameters| parameters);
        let of_ranks = of_ranks.map_err(|error| self.failed_step(error, false))?;
        Ok(of_ranks.into_iter().flatten().collect())
    }

    /// Returns the state of all ranks of this process that belong to the first replica or, if parameters are sharded, to
    /// the first group of replicas that hold all parameters together. The state shares storage with the running model, so
    /// nothing is copied here. The next update copies the storage that it writes to, unless the state is dropped by then.
    ///
    /// # Errors
    /// When gradients wait for an update, a rank fails, or a rank no longer answers.
    pub fn state(&mut self) -> Result<Vec<RankState>, PipelineError> {
        if self.pending {
            return Err(PipelineError::GradientsPending);
        }
        let replies = self.command(|reply| Command::State { reply })?;
        let mut ranks = self.await_ranks(&replies, |state| state.map(|state| *state))?;
        ranks.retain(|rank| !rank.stages.is_empty());
        ranks.iter_mut().for_each(|rank| rank.loss_scale = self.loss_scale);
        Ok(ranks)
    }

    /// Restores parameters, optimizer state and the loss scale from a checkpoint, which any cut and schedule may have
    /// written. Parameters that were frozen ([`Pipeline::freeze`]) are frozen again. The next step is the one after the
    /// checkpoint's.
    ///
    /// # Errors
    /// When the checkpoint lacks a parameter or has one of another shape, when the optimizer does not accept its state,
    /// or when a rank no longer answers. The pipeline then takes no further step.
    pub fn restore(&mut self, checkpoint: &Arc<Checkpoint>) -> Result<(), PipelineError> {
        self.restore_paths(checkpoint, false).map(drop)
    }

    /// As [`Pipeline::restore`], for a model that has other parameters than the one that wrote the checkpoint, such as
    /// adapters or another head. Parameters of the same path are restored. Others of the model keep their values and begin
    /// without the optimizer's state. Returns the paths that are in one of the two only, as PyTorch's `load_state_dict` with
    /// `strict=False` does.
    ///
    /// # Errors
    /// As [`Pipeline::restore`], except that the checkpoint may lack parameters.
    pub fn restore_matching(&mut self, checkpoint: &Arc<Checkpoint>) -> Result<Unmatched, PipelineError> {
        let of_ranks = self.restore_paths(checkpoint, true)?;
        let restored: BTreeSet<&str> =
            of_ranks.iter().flat_map(|paths| &paths.restored).map(|path| &**path).collect();
        let missing: BTreeSet<Arc<str>> = of_ranks.iter().flat_map(|paths| &paths.missing).cloned().collect();
        let has_all_ranks = Some(self.ranks.len() as u32) == self.assembly.mesh.ranks();
        let paths = checkpoint.parameters().map(|stored| stored.path);
        let unused =
            has_all_ranks.then(|| paths.filter(|path| !restored.contains(path)).map(Into::into).collect());
        Ok(Unmatched { missing: missing.into_iter().collect(), unused })
    }

    /// Restores a checkpoint, and returns the paths of the parameters of each rank of this process.
    fn restore_paths(
        &mut self,
        checkpoint: &Arc<Checkpoint>,
        may_miss: bool,
    ) -> Result<Vec<RestoredPaths>, PipelineError> {
        let replies =
            self.command(|reply| Command::Restore { checkpoint: checkpoint.clone(), may_miss, reply })?;
        let restored = self.await_ranks(&replies, |restored| restored);
        if restored.is_err() && !matches!(self.end, Some(End::Lost(_))) {
            self.end = Some(End::HalfRestored);
        }
        let restored = restored?;
        (self.step, self.pending) = (StepNumber::new(checkpoint.step()), false);
        // A run in another precision has no scale, and one from before a restore belongs to other parameters.
        let scale = self.assembly.loss_scale();
        self.loss_scale = scale.map(|initial| checkpoint.loss_scale().unwrap_or(initial));
        Ok(restored)
    }

    /// Checks a batch, and compares it with the other processes' batches. A batch that one process cannot use is an error in
    /// all of them, so that none waits.
    fn agreed(
        &mut self,
        batch: Result<Batch, PipelineError>,
        purpose: Purpose,
    ) -> Result<Batch, PipelineError> {
        self.failure = None;
        let ranks = || self.ranks.iter().map(|thread| thread.rank);
        let batch =
            batch.and_then(|batch| self.assembly.check_batch(ranks(), &batch, purpose).map(|()| batch));
        if self.assembly.mesh.ranks() == Some(self.ranks.len() as u32) {
            return batch;
        }
        let form = Arc::new(match &batch {
            Ok(batch) => batch.form(purpose),
            Err(error) => StepForm::refused(purpose, error.to_string()),
        });
        let done = self.step;
        (self.step, self.attempt) = (done.next(), self.attempt.next());
        let (step, attempt) = (self.step, self.attempt);
        let agreed = self.command(|reply| Command::Agree { step, attempt, form: form.clone(), reply });
        let agreed = agreed.and_then(|replies| {
            self.await_ranks(&replies, |agreed| agreed).map_err(|error| self.failed_step(error, false))
        });
        self.step = done;
        let mut batch = batch?;
        if let Some(agreed) = agreed?.into_iter().next() {
            batch.adopt(agreed?, self.assembly.microbatches_for(purpose) as usize);
        }
        Ok(batch)
    }

    fn run(
        &mut self,
        batch: Batch,
        factors: &LossFactors,
        kind: StepKind,
    ) -> Result<Vec<RankReport>, PipelineError> {
        let origin = Instant::now();
        let ranks = self.ranks.iter().map(|thread| thread.rank);
        let done = self.step;
        let number = StepAttempt { step: done.next(), attempt: self.attempt.next() };
        let inputs = self.assembly.step_inputs(ranks, number, batch, factors, kind, origin)?;
        StepAttempt { step: self.step, attempt: self.attempt } = number;
        self.updates = matches!(kind, StepKind::Train { update: true, .. });
        let mut inputs = inputs.into_iter();
        let replies = self.command(|reply| {
            let input = inputs.next().expect("one input for each rank");
            Command::Step { input: Box::new(input), reply }
        })?;
        let (mut any_updated, mut seen) = (false, Vec::<FailedRank>::new());
        let reports = self.await_ranks(&replies, |StepReply { outcome, has_updated, failed }| {
            any_updated |= has_updated;
            seen.extend(failed);
            outcome
        });
        let reports = reports.map_err(|error| {
            self.failure =
                Some(StepFailure::new(error.clone(), seen, &self.assembly.board, &self.assembly.mesh));
            self.failed_step(error, any_updated)
        });
        if !self.updates {
            // Only an update ends a step. Random numbers depend on the step, and a resumed run must draw the same ones.
            self.step = done;
        }
        Ok(reports?.into_iter().flatten().collect())
    }

    /// Returns a function that notifies the ranks of other processes that this process is busy between two steps, so
    /// that they wait for it longer than the deadline.
    pub fn keep_alive(&self) -> impl Fn() + Send + use<> {
        let (board, rank) = (self.assembly.board.clone(), self.ranks.first().map(|thread| thread.rank));
        move || {
            if let Some(rank) = rank {
                board.keep_alive(rank);
            }
        }
    }

    /// Notifies the ranks of other processes that this process cannot continue, so that they do not wait for it.
    pub fn abandon(&self, reason: &str) {
        let rank = self.ranks.first().map_or(WorldRank::new(0), |thread| thread.rank);
        let cause = Cause::Abandoned { message: reason.to_owned() };
        self.assembly.abort.raise(StepError { rank, step: self.step, action: None, cause });
    }
}

/// Splits inputs or targets. A process without the stage that takes them may pass `()`.
fn split_into(
    what: &'static str,
    batch: impl Boundary,
    microbatches: u32,
) -> Result<Vec<Values>, PipelineError> {
    let batch = pack(batch);
    if batch.is_empty() {
        Ok(vec![Values::new(); microbatches as usize])
    } else {
        split(&batch, microbatches).map_err(|source| PipelineError::Split { what, source })
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        for RankThread { commands, handle, .. } in self.ranks.drain(..) {
            drop(commands);
            // A lost rank's thread may never end. The others end when their channel is closed.
            if !matches!(self.end, Some(End::Lost(_))) {
                let _ = handle.join();
            }
        }
    }
}
