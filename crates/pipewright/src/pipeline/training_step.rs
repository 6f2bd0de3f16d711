//! Beginning and finishing a training step: [`Pipeline::begin`] gives the ranks its batch, and
//! [`Pipeline::finish`] waits for the results. In between, the next batch can be begun. The ranks then go from
//! one step to the next by themselves, each as soon as its own part of the step has ended.
//!
//! When the ranks get the next batch:
//!
//! - Within one process, at once. The ranks keep it until the batch that runs has ended.
//! - If the batch depends on the results of the one that runs, when that one has ended. A suspicious step is
//!   repeated, the loss scale follows from the gradients unless parameters are delayed, and gradients of inputs may not fit
//!   together, which is an error.
//! - In several processes, at once if the batch that runs ends with an update. The ranks begin the next batch
//!   only if a gradient norm says that all processes have begun the same one (`executor/norm.rs`): the norm of the batch that
//!   runs, or if batches overlap, the norm of the batch before it. Otherwise the processes compare it when the batch that runs
//!   has ended. If all of them have begun the next one by then, the reports of the ranks compare it, without a further
//!   message.
//!
//! In each case the ranks begin before the caller reads the results.
//!
//! A [`Trainer`](crate::train::Trainer) begins the next step unless the interrupt flag is raised
//! ([`Begin::UnlessInterrupted`]): a process that is asked to end would otherwise have to finish that step. Within
//! one process, the first rank that comes to the batch reads the flag for all of them ([`Gate`]). In several
//! processes, a rank whose flag is raised does not say that it has the next batch, so no rank begins it, and the
//! reports say why to all processes.
//!
//! A failure of a batch drops the next one. Ranks that are in the next batch stop there, because a failure
//! stops its own attempt and later ones ([`Abort`](crate::failure::Abort)). If the next batch fails, ranks that
//! are still in the batch before it complete that one.

use std::sync::Arc;
use std::time::Instant;

use super::begun::{Begin, Condition, Running, Waiting};
use super::error::PipelineError;
use super::running::{Pipeline, StepAnswers};
use super::step_plan::{CheckedBatch, StepAttempt, StepPlan};
use super::summary::{StepSummary, batch_gradients, is_interrupted, training};
use crate::batch::{Batch, Purpose};
use crate::config::PipelineConfig;
use crate::executor::{Follow, StepOrigin, digest};
use crate::failure::StepError;
use crate::step_gate::Gate;
use crate::verification::Verify;

/// How many batches can be begun at once: one that runs, and the next one.
const MOST_BEGUN: usize = 2;

/// How many batches that overlap can be begun at once. Two run, and a rank may come to the third before the pipeline has the
/// results of the first.
const MOST_OVERLAPPING: usize = 3;

