//! The phases after a rank's program, in order. Their protocol is in `README.md` in this folder.

use std::sync::Arc;
use std::time::Instant;

use super::accumulation::Accumulation;
use super::agreement::{agree_alike, decode_agreement, merge_forms};
use super::collection::Collection;
use super::copies::{add_copies, exchange_copies};
use super::expert_holders::check_holders;
use super::gather::{receive_rows, start_gather};
use super::losses::read_losses;
use super::machine::Executor;
use super::next_batch::common_digest;
use super::norm::{Contribution, Norms, add_replicas, change_gradients, norms, replica_tag, squares};
use super::parameters::{KnownParameters, ListedParameter, NormOrder, compare};
use super::report::{RankReport, Update};
use super::report_exchange::{OpenReport, pass_summary, report_messages, send_summary};
use super::report_message::ReportMessage;
use super::sharing::{
    exchange_shared_gradients, receive_shared_gradients, set_shared_gradients, share_storage,
};
use super::statistics::{exchange_statistics, receive_statistics, set_statistics};
use super::step::{Outcome, Phase};
use super::tensor_shards::check_shards;
use super::update::{update, update_early};
use crate::batch::{StepForm, StepForms};
use crate::collective::Exchange;
use crate::failure::Cause;
use crate::hook::check_sums;
use crate::message::{AwaitedMessage, MessageError, Payload, Tag, decoded, encoded};
use crate::verification::{RankChecksums, Verdict, judge};

impl Executor {
    /// Continues the current phase after the program, or returns the message that it waits for.
    pub(super) fn poll_epilogue(&mut self) -> Result<Option<AwaitedMessage>, Cause> {
        let mut phase = self.step.take_phase();
        let mut awaited = self.receive(&mut phase)?;
        if awaited.is_none() {
            self.connection.moved(self.step.position);
            phase = self.next_phase(phase)?;
        } else if phase.awaits_norm() && self.update_early() {
            awaited = None;
        }
        self.step.set_phase(phase);
        Ok(awaited)
    }

    /// Updates the next stage while the rank waits for the norm. Returns whether there was one. The squares
    /// of the rank's gradients are known by then, so its own message does not wait for its updates.
    fn update_early(&mut self) -> bool {
        let Self { context, connection, stages, step, accumulation, .. } = self;
        let updates = context.config.post_validation && update_early(context, stages, step, *accumulation);
        if updates {
            connection.moved(step.position);
        }
        updates
    }

    /// Ends the phase that is done and begins the next one. The first arms list the phases of a step in
    /// order.
    fn next_phase(&mut self, done: Phase) -> Result<Phase, Cause> {
        Ok(match done {
            Phase::Actions => self.end_program()?,
            Phase::Checksums(checksums) => self.compare_checksums(&concatenated(checksums))?,
            Phase::Verdict(message) => {
                self.pass_verdict(&message.into_one())?;
                self.end_losses()?
            }
            Phase::Statistics(means) => {
                let repetition = self.step.input().repetition();
                set_statistics(&self.context, &mut self.stages, repetition, means);
                self.end_training()?
            }
            Phase::ReplicaSums => self.end_sums()?,
            Phase::Copies(gathered) => {
                add_copies(&self.context, &mut self.stages, gathered);
                self.share_gradients()
            }
            Phase::SharedGradients(sums) => {
                set_shared_gradients(&mut self.stages, sums);
                change_gradients(&self.context, &mut self.stages, self.step.input(), self.accumulation)?;
                self.gather_replica_squares()
            }
            Phase::ReplicaSquares(squares) => self.gather_squares(Contribution::joined(squares))?,
            Phase::Squares(squares) => self.compute_norm(Contribution::joined(squares))?,
            Phase::Norm(norms) => self.send_norms(norms.into_one()),
            Phase::Update { norms } => self.update(&norms)?,
            Phase::Reports { outcome, reports } => self.pass_reports(outcome, concatenated(reports)),
            Phase::Summary { mut outcome, message } => {
                let (origin, summary) = (self.recorder.origin, message.into_one());
                pass_summary(&self.context, &mut self.connection, origin, &mut outcome.reports, &summary)?;
                Phase::Done(outcome)
            }
            // Not phases of a step: before it, at launch, and when parameters are collected.
            Phase::StepDigests { form, digests } => {
                let common = common_digest(digests.into_contents());
                self.pass_digest(form, common)
            }
            Phase::SameStep { form, same } => self.pass_same(form, same.into_one()),
            Phase::StepForms(forms) => self.pass_forms(merge_forms(forms)),
            Phase::AgreedStep(message) => self.pass_agreement(&message.into_one())?,
            Phase::ParameterLists(lists) => self.compare_parameters(&concatenated(lists))?,
            Phase::SharedParameters { order, message } => self.learn_shared(order, &message.into_one())?,
            Phase::Shared(message) => self.pass_shared(message.into_one()),
            Phase::Layers(arrivals) => {
                let Self { context, connection, stages, .. } = self;
                arrivals.end(context, connection, stages)?;
                Phase::Done(Outcome::default())
            }
            Phase::Collect(collection) => self.collect(collection),
            Phase::Idle | Phase::Done(_) => done,
        })
    }

