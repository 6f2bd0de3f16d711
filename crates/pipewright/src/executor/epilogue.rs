//! The phases after a rank's program, in order. Their protocol is in `README.md` beside this file.

use std::time::Duration;

use pipewright_schedule::StageIndex;

use super::machine::Executor;
use super::step::{Outcome, Phase};
use crate::collective::Exchange;
use crate::failure::Cause;
use crate::message::AwaitedMessage;

impl Executor {
    /// Ends the phase that is done and begins the next one. The first arms list the phases of a step in order.
    fn next_phase(&mut self, done: Phase) -> Result<Phase, Cause> {
        Ok(match done {
            Phase::Actions => self.end_program()?,
            Phase::Statistics(means) => self.set_statistics(means)?,
            Phase::ReplicaSums => self.add_copies_and_shared()?,
            Phase::SharedGradients(sums) => {
                self.set_shared_gradients(sums);
                self.change_gradients()?;
                self.gather_replica_squares()
            }
            Phase::ReplicaSquares(squares) => self.gather_squares(concatenated(squares))?,
            Phase::Squares(squares) => self.compute_norm(concatenated(squares))?,
            Phase::Norm(norms) => self.send_norms(norms.into_one()),
            Phase::Update { norms } => self.update(&norms)?,
            Phase::Reports { outcome, reports } => self.pass_reports(outcome, concatenated(reports)),
            Phase::Summary { outcome, message } => self.pass_summary(outcome, &message.into_one())?,
            // Not phases of a step: before it, at launch, and when parameters are collected.
            Phase::StepForms(forms) => self.pass_forms(concatenated(forms)),
            Phase::AgreedStep(message) => self.pass_agreement(&message.into_one())?,
            Phase::ParameterLists(lists) => self.find_shared(concatenated(lists))?,
            Phase::SharedParameters { order, message } => {
                self.learn_shared(order, &message.into_one())?;
                Phase::Done(Outcome::default())
            }
            Phase::Collect { place, collected } => self.collect_stage(place, collected),
            Phase::Idle | Phase::Done(_) => done,
        })
    }

    /// Takes the messages of a phase that have arrived, or returns a missing one.
    fn receive_phase(&mut self, phase: &mut Phase) -> Result<Option<AwaitedMessage>, Cause> {
        match phase {
            Phase::Statistics(means) => self.receive_statistics(means),
            Phase::ReplicaSums => Ok(self.awaited_reductions()),
            Phase::ParameterLists(lists) => self.receive(lists),
            Phase::SharedGradients(sums) => self.receive_shared_gradients(sums),
            Phase::ReplicaSquares(squares) | Phase::Squares(squares) => self.receive(squares),
            Phase::Norm(norms) => self.receive(norms),
            Phase::Reports { reports, .. } => self.receive(reports),
            Phase::StepForms(forms) => self.receive(forms),
            Phase::SharedParameters { message, .. }
            | Phase::Summary { message, .. }
            | Phase::AgreedStep(message) => self.receive_bytes(message),
            Phase::Collect { place, .. } => {
                let stage = self.stages.get(*place).map(|stage| stage.index);
                stage.map_or(Ok(None), |stage| self.fetch_parameters(stage))
            }
            Phase::Actions | Phase::Update { .. } | Phase::Idle | Phase::Done(_) => Ok(None),
        }
    }

    /// Continues the current phase after the program, or returns the message that it waits for.
    pub(super) fn poll_epilogue(&mut self) -> Result<Option<AwaitedMessage>, Cause> {
        let mut phase = std::mem::take(&mut self.step.phase);
        let awaited = self.receive_phase(&mut phase)?;
        self.step.phase = match awaited {
            Some(_) => phase,
            None => {
                self.board.moved(self.world_rank, self.step.position);
                self.next_phase(phase)?
            }
        };
        Ok(awaited)
    }

    fn end_program(&mut self) -> Result<Phase, Cause> {
        self.release_all();
        self.read_losses()?;
        self.read_auxiliary()?;
        self.exchange_statistics()
    }

    /// Ends a step without an update, or starts to sum the gradients over replicas.
    pub(super) fn end_training(&mut self) -> Result<Phase, Cause> {
        if self.program().is_forward_only() || !self.step.input.update {
            if !self.program().is_forward_only() {
                self.accumulated += self.program().microbatches();
                self.accumulated_divisor += self.step.input.divisor;
            }
            let report = self.report(None, Duration::ZERO);
            return Ok(self.finish(Outcome { reports: vec![report], ..Outcome::default() }));
        }
        if !self.reduces() {
            return self.add_copies_and_shared();
        }
        // The program may have started some of them.
        let stages: Vec<StageIndex> = self.stages.iter().map(|stage| stage.index).collect();
        stages.into_iter().try_for_each(|stage| self.start_reduction(stage))?;
        Ok(Phase::ReplicaSums)
    }

    /// Adds the gradients of copies in the tensor group, and exchanges those of shared parameters, once the sums over
    /// replicas are complete.
    fn add_copies_and_shared(&mut self) -> Result<Phase, Cause> {
        self.step.reductions.clear();
        self.check_own_sums()?;
        self.add_copies()?;
        Ok(self.exchange_shared_gradients())
    }
}

/// Joins the lists of an exchange in its order.
fn concatenated<T>(lists: Exchange<Vec<T>>) -> Vec<T> {
    lists.into_contents().flatten().collect()
}