impl Pipeline {
    /// Begins a training step, like [`Pipeline::step_batch`], without waiting for its results, which
    /// [`Pipeline::finish`] returns. While it runs, the next batch can be begun: each rank begins it as soon as
    /// its own part of this step has ended, with its own update, while other ranks still update and while the
    /// caller reads the results. The results have the same bits as the results of [`Pipeline::step_batch`].
    ///
    /// At most two batches can be begun at once, and three if batches overlap
    /// ([`PipelineConfig::delayed`](super::PipelineConfig::delayed)). Until they are finished, the pipeline refuses
    /// everything that needs its state between two steps, such as evaluations, [`Pipeline::state`] and
    /// [`Pipeline::parameters`] ([`PipelineError::StepBegun`]). Dropping the pipeline stops the ranks in these
    /// batches.
    ///
    /// In several processes, a batch that begins while none runs is compared with the other processes'
    /// batches, so the call waits until all of them begin it. If another batch runs, the call returns at once.
    /// The ranks then compare the batch when they compute the gradient norm of the one that runs, if all
    /// processes have begun it by then. Otherwise [`Pipeline::finish`] compares it when that one has ended.
    ///
    /// ```
    /// # use burn::module::Module;
    /// # use burn::nn::{Linear, LinearConfig};
    /// # use burn::optim::AdamWConfig;
    /// # use burn::tensor::{Device, Tensor};
    /// # use pipewright::batch::Batch;
    /// # use pipewright::pipeline::{Layers, Pipeline};
    /// # use pipewright::stage::{StageContext, StageModule};
    /// # use pipewright::tensor::pack;
    /// # #[derive(Module, Debug)]
    /// # struct Block {
    /// #     linear: Linear,
    /// # }
    /// # impl StageModule for Block {
    /// #     type Input = Tensor<2>;
    /// #     type Output = Tensor<2>;
    /// #     fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
    /// #         self.linear.forward(input)
    /// #     }
    /// # }
    /// # let block = |_layer| Block { linear: LinearConfig::new(8, 8).init(&Device::flex().autodiff()) };
    /// # let loss = |output: Tensor<2>, target: Tensor<2>| (output - target).square().mean();
    /// # let (layers, optimizer) = (Layers::new(4, block), AdamWConfig::new().init());
    /// # let mut pipeline =
    /// #     Pipeline::builder(layers).ranks(2).microbatches(2).loss(loss).optimizer(optimizer).launch()?;
    /// # let batches: Vec<Batch> = (0..3)
    /// #     .map(|_| {
    /// #         let microbatches = || vec![pack(Tensor::<2>::ones([2, 8], &Device::flex())); 2];
    /// #         Batch::new(microbatches(), microbatches())
    /// #     })
    /// #     .collect();
    /// let mut batches = batches.into_iter();
    /// if let Some(first) = batches.next() {
    ///     pipeline.begin(first, 1e-2)?;
    /// }
    /// while pipeline.has_begun() {
    ///     if let Some(next) = batches.next() {
    ///         pipeline.begin(next, 1e-2)?;
    ///     }
    ///     // The ranks begin the next step while this one's results are read.
    ///     assert!(pipeline.finish()?.loss().is_finite());
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When as many batches have begun as can be. A batch that cannot be used, or that the processes do not agree on, is an
    /// error of the call of [`Pipeline::finish`] that would return its results. A step that runs is not
    /// affected.
    pub fn begin(&mut self, batch: Batch, learning_rate: f64) -> Result<(), PipelineError> {
        self.begin_for(Ok(batch), Purpose::Update { learning_rate }, Begin::Always)
    }

    /// Begins a batch without an update, like [`Pipeline::accumulate`], without waiting for its results, like
    /// [`Pipeline::begin`].
    ///
    /// # Errors
    /// As [`Pipeline::begin`].
    pub fn begin_accumulating(&mut self, batch: Batch) -> Result<(), PipelineError> {
        self.begin_for(Ok(batch), Purpose::Accumulate, Begin::Always)
    }

    /// Returns whether a batch was begun that is not finished.
    pub fn has_begun(&self) -> bool {
        !self.begun.is_empty()
    }

    /// Waits for the results of the first batch that was begun and is not finished. In several processes, it
    /// also waits until all of them have compared the next batch, if this process has begun it.
    ///
    /// # Errors
    /// When no batch was begun, when the batch could not be used, or as [`Pipeline::step`]. A batch that was
    /// begun after this one is dropped then, without any effect.
    pub fn finish(&mut self) -> Result<StepSummary, PipelineError> {
        let running = self.begun.pop_front().ok_or(PipelineError::NoStepBegun)?;
        self.finished_batches += 1;
        let summary = running.and_then(|running| self.complete_with_repeats(running));
        self.finished = Some(Instant::now());
        if summary.is_err() {
            self.drop_running();
            self.waiting.clear();
            self.setup.next_batch.clear();
            // The step after this one does not follow the one before.
            self.last_end = None;
        }
        self.send_waiting();
        summary
    }

    /// Returns whether another batch can be begun.
    pub(crate) fn can_begin(&self) -> bool {
        let overlaps = |begun: &Result<Running, _>| begun.as_ref().is_ok_and(|begun| begun.follow.is_some());
        let most = if self.begun.iter().all(overlaps) { MOST_OVERLAPPING } else { MOST_BEGUN };
        self.waiting.is_empty() && self.begun.len() < most
    }

    /// Returns the number of the next batch that [`Pipeline::finish`] ends.
    pub(crate) fn next_to_finish(&self) -> u64 {
        self.finished_batches
    }