    /// Takes the messages of a phase that have arrived, or returns a missing one.
    fn receive(&mut self, phase: &mut Phase) -> Result<Option<AwaitedMessage>, Cause> {
        let Self { context, connection, stages, recorder, .. } = self;
        match phase {
            Phase::Checksums(checksums) => connection.receive(checksums),
            Phase::Verdict(message) => connection.receive_bytes(message),
            Phase::Statistics(means) => receive_statistics(connection, stages, means),
            Phase::ReplicaSums => Ok(self.reductions.awaited_by_any(stages)),
            Phase::Copies(gathered) => connection.receive_tensors(gathered, &stages.first().inner_device()),
            Phase::ParameterLists(lists) => connection.receive(lists),
            Phase::SharedGradients(sums) => receive_shared_gradients(context, connection, stages, sums),
            Phase::ReplicaSquares(squares) | Phase::Squares(squares) => connection.receive(squares),
            Phase::Norm(norms) => connection.receive(norms),
            Phase::Reports { reports, .. } => connection.receive(reports),
            Phase::StepDigests { digests, .. } => connection.receive(digests),
            Phase::SameStep { same, .. } => connection.receive(same),
            Phase::StepForms(forms) => connection.receive(forms),
            Phase::SharedParameters { message, .. }
            | Phase::Summary { message, .. }
            | Phase::AgreedStep(message)
            | Phase::Shared(message) => connection.receive_bytes(message),
            Phase::Layers(arrivals) => connection.receive_bytes(&mut arrivals.messages),
            Phase::Collect(collection) => match collection.next(stages) {
                Some(stage) => receive_rows(connection, stages.get_mut(stage), recorder),
                None => Ok(None),
            },
            Phase::Actions | Phase::Update { .. } | Phase::Idle | Phase::Done(_) => Ok(None),
        }
    }

    /// Ends the program. A repetition of a step is compared with its earlier computations first.
    fn end_program(&mut self) -> Result<Phase, Cause> {
        let keeps = self.keeps_gathered();
        let Self { context, stages, recorder, checks, step, .. } = self;
        recorder.end_program();
        if step.input().update || !keeps {
            stages.release_all();
        }
        if step.input().update {
            stages.iter().for_each(|stage| checks.note_gradients(stage));
        }
        if step.input().is_repetition() {
            return Ok(Phase::Checksums(checks.gather(context)));
        }
        self.end_losses()
    }

    /// Passes on the checksums of this rank's subtree. The root compares all of them. Fails there if the
    /// repetition does not count.
    fn compare_checksums(&mut self, checksums: &[RankChecksums]) -> Result<Phase, Cause> {
        if let Some(parent) = self.context.world_tree.parent {
            self.connection.send(parent, Tag::Checksums, Payload::of(&checksums));
            return Ok(Phase::Verdict(Exchange::one(parent, Tag::Verdict)));
        }
        match judge(checksums) {
            Verdict::Counts(difference) => Ok(Phase::Verdict(Exchange::complete(encoded(&difference)))),
            Verdict::IsOpen(difference) => Err(Cause::Unconfirmed { difference: Box::new(difference) }),
        }
    }

    /// Passes on the first result that differs, and keeps it for the report.
    fn pass_verdict(&mut self, message: &Arc<[u8]>) -> Result<(), MessageError> {
        let tree = &self.context.world_tree;
        self.connection.send_bytes(&tree.children, Tag::Verdict, message);
        let from = tree.parent.unwrap_or(self.context.world_rank);
        self.checks.set_difference(decoded(from, Tag::Verdict, message)?);
        Ok(())
    }

