//! The input of each rank at the start of a step: its share of the batch, and what all ranks get.

use std::sync::Arc;
use std::time::Instant;

use pipewright_schedule::{StageIndex, ValidatedProgram};

use super::assembly::Assembly;
use super::error::PipelineError;
use crate::batch::{Batch, InputGradientError, LossFactors, Purpose};
use crate::executor::StepInput;
use crate::ids::{Attempt, StepNumber, WorldRank};
use crate::mesh::MeshCoord;
use crate::tensor::Values;

/// The purpose of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) enum StepKind {
    Train { learning_rate: f64, loss_scale: f64, update: bool },
    Evaluate,
}

/// A step and the attempt at it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepAttempt {
    pub step: StepNumber,
    pub attempt: Attempt,
}

impl Assembly {
    /// Returns the input of each of `ranks`, in their order. The batch must be checked ([`Assembly::check_batch`]). Each
    /// replica gets its share of the microbatches: the rank of the first stage gets the inputs, that of the last stage the
    /// targets.
    pub(crate) fn step_inputs(
        &self,
        ranks: impl Iterator<Item = WorldRank>,
        StepAttempt { step, attempt }: StepAttempt,
        batch: Batch,
        factors: &LossFactors,
        kind: StepKind,
        origin: Instant,
    ) -> Result<Vec<StepInput>, PipelineError> {
        let (program, learning_rate, loss_scale, update, wanted_gradients) = match kind {
            StepKind::Train { learning_rate, loss_scale, update } => {
                let wanted = batch.input_gradients()?.wanted();
                (&self.program, learning_rate, loss_scale, update, wanted)
            }
            StepKind::Evaluate => (self.evaluation_program(), 0.0, 1.0, false, Arc::default()),
        };
        self.board.set_program(program, step);
        let &LossFactors { ref losses, divisor, is_sum, .. } = factors;
        let (mut batch, slices) = (batch, program.slices().get() as usize);
        let shares = batch.cut_into(program.slices()).map_err(|source| PipelineError::Cut { source })?;
        let losses: Vec<f64> = (0..shares.len()).map(|number| losses[number / slices]).collect();
        let Batch { mut inputs, mut targets, side_inputs, keep_outputs, kept_stages, .. } = batch;
        let kept_stages: Arc<[StageIndex]> = kept_stages.into();
        let placement = self.program.placement();
        let first = placement.rank_of(placement.first_stage());
        let last = placement.rank_of(placement.last_stage());
        let share = program.microbatches() as usize;
        let of_rank = |world_rank| {
            let MeshCoord { replica, rank, tensor } = self.mesh.coord(world_rank);
            // The last rank of a tensor group takes the tensors of which the others have copies.
            let is_last_of_group = tensor + 1 == self.mesh.tensor;
            let take = if is_last_of_group { take_all } else { copy_all };
            let range = replica as usize * share..(replica as usize + 1) * share;
            let part = |batch: &mut Vec<Values>| batch.get_mut(range.clone()).map(take).unwrap_or_default();
            StepInput {
                step,
                attempt,
                inputs: if rank == first { part(&mut inputs) } else { Vec::new() },
                wanted_gradients: wanted_gradients.clone(),
                targets: if rank == last { part(&mut targets) } else { Vec::new() },
                side_inputs: Arc::new(side_inputs.part(range.start / slices..range.end / slices)),
                loss_weights: losses[range.clone()].into(),
                slice_shares: shares[range].into(),
                divisor,
                is_sum,
                loss_scale,
                keep_outputs,
                kept_stages: kept_stages.clone(),
                learning_rate,
                update,
                program: program.clone(),
                origin,
            }
        };
        Ok(ranks.map(of_rank).collect())
    }

    /// Returns the program that evaluates.
    fn evaluation_program(&self) -> &Arc<ValidatedProgram> {
        self.evaluation.as_ref().unwrap_or(&self.program)
    }

    /// Returns an error if `ranks`, those of this process, cannot take a step or an evaluation with a batch.
    pub(crate) fn check_batch(
        &self,
        ranks: impl Iterator<Item = WorldRank>,
        batch: &Batch,
        purpose: Purpose,
    ) -> Result<(), PipelineError> {
        let is_training = purpose != Purpose::Evaluate;
        self.check_count(ranks, batch, purpose)?;
        self.check_outputs(batch, is_training)?;
        if is_training {
            batch.input_gradients()?;
        } else if batch.wants_gradients() {
            return Err(InputGradientError::Evaluation.into());
        }
        let slices = self.program.slices();
        if !slices.is_one() {
            batch.clone().cut_into(slices).map_err(|source| PipelineError::Cut { source })?;
        }
        Ok(())
    }

    /// Returns an error if a batch has another number of microbatches than a step. Only the processes with the first and the
    /// last stage need inputs and targets.
    fn check_count(
        &self,
        ranks: impl Iterator<Item = WorldRank>,
        batch: &Batch,
        purpose: Purpose,
    ) -> Result<(), PipelineError> {
        let (placement, expected) = (self.program.placement(), self.microbatches_for(purpose));
        let [first, last] =
            [placement.first_stage(), placement.last_stage()].map(|stage| placement.rank_of(stage));
        let ranks: Vec<_> = ranks.map(|rank| self.mesh.coord(rank).rank).collect();
        let inputs = ("inputs", batch.inputs.len(), ranks.contains(&first));
        let is_training = purpose != Purpose::Evaluate;
        let targets = ("targets", batch.targets.len(), is_training && ranks.contains(&last));
        for (what, found, is_needed) in [inputs, targets] {
            if found != expected as usize && (is_needed || found > 0) {
                return Err(PipelineError::Microbatches { what, found, expected });
            }
        }
        // A batch that has neither inputs nor targets has not compared its weights with a number of microbatches.
        match batch.weight_count() {
            Some(found) if found != expected as usize => {
                Err(PipelineError::Microbatches { what: "weights", found, expected })
            }
            _ => Ok(()),
        }
    }

    /// Returns an error if a batch asks for outputs that do not exist.
    fn check_outputs(&self, batch: &Batch, is_training: bool) -> Result<(), PipelineError> {
        let (stages, last) = (self.program.placement().stages(), self.program.placement().last_stage());
        let kept = &batch.kept_stages;
        if let Some(&stage) = kept.iter().find(|stage| stage.get() >= stages) {
            return Err(PipelineError::NoStage { stage, stages });
        }
        if (batch.keep_outputs || kept.contains(&last)) && self.mesh.tensor > 1 {
            return Err(PipelineError::SplitOutputs { tensor_ranks: self.mesh.tensor });
        }
        let keeps = batch.keep_outputs || !kept.is_empty();
        if keeps && is_training && !self.program.slices().is_one() {
            Err(PipelineError::SliceOutputs)
        } else {
            Ok(())
        }
    }
}

fn take_all(microbatches: &mut [Values]) -> Vec<Values> {
    microbatches.iter_mut().map(std::mem::take).collect()
}

fn copy_all(microbatches: &mut [Values]) -> Vec<Values> {
    microbatches.to_vec()
}