    /// Returns the number of the next batch that begins, if no batch before it is dropped.
    pub(crate) fn next_to_begin(&self) -> u64 {
        self.finished_batches + (self.begun.len() + self.waiting.len()) as u64
    }

    /// Returns an error if a batch was begun that is not finished.
    pub(super) fn require_none_begun(&self) -> Result<(), PipelineError> {
        if self.has_begun() { Err(PipelineError::StepBegun) } else { Ok(()) }
    }

    /// Begins a batch and waits for its results.
    pub(super) fn train(
        &mut self,
        batch: Result<Batch, PipelineError>,
        purpose: Purpose,
    ) -> Result<StepSummary, PipelineError> {
        self.require_none_begun()?;
        self.begin_for(batch, purpose, Begin::Always)?;
        self.finish()
    }

    /// Begins a batch. The reason why a batch cannot be used reaches the other processes, which do not wait for
    /// it then.
    pub(crate) fn begin_for(
        &mut self,
        batch: Result<Batch, PipelineError>,
        purpose: Purpose,
        when: Begin,
    ) -> Result<(), PipelineError> {
        if !self.can_begin() {
            return Err(PipelineError::StepsBegun);
        }
        let start = Instant::now();
        let batch = self.checked(batch, purpose);
        let is_alone = self.is_whole_world();
        let follows = self.last_begun().is_some_and(|before| self.may_follow(&before.plan));
        let waiting = Waiting { batch, purpose, when, common: None, start };
        if self.begun.is_empty() || is_alone && follows {
            let condition = self.gate_for(when);
            let running = self.agree_and_send(waiting, condition);
            self.begun.push_back(running);
            return Ok(());
        }
        if let Some(running) = self.offer(&waiting) {
            self.begun.push_back(Ok(running));
            return Ok(());
        }
        let compared = waiting.batch.as_ref().ok().filter(|_| !is_alone);
        self.setup.next_batch.set_waiting(compared.map(|batch| digest(&batch.form())));
        self.waiting.push_back(waiting);
        Ok(())
    }

    /// Returns the last batch that was begun and that the ranks have.
    pub(super) fn last_begun(&self) -> Option<&Running> {
        self.begun.back().and_then(|last| last.as_ref().ok())
    }

    /// Returns the gate of a batch that the ranks of this process get while another one runs, if it has one.
    fn gate_for(&self, when: Begin) -> Condition {
        let interrupt = self.setup.config.interrupt.clone();
        let before = self.last_begun().and_then(|before| match &before.condition {
            Condition::Gate { gate, .. } => Some(gate.clone()),
            _ => None,
        });
        match interrupt.filter(|_| when == Begin::UnlessInterrupted && self.has_begun()) {
            Some(interrupt) => Condition::Gate { gate: Gate::new(interrupt, before), last: self.ranks.at },
            None => Condition::None,
        }
    }

    /// Withdraws the next batch if the interrupt flag was raised before a rank began it. `is_interrupted` is the
    /// flag in the reports on the batch before. Returns whether the batch is withdrawn, which is the same in every
    /// process.
    fn withdraw(&mut self, is_interrupted: bool) -> bool {
        let is_closed = |next: &mut Result<Running, _>| {
            next.as_ref()
                .is_ok_and(|next| matches!(&next.condition, Condition::Gate { gate, .. } if !gate.is_open()))
        };
        if let Some(Ok(Running { condition: Condition::Gate { last, .. }, .. })) =
            self.begun.pop_front_if(is_closed)
        {
            // The gate of the batch after it is closed too.
            self.begun.clear();
            self.take_back(last);
            return true;
        }
        let may_withdraw = |waiting: &Waiting| waiting.when == Begin::UnlessInterrupted;
        let is_withdrawn =
            is_interrupted && self.begun.is_empty() && self.waiting.front().is_some_and(may_withdraw);
        if is_withdrawn {
            self.waiting.clear();
            self.setup.next_batch.clear();
        }
        is_withdrawn
    }

    /// Goes back to the numbers of the last command before a batch that no rank has begun. The batch before it has
    /// updated.
    pub(super) fn take_back(&mut self, last: StepAttempt) {
        self.ranks.begin(last);
        self.accumulation.begin_batch(None);
    }