    /// Reads the losses, and starts to average running statistics over the replicas.
    fn end_losses(&mut self) -> Result<Phase, Cause> {
        let Self { context, connection, stages, recorder, step, .. } = self;
        read_losses(stages, recorder, step.input())?;
        if context.replica_count() > 1 && !step.program().is_forward_only() {
            let means = exchange_statistics(context, connection, stages);
            if !means.is_empty() {
                return Ok(Phase::Statistics(means));
            }
        }
        self.end_training()
    }

    /// Ends a step without an update, or starts to sum the gradients over replicas.
    fn end_training(&mut self) -> Result<Phase, Cause> {
        let input = self.step.input();
        if input.program.is_forward_only() || !input.update {
            if !input.program.is_forward_only() {
                self.accumulation.add(input.program.microbatches(), input.divisor);
            }
            return Ok(self.report(Update::default()));
        }
        if !self.reduces() {
            return self.end_sums();
        }
        // The program may have started some of them.
        self.stages.indices().into_iter().try_for_each(|stage| self.start_reduction(stage))?;
        Ok(Phase::ReplicaSums)
    }

    /// Exchanges the gradients of copies in the tensor group, once the sums over replicas are complete.
    fn end_sums(&mut self) -> Result<Phase, Cause> {
        self.reductions.clear();
        if self.context.hook().is_some() && self.reduces() {
            // A hook's functions may have replaced the sums.
            self.stages.iter().try_for_each(|stage| check_sums(stage.runner()))?;
        }
        Ok(Phase::Copies(exchange_copies(&self.context, &self.connection, &self.stages)))
    }

    /// Exchanges the gradients of shared parameters.
    fn share_gradients(&mut self) -> Phase {
        let Self { context, connection, stages, parameters, .. } = self;
        Phase::SharedGradients(exchange_shared_gradients(context, connection, stages, parameters))
    }

    /// Sums the squares of this rank's gradients and waits for the other replicas in its subtree.
    fn gather_replica_squares(&self) -> Phase {
        let Self { context, stages, parameters, .. } = self;
        let squares = context.with_idle_threads(|| squares(context, stages, parameters));
        let own = Contribution { squares, next_batches: self.context.sent_batches() };
        let children = &self.context.copies_tree.children;
        Phase::ReplicaSquares(Exchange::gather(own, replica_tag(&self.context), children))
    }

    /// Passes on the squares of the replicas in this rank's subtree. The first replica adds them and waits
    /// for the squares of the other ranks of its pipeline.
    fn gather_squares(&mut self, gathered: Contribution) -> Result<Phase, MessageError> {
        let context = &self.context;
        if let Some(parent) = context.copies_tree.parent {
            self.connection.send(parent, replica_tag(context), Payload::of(&gathered));
            return Ok(Phase::Norm(Exchange::one(parent, Tag::GlobalNorm)));
        }
        let squares = add_replicas(context, &self.stages, &self.parameters, &gathered.squares)?;
        let children = &context.model_tree.children;
        let own = Contribution { squares, ..gathered };
        Ok(Phase::Squares(Exchange::gather(own, Tag::Squares, children)))
    }

    /// Passes on the squares of the ranks in this rank's subtree. The root computes the norm.
    fn compute_norm(&mut self, gathered: Contribution) -> Result<Phase, Cause> {
        let Self { context, connection, parameters, step, .. } = self;
        if let Some(parent) = context.model_tree.parent {
            connection.send(parent, Tag::Squares, Payload::of(&gathered));
            return Ok(Phase::Norm(Exchange::one(parent, Tag::GlobalNorm)));
        }
        let Contribution { squares, next_batches } = gathered;
        let norms = norms(context, parameters, step.input(), self.accumulation, &squares)?;
        Ok(Phase::Norm(Exchange::complete(Norms { next_batches: next_batches.len(), ..norms })))
    }

