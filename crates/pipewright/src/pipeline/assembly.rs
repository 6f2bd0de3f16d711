//! The settings that all ranks of a pipeline share, and the input of each rank at the start of a step.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Instant;

use pipewright_schedule::{Level, StageIndex, ValidatedProgram};

use super::config::PipelineConfig;
use super::error::PipelineError;
use crate::batch::{Batch, LossFactors};
use crate::executor::{Executor, ExecutorConfig, MeshEndpoint, MeshSettings, StepInput};
use crate::failure::{Abort, Cause, StepError};
use crate::ids::{Attempt, StepNumber, WorldRank};
use crate::loss_scale::LossScale;
use crate::memory::RankMemory;
use crate::mesh::{Mesh, MeshCoord};
use crate::nn::TensorParallel;
use crate::optimizer::ClipGroup;
use crate::progress::ProgressBoard;
use crate::stage::{Stage, StageSettings};
use crate::tensor::{Metadata, Precision, Values};
use crate::transport::{Endpoint, World};

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

/// The settings that all ranks of a pipeline share, whether the ranks have their own threads or share one.
#[derive(Clone)]
pub(crate) struct Assembly {
    pub(crate) program: Arc<ValidatedProgram>,
    pub(crate) mesh: Mesh,
    /// The forward part of the program; `None` before the first evaluation.
    pub(crate) evaluation: Option<Arc<ValidatedProgram>>,
    pub(crate) config: PipelineConfig,
    pub(crate) board: ProgressBoard,
    pub(crate) abort: Abort,
}

impl Assembly {
    /// Checks that program, world and configuration fit together.
    pub(crate) fn new(
        program: ValidatedProgram,
        world: World,
        config: &PipelineConfig,
    ) -> Result<(Self, Vec<Endpoint>), PipelineError> {
        let (endpoints, board) = world.into_parts();
        if program.level() == Level::Compute && program.ranks() > 1 {
            return Err(PipelineError::NotLowered { level: program.level() });
        }
        let ranks = endpoints.first().map_or(0, Endpoint::ranks);
        let mesh = config.mesh(program.ranks());
        if mesh.shard_groups().is_none() {
            return Err(PipelineError::Shards { replicas: mesh.data, shards: mesh.shards });
        }
        if mesh.ranks() != Some(ranks) || ranks == 0 {
            let Mesh { pipeline, data, tensor, .. } = mesh;
            let (program, replicas, tensor_ranks) = (pipeline, data, tensor);
            return Err(PipelineError::WorldSize { world: ranks, program, replicas, tensor_ranks });
        }
        if config.optimizer.is_none() && !program.is_forward_only() {
            return Err(PipelineError::NoOptimizer);
        }
        if config.is_sharded() && program.level() != Level::Full {
            return Err(PipelineError::NeverGathers { level: program.level() });
        }
        check_metadata(&config.metadata, program.placement().stages())?;
        if let Some(stage) = config.recompute.largest_stage()
            && stage > program.placement().last_stage()
        {
            return Err(PipelineError::RecomputedStage { stage, stages: program.placement().stages() });
        }
        if !config.loss_scaling.is_valid() {
            return Err(PipelineError::LossScaling { settings: config.loss_scaling });
        }
        let abort = endpoints.first().map(|endpoint| endpoint.abort().clone()).unwrap_or_default();
        let program = Arc::new(program);
        board.set_tensor_ranks(mesh.tensor);
        board.run(&program, StepNumber::default());
        let evaluation = program.is_forward_only().then(|| program.clone());
        Ok((Self { program, mesh, evaluation, config: config.clone(), board, abort }, endpoints))
    }