    /// Returns whether the ranks may get the next batch before the results of a batch with this plan are known.
    pub(super) fn may_follow(&self, before: &StepPlan) -> bool {
        let PipelineConfig { verify, delayed, .. } = *self.setup.config;
        let needs_results = verify != Verify::Off || self.accumulation.loss_scale.is_some() && !delayed;
        !needs_results && !before.returns_gradients()
    }

    /// Gives the ranks the next batch if it waits for the end of the one before, and that one has ended, and offers them
    /// the batches behind it. A failure belongs to that batch.
    fn send_waiting(&mut self) {
        if self.begun.is_empty()
            && let Some(waiting) = self.waiting.pop_front()
        {
            self.setup.next_batch.clear();
            let running = self.agree_and_send(waiting, Condition::None);
            self.begun.push_back(running);
        }
        while let Some(waiting) = self.waiting.pop_front() {
            let Some(running) = self.offer(&waiting) else {
                self.waiting.push_front(waiting);
                return;
            };
            self.begun.push_back(Ok(running));
        }
    }

    /// Compares a batch with the other processes' batches, and gives it to the ranks.
    fn agree_and_send(&mut self, waiting: Waiting, condition: Condition) -> Result<Running, PipelineError> {
        if self.setup.program.is_forward_only() {
            let reason =
                "the program is forward-only: call `eval`, or launch the pipeline with a program that trains";
            return Err(PipelineError::batch(reason));
        }
        let start = waiting.start;
        let batch = self.agreed(waiting)?;
        self.verifier.keep(&batch, !self.accumulation.is_pending());
        let sent = self.send_batch(batch, start, condition);
        if sent.is_err() {
            self.verifier.refuse();
        }
        sent
    }

    /// Gives the ranks a batch.
    pub(super) fn send_batch(
        &mut self,
        batch: CheckedBatch,
        start: Instant,
        condition: Condition,
    ) -> Result<Running, PipelineError> {
        let unit = self.accumulation.unit(batch.unit())?;
        let open = self.begun.iter().flatten().filter(|begun| begun.plan.updates()).count();
        let (at, scale) = (self.ranks.next_step(), self.accumulation.step_scale(open, &self.setup.config));
        let plan = StepPlan::training(at, &batch, unit, scale, self.verifier.verification());
        self.send_planned(plan, batch, start, condition)
    }

    /// Gives the ranks a batch with this plan.
    pub(super) fn send_planned(
        &mut self,
        plan: StepPlan,
        batch: CheckedBatch,
        start: Instant,
        condition: Condition,
    ) -> Result<Running, PipelineError> {
        let unit = self.accumulation.unit(batch.unit())?;
        let origin = StepOrigin::default();
        let kept = self.setup.config.name_not_finite.then(|| Arc::new(batch.clone()));
        let overlaps = self.setup.overlaps() && plan.may_overlap();
        let follow = overlaps.then(Follow::default);
        // Between processes, the gradient norms announce the next batch. If a rank has come to the end of the batch before
        // already, this one begins when all have updated.
        if follow.is_some() && self.is_whole_world() {
            self.last_begun().and_then(|before| before.follow.as_ref()).inspect(|follow| follow.announce());
        }
        let replies = self.send_inputs(&plan, batch, (&origin, follow.as_ref()), &condition)?;
        if !self.accumulation.is_pending() {
            self.step_batches.clear();
        }
        self.step_batches.extend(kept);
        self.accumulation.begin_batch((!plan.updates()).then_some(unit));
        let batches = self.step_batches.clone();
        Ok(Running { plan, origin, replies, start, condition, follow, batches })
    }