    /// Passes on the norms. From this point no rank of the subtree waits for this one.
    fn send_norms(&mut self, norms: Norms) -> Phase {
        let (context, bytes) = (&self.context, encoded(&norms));
        if context.is_in_first_expert_group() {
            let children = &context.model_tree.children;
            self.connection.send_bytes(children, Tag::GlobalNorm, &bytes);
        }
        self.connection.send_bytes(&context.copies_tree.children, Tag::GlobalNorm, &bytes);
        let attempt = self.step.input().attempt;
        self.context.take_next_batches(norms.next_batches);
        self.granted = (0..norms.next_batches).fold(self.granted.max(attempt), |last, _| last.next());
        self.step.has_next = self.granted > attempt;
        Phase::Update { norms }
    }

    fn update(&mut self, norms: &Norms) -> Result<Phase, Cause> {
        let start = Instant::now();
        let Self { context, stages, step, parameters, accumulation, .. } = self;
        if norms.whole.is_finite() && step.early.stages == 0 {
            stages.iter_mut().for_each(|stage| stage.runner_mut().drop_borrowed());
        }
        let norm = update(context, stages, step, *accumulation, norms);
        share_storage(context, stages, parameters);
        let norm = norm?;
        stages.note_update();
        self.last_updates = [self.last_updates[1], (step.number, !norm.is_finite())];
        self.accumulation = Accumulation::default();
        let (sums, time) = (self.recorder.since_program(start), start.elapsed());
        let fingerprint = self.fingerprint_if_due()?;
        let early = self.step.early;
        Ok(self.report(Update { gradient_norm: Some(norm), sums, time, early, fingerprint }))
    }

    /// Ends the rank's part of a step with its report.
    fn report(&mut self, update: Update) -> Phase {
        self.step.drop_side_inputs();
        let Self { context, connection, stages, recorder, checks, .. } = self;
        let difference = checks.take_difference();
        let report = RankReport::new(context, connection, stages, recorder, update);
        let report = RankReport { difference, ..report };
        stages.select_version(false);
        self.finish(Outcome { reports: vec![report], ..Outcome::default() })
    }

    /// Across processes, waits for the reports of the rank's subtree; within one process the step is done. It is
    /// also done if all ranks have the next batch: the processes then exchange the reports.
    fn finish(&mut self, mut outcome: Outcome) -> Phase {
        let Self { context, connection, recorder, .. } = self;
        if !context.is_distributed {
            return Phase::Done(outcome);
        }
        let own = report_messages(connection, recorder.origin, &mut outcome.reports);
        if self.step.has_next {
            let reports = std::mem::take(&mut outcome.reports);
            let open = OpenReport::new(context, connection, recorder.origin, reports, own);
            return Phase::Done(Outcome { open: Some(open), ..outcome });
        }
        let reports = Exchange::gather(own, Tag::Report, &context.world_tree.children);
        Phase::Reports { outcome, reports }
    }

    /// Passes on the reports of this rank's subtree. The root then has all reports, and sends the summary.
    fn pass_reports(&mut self, mut outcome: Outcome, messages: Vec<ReportMessage>) -> Phase {
        let Self { context, connection, recorder, .. } = self;
        if let Some(parent) = context.world_tree.parent {
            connection.send(parent, Tag::Report, Payload::of(&messages));
            return Phase::Summary { outcome, message: Exchange::one(parent, Tag::Summary) };
        }
        send_summary(context, connection, recorder.origin, &mut outcome.reports, messages);
        Phase::Done(outcome)
    }

    /// Passes on the parameter lists of this rank's subtree. The root compares all lists and answers.
    fn compare_parameters(&mut self, listed: &[ListedParameter]) -> Result<Phase, Cause> {
        if let Some(parent) = self.context.model_tree.parent {
            self.connection.send(parent, Tag::Parameters, Payload::of(&listed));
            let message = Exchange::one(parent, Tag::SharedParameters);
            return Ok(Phase::SharedParameters { order: NormOrder::new(), message });
        }
        check_shards(listed)?;
        check_holders(listed, self.context.expert_rank().of)?;
        let (shared, order) = compare(listed)?;
        Ok(Phase::SharedParameters { order, message: Exchange::complete(encoded(&shared)) })
    }

