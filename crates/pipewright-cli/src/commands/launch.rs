//! From a prepared run to a trainer: stages with their parameters, an optimizer, ranks that wait for the first step.

use std::path::PathBuf;
use std::sync::Arc;

use burn::tensor::Device;
use pipewright::checkpoint::Checkpoint;
use pipewright::failure::Cause;
use pipewright::mesh::Mesh;
use pipewright::optimizer::AdamW;
use pipewright::pipeline::{Pipeline, PipelineConfig, PipelineError};
use pipewright::stage::Stage;
use pipewright::train::LearningRate;
use pipewright::train::{ResumeError, Trainer};
use pipewright::transport::World;
use pipewright_models::{ModelConfig, ModelFamily, cross_entropy, hf};
use pipewright_schedule::StageIndex;
use pipewright_schedule::partition::Partition;

use crate::commands::crew::{Crew, disagreement, lost};
use crate::commands::prepare::Prepared;
use crate::config::Settings;
use crate::config::optimizer::OptimizerSettings;
use crate::config::pipeline::TransportChoice;
use crate::exhaustion;
use crate::failure::{Exit, Failure};
use crate::signal::Interrupt;

/// Starts this process's ranks where a checkpoint left them.
pub(super) fn launch_from(
    mut prepared: Prepared,
    checkpoint: &Arc<Checkpoint>,
    crew: &mut Crew,
    interrupt: &Interrupt,
) -> Result<Trainer, Failure> {
    // Every parameter comes from the checkpoint: there is no use in reading others first.
    prepared.initial = None;
    let mut trainer = launch(prepared, crew, interrupt)?;
    match trainer.resume(checkpoint) {
        Ok(()) => Ok(trainer),
        Err(ResumeError::Pipeline(error)) => Err(failure(&error)),
        Err(error) => Err(Failure::input(error)),
    }
}

/// Starts this process's ranks: all of them, or the one that it is among the processes of `crew`; with
/// initial parameters.
pub(super) fn launch(prepared: Prepared, crew: &mut Crew, interrupt: &Interrupt) -> Result<Trainer, Failure> {
    exhaustion::watch();
    let transport = prepared.settings.pipeline.transport;
    let mesh = Mesh { pipeline: prepared.program.ranks(), data: prepared.settings.mesh.data_parallel };
    let ranks =
        mesh.ranks().ok_or_else(|| Failure::input(format!("{mesh:?} has more ranks than there can be")))?;
    let world = match transport {
        TransportChoice::Local if crew.is_several() => {
            return Err(Failure::input(
                "several processes were started, and each would run all ranks by itself: set \
                 pipeline.transport=mpi, or start one process",
            ));
        }
        TransportChoice::Local => World::local(ranks),
        TransportChoice::Mpi => crew.take_world()?,
    };
    if world.ranks() != ranks {
        // Told while the processes are still together: a launcher ends all as soon as one has failed.
        return crew.settle(Err(Failure::input(format!(
            "{} process(es) were started for {ranks} ranks: start `mpirun -n {ranks} pipewright ...`, or set \
             pipeline.ranks or mesh.data_parallel",
            world.ranks()
        ))));
    }
    match prepared.model.clone() {
        ModelConfig::Llama(config) => launch_family(prepared, world, config, interrupt),
        ModelConfig::Qwen2(config) => launch_family(prepared, world, config, interrupt),
        other => Err(Failure::new(Exit::Bug, format!("no stages can be made of {other:?}"))),
    }
}

fn launch_family<F: ModelFamily + 'static>(
    prepared: Prepared,
    world: World,
    model: F,
    interrupt: &Interrupt,
) -> Result<Trainer, Failure> {
    let Prepared { settings, initial, program, partition, rows, .. } = prepared;
    let plan = StagePlan { model, from: initial, partition, seed: settings.run.seed };
    let config = PipelineConfig { interrupt: Some(interrupt.flag()), ..pipeline_config(&settings) };
    let pipeline = Pipeline::launch(program, world, &config, move |stage| plan.stage(stage))
        .map_err(|error| failure(&error))?;
    let OptimizerSettings { learning_rate: peak, schedule: decay, warmup_steps, .. } = settings.optimizer;
    let rate = LearningRate { peak, decay, warmup_steps, steps: settings.run.steps };
    Ok(Trainer::new(pipeline, rows, settings.pipeline.rows(), rate))
}

/// How every stage is made, on the thread of its rank.
struct StagePlan<F> {
    model: F,
    from: Option<PathBuf>,
    partition: Partition,
    seed: u64,
}

impl<F: ModelFamily> StagePlan<F> {
    fn stage(&self, stage: StageIndex) -> Result<Stage, String> {
        let (layers, device) = (self.partition.range(stage), Device::flex().autodiff());
        let is_last = layers.end == self.partition.layers();
        let module = match &self.from {
            Some(folder) => {
                hf::load_stage(folder, &self.model, layers, &device).map_err(|error| error.to_string())?
            }
            None => self.model.init_stage(layers, self.seed, &device).map_err(|error| error.to_string())?,
        };
        Ok(if is_last { Stage::with_loss(module, cross_entropy) } else { Stage::new(module) })
    }
}

fn pipeline_config(settings: &Settings) -> PipelineConfig {
    let OptimizerSettings { betas: [beta_1, beta_2], eps, weight_decay, clip_norm, .. } = settings.optimizer;
    let adamw = AdamW {
        betas: (beta_1 as f32, beta_2 as f32),
        epsilon: eps as f32,
        weight_decay: weight_decay as f32,
    };
    PipelineConfig {
        optimizer: Some(adamw.init()),
        clip_norm: (clip_norm > 0.0).then_some(clip_norm),
        threads_per_rank: settings.pipeline.threads_per_rank as usize,
        deadline: settings.run.deadline(),
        data_parallel: settings.mesh.data_parallel,
        data_parallel_mode: settings.mesh.data_parallel_mode,
        ..PipelineConfig::default()
    }
}

/// Whose fault an error of the pipeline is. Settings and program are checked before, so most would be ours.
pub(super) fn failure(error: &PipelineError) -> Failure {
    let exit = match error {
        PipelineError::Agreement(error) => return disagreement(error),
        // A stage is made of the user's files.
        PipelineError::Step(step) if matches!(step.cause, Cause::Build { .. } | Cause::Restore { .. }) => {
            Exit::WrongInput
        }
        PipelineError::Step(_) | PipelineError::Thread { .. } | PipelineError::Diverged { .. } => {
            Exit::RankFailed
        }
        _ => Exit::Bug,
    };
    let lost = if let PipelineError::Step(step) = error { lost(step) } else { None };
    Failure::new(exit, error).loss_of(lost)
}

/// Tells the other processes of a failure that this one alone knows of: they do not wait for it then.
pub(super) fn abandon(trainer: &mut Trainer, failure: Failure) -> Failure {
    trainer.pipeline().abandon(&failure.text());
    failure
}