    /// Builds a rank's stages and its executor. Must be called on the rank's own thread.
    pub(crate) fn build<E: Display>(
        &self,
        endpoint: Endpoint,
        memory: RankMemory,
        make: &dyn Fn(StageIndex, &TensorParallel) -> Result<Stage, E>,
    ) -> Result<Executor, StepError> {
        let world_rank = endpoint.rank();
        let rank = self.mesh.coord(world_rank).rank;
        let failure = |message| StepError {
            rank: world_rank,
            step: StepNumber::default(),
            action: None,
            cause: Cause::Build { message },
        };
        let settings = MeshSettings {
            mesh: self.mesh,
            devices: self.config.devices.clone(),
            deadline: self.config.deadline,
            board: self.board.clone(),
            memory: memory.clone(),
        };
        let endpoint = MeshEndpoint::new(endpoint, settings);
        let tensor = endpoint.tensor_parallel();
        let placement = self.program.placement();
        let clip_groups: Arc<[ClipGroup]> = self.config.clip_groups.clone().into();
        let mut stages = Vec::new();
        for &stage in placement.stages_of(rank) {
            let made = make(stage, &tensor).map_err(|error| failure(format!("stage {stage}: {error}")))?;
            let settings = StageSettings {
                device: self.config.devices.of(world_rank).cloned(),
                precision: self.config.precision,
                optimizer: self.config.optimizer.clone(),
                tensor_ranks: self.mesh.tensor,
                optimizer_groups: self.config.optimizer_groups.clone().into(),
                clip_groups: clip_groups.clone(),
                part: endpoint.part(),
                must_have_loss: stage == placement.last_stage() && !self.program.is_forward_only(),
                by_block: self.config.recompute.is_by_block(),
            };
            let runner =
                made.prepare(settings).map_err(|error| failure(format!("stage {stage}: {error}")))?;
            self.board.moved(world_rank, 0);
            stages.push((stage, runner));
        }
        let config = ExecutorConfig {
            program: self.program.clone(),
            board: self.board.clone(),
            metadata: self.config.metadata.clone(),
            check_metadata: self.config.check_metadata,
            on_mismatch: self.config.on_mismatch,
            seed: self.config.seed,
            clip_norm: self.config.clip_norm,
            clip_groups,
            gradient_hook: self.config.gradient_hook.clone(),
            recompute: self.config.recompute.clone(),
            hook: self.config.hook.clone(),
            interrupt: self.config.interrupt.clone(),
        };
        Ok(Executor::new(config, endpoint, stages, memory))
    }

    /// Returns the loss scale before the first step; `None` if losses are not scaled.
    pub(crate) fn loss_scale(&self) -> Option<LossScale> {
        let is_scaled = self.config.precision == Precision::F16;
        is_scaled.then(|| LossScale::new(self.config.loss_scaling))
    }

    /// Returns the number of microbatches of a step, over all replicas.
    pub(crate) fn microbatches(&self) -> u32 {
        self.program.microbatches() * self.mesh.data
    }

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
        self.board.run(program, step);
        let LossFactors { losses, divisor, is_sum, .. } = batch.loss_factors(unit);
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
        let expected = self.microbatches();
        let optional = program.is_forward_only() && targets.is_empty();
        for (what, found) in [("inputs", inputs.len()), ("targets", targets.len())] {
            if found != expected as usize && !(what == "targets" && optional) {
                return Err(PipelineError::Microbatches { what, found, expected });
            }
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
                side_inputs: Arc::new(side_inputs.part(range.clone())),
                loss_weights: losses[range].into(),
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
}

/// Returns an error if metadata is given for other stages than those of the program.
pub(super) fn check_metadata(metadata: &Metadata, stages: u32) -> Result<(), PipelineError> {
    let expected = stages as usize - 1;
    match metadata {
        Metadata::Static { stages } if stages.len() != expected => {
            Err(PipelineError::Metadata { found: stages.len(), expected })
        }
        Metadata::Partial { stages: known, .. } => {
            match known.keys().find(|stage| !(1..stages).contains(&stage.get())) {
                Some(&stage) => Err(PipelineError::MetadataStage { stage, stages }),
                None => Ok(()),
            }
        }
        _ => Ok(()),
    }
}

fn take_all(microbatches: &mut [Values]) -> Vec<Values> {
    microbatches.iter_mut().map(std::mem::take).collect()
}

fn copy_all(microbatches: &mut [Values]) -> Vec<Values> {
    microbatches.to_vec()
}