    /// Passes on the list of shared parameters and keeps the entries of this rank.
    fn learn_shared(&mut self, order: NormOrder, message: &Arc<[u8]>) -> Result<Phase, MessageError> {
        let tree = &self.context.model_tree;
        let from = tree.parent.unwrap_or(self.context.world_rank);
        let shared = decoded(from, Tag::SharedParameters, message)?;
        self.connection.send_bytes(&tree.children, Tag::SharedParameters, message);
        self.parameters = KnownParameters::new(&self.context, order, shared);
        share_storage(&self.context, &mut self.stages, &self.parameters);
        Ok(Phase::Done(Outcome::default()))
    }

    /// Collects the next stage, whose parameters are whole, or visits its module.
    fn collect(&mut self, mut collection: Collection) -> Phase {
        if let Some(stage) = collection.next(&self.stages) {
            collection.collect(&self.context, self.stages.get_mut(stage));
        }
        self.collect_next(collection)
    }

    /// Begins to gather the parameters of the next stage, if they are sharded and needed. All replicas do so
    /// together.
    pub(super) fn collect_next(&mut self, collection: Collection) -> Phase {
        let is_sharded = self.context.is_sharded();
        if let Some(stage) = collection.next(&self.stages) {
            let stage = self.stages.get_mut(stage);
            if is_sharded && collection.needs_trained() && !stage.runner().is_gathered() {
                start_gather(&self.context, &mut self.connection, stage);
            }
            return Phase::Collect(collection);
        }
        if collection.shifts() {
            share_storage(&self.context, &mut self.stages, &self.parameters);
        }
        let (parameters, visited) = collection.into_results();
        let mut outcome = Outcome { parameters, visited, ..Outcome::default() };
        if !is_sharded {
            return Phase::Done(outcome);
        }
        // As in a step, no process finishes before all ranks have.
        let Self { context, connection, stages, recorder, .. } = self;
        outcome.reports = vec![RankReport::new(context, connection, stages, recorder, Update::default())];
        self.finish(outcome)
    }

    /// Passes on the choice of the first rank's process.
    fn pass_shared(&mut self, bytes: Arc<[u8]>) -> Phase {
        self.connection.send_bytes(&self.context.world_tree.children, Tag::Shared, &bytes);
        Phase::Done(Outcome { shared: Some(bytes), ..Outcome::default() })
    }

    /// Passes on the hash of what this rank's subtree knows of a step. The root then knows whether all ranks
    /// know the same.
    fn pass_digest(&mut self, form: StepForm, digest: Option<u64>) -> Phase {
        if let Some(parent) = self.context.world_tree.parent {
            self.connection.send(parent, Tag::StepDigest, Payload::of(&digest));
            return Phase::SameStep { form, same: Exchange::one(parent, Tag::SameStep) };
        }
        Phase::SameStep { form, same: Exchange::complete(digest.is_some()) }
    }

    /// Passes on whether all ranks know the same. If they do not, the rank waits for what its subtree knows.
    fn pass_same(&mut self, form: StepForm, same: bool) -> Phase {
        let children = &self.context.world_tree.children;
        self.connection.send_bytes(children, Tag::SameStep, &encoded(&same));
        if same {
            return Phase::Done(Outcome { agreed: Some(agree_alike(form)), ..Outcome::default() });
        }
        let own = StepForms::new(self.world_rank(), form);
        Phase::StepForms(Exchange::gather(own, Tag::StepForms, children))
    }

    /// Passes on what this rank's subtree knows of a step. The root compares all of it.
    fn pass_forms(&mut self, forms: StepForms) -> Phase {
        if let Some(parent) = self.context.world_tree.parent {
            self.connection.send(parent, Tag::StepForms, Payload::of(&forms));
            return Phase::AgreedStep(Exchange::one(parent, Tag::AgreedStep));
        }
        Phase::AgreedStep(Exchange::complete(encoded(&forms.agree())))
    }

    /// Passes on what all processes agree on.
    fn pass_agreement(&mut self, message: &Arc<[u8]>) -> Result<Phase, MessageError> {
        let tree = &self.context.world_tree;
        self.connection.send_bytes(&tree.children, Tag::AgreedStep, message);
        let from = tree.parent.unwrap_or(self.context.world_rank);
        let agreed = Some(decode_agreement(from, message)?);
        Ok(Phase::Done(Outcome { agreed, ..Outcome::default() }))
    }
}

/// Joins the lists of an exchange in its order.
fn concatenated<T>(lists: Exchange<Vec<T>>) -> Vec<T> {
    lists.into_contents().flatten().collect()
}