    /// Waits for the results of a batch. A suspicious step is repeated with all its batches.
    fn complete_with_repeats(&mut self, running: Running) -> Result<StepSummary, PipelineError> {
        let (updates, done, last) = (running.plan.updates(), running.plan.done(), running.plan.last_step());
        let (mut next, mut repeated) = (Ok(running), Vec::new());
        loop {
            let start = next.as_ref().map_or_else(|_| Instant::now(), |running| running.start);
            let batches =
                next.as_mut().map(|running| std::mem::take(&mut running.batches)).unwrap_or_default();
            let batch = match next.and_then(|running| self.await_results(running)) {
                Ok(summary) => match self.verifier.next_batch() {
                    Some(next) => {
                        repeated.push(summary);
                        next
                    }
                    None => {
                        if updates {
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
                        let error = self.with_origin(error, batches, done);
                        self.ranks.return_to(last);
                        return Err(error);
                    };
                    repeated.clear();
                    self.ranks.return_to(done);
                    self.failure = None;
                    first
                }
            };
            next = self.send_batch(batch, start, Condition::None);
        }
    }

    /// Waits for the end of a batch on all ranks, and merges their reports.
    pub(super) fn await_results(&mut self, running: Running) -> Result<StepSummary, PipelineError> {
        let Running { plan, origin, replies, start, .. } = running;
        let at = plan.at;
        let mut answers = self.collect(at, &replies);
        let overlaps = answers.overlaps;
        self.exchange_reports(at, &mut answers);
        let has_failed = self.ranks.has_failed(at, &answers.results);
        if !has_failed {
            self.granted = self.granted.max(answers.granted);
        }
        if has_failed || self.granted <= at.attempt {
            self.take_back_offers();
        }
        if has_failed {
            answers.lost = self.drop_running();
        }
        let reports = self.conclude(at, answers);
        // The step after a failed one follows it, also if the ranks were given a later one.
        let mut reports = reports.inspect_err(|_| self.ranks.return_to(plan.last_step()))?;
        let plan = plan.scaled(self.accumulation.scale());
        if plan.updates() {
            let norm = reports.iter().find_map(|report| report.results.gradient_norm);
            let is_skipped = norm.is_some_and(|norm| !norm.is_finite());
            self.accumulation.scale_losses(&self.setup.config, is_skipped);
        }
        // Fails only if no batch may follow before the end of this one, so nothing runs then.
        let gradients = batch_gradients(&self.setup, &plan, &mut reports);
        let gradients = gradients.map_err(PipelineError::slices)?;
        let is_withdrawn = self.withdraw(is_interrupted(&reports));
        if let Some(waiting) = self.waiting.front_mut().filter(|_| self.begun.is_empty()) {
            waiting.common = reports.iter().find_map(|report| report.next_batch);
        }
        if self.may_follow(&plan) {
            self.send_waiting();
        }
        let origin = origin.time();
        let difference = reports.iter_mut().find_map(|report| report.difference.take());
        let began_early = self.finished.is_some_and(|finished| start < finished);
        let start = self.finished.map_or(start, |finished| start.max(finished));
        let summary = training(&self.setup, plan, reports, gradients, start.elapsed());
        let interrupted = summary.interrupted || is_withdrawn;
        let mut summary = StepSummary { began_early, overlaps, interrupted, ..summary };
        self.note_gap(origin, &mut summary);
        self.verifier.end_batch(difference, &mut summary);
        Ok(summary)
    }

    /// Exchanges the reports on a batch with the other processes, if the ranks have begun the next batch.
    fn exchange_reports(&mut self, at: StepAttempt, answers: &mut StepAnswers) {
        let (Some(open), Some(link)) = (answers.open.take(), &mut self.report_link) else { return };
        if !self.ranks.has_failed(at, &answers.results) {
            let reports = link.exchange(at, open, &self.ranks);
            // The other ranks of this process and of other processes stop too.
            let reports = reports.inspect_err(|error| self.ranks.raise(at, error));
            answers.results = Ok(vec![reports]);
        }
    }

    /// Waits until the ranks have stopped in the batches that they got after one that has failed, and drops
    /// these. A batch that waits follows if the step is repeated. Returns an error if a rank does not stop.
    fn drop_running(&mut self) -> Option<StepError> {
        let mut lost = None;
        for running in std::mem::take(&mut self.begun).into_iter().flatten() {
            if !self.ranks.has_ended() {
                lost = self.collect(running.plan.at, &running.replies).results.err();
            }
        }
        lost
    }
}

impl Drop for Pipeline {
    /// Stops the ranks in the batches that were begun and are not finished, and waits for them. A rank that
    /// does not stop before the deadline is left running.
    fn drop(&mut self) {
        if let Some(first) = self.begun.iter().flatten().next() {
            self.ranks.stop(first.plan.at, "its pipeline was dropped");
            self.drop_running();
        }
    }
}
