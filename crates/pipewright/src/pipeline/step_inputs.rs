//! The input of each rank at the start of a step: its share of the batch, and what all ranks get.

use std::sync::Arc;
use std::time::Instant;

use pipewright_schedule::StageIndex;

use super::assembly::Assembly;
use super::error::PipelineError;
use crate::batch::{Batch, LossFactors};
use crate::executor::StepInput;
use crate::ids::{Attempt, StepNumber, WorldRank};
use crate::mesh::MeshCoord;
use crate::tensor::Values;

/// The purpose of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) enum StepKind {
    /// `unit` is that of the weights of microbatches ([`Batch::unit`]).
    Train {
        learning_rate: f64,
        loss_scale: f64,
        update: bool,
        unit: Option<f64>,
    },
    Evaluate,
}

/// A step and the attempt at it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepAttempt {
    pub step: StepNumber,
    pub attempt: Attempt,
}

impl Assembly {
    /// Returns the input of each of `ranks`, in their order. Each replica gets its share of the microbatches: the rank
    /// of the first stage gets the inputs, that of the last stage the targets.
    pub(crate) fn step_inputs(
        &self,
        ranks: impl Iterator<Item = WorldRank>,
        StepAttempt { step, attempt }: StepAttempt,
        batch: Batch,
        kind: StepKind,
        origin: Instant,
    ) -> Result<Vec<StepInput>, PipelineError> {
        let (program, learning_rate, loss_scale, update, unit) = match (kind, &self.evaluation) {
            (StepKind::Train { learning_rate, loss_scale, update, unit }, _) => {
                (&self.program, learning_rate, loss_scale, update, unit)
            }
            (StepKind::Evaluate, evaluation) => {
                (evaluation.as_ref().unwrap_or(&self.program), 0.0, 1.0, false, None)
            }
        };
        self.board.set_program(program, step);
        let LossFactors { losses, divisor, is_sum, .. } = batch.loss_factors(unit);
        self.check_count(&batch, program.is_forward_only())?;
        let (mut batch, slices) = (batch, program.slices().get() as usize);
        let shares = batch.cut_into(program.slices()).map_err(|source| PipelineError::Cut { source })?;
        let losses: Vec<f64> = (0..shares.len()).map(|number| losses[number / slices]).collect();
        let Batch { mut inputs, mut targets, side_inputs, keep_outputs, kept_stages, .. } = batch;
        let kept_stages: Arc<[StageIndex]> = kept_stages.into();
        let stages = self.program.placement().stages();
        if let Some(&stage) = kept_stages.iter().find(|stage| stage.get() >= stages) {
            return Err(PipelineError::NoStage { stage, stages });
        }
        let keeps_last = keep_outputs || kept_stages.contains(&self.program.placement().last_stage());
        if keeps_last && self.mesh.tensor > 1 {
            return Err(PipelineError::SplitOutputs { tensor_ranks: self.mesh.tensor });
        }
        if slices > 1 && !program.is_forward_only() && (keep_outputs || !kept_stages.is_empty()) {
            return Err(PipelineError::SliceOutputs);
        }
        let placement = self.program.placement();
        let first = placement.rank_of(placement.first_stage());
        let last = placement.rank_of(placement.last_stage());
        let share = self.program.microbatches() as usize;
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

    /// Returns an error if a batch has another number of microbatches than a step.
    fn check_count(&self, batch: &Batch, is_forward_only: bool) -> Result<(), PipelineError> {
        let expected = self.microbatches();
        let optional = is_forward_only && batch.targets.is_empty();
        for (what, found) in [("inputs", batch.inputs.len()), ("targets", batch.targets.len())] {
            if found != expected as usize && !(what == "targets" && optional) {
                return Err(PipelineError::Microbatches { what, found, expected });
            }
        }
        Ok(())
    }
}

fn take_all(microbatches: &mut [Values]) -> Vec<Values> {
    microbatches.iter_mut().map(std::mem::take).collect()
}

fn copy_all(microbatches: &mut [Values]) -> Vec<Values> {
    microbatches.to_vec()
}
