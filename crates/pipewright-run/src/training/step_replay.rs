//! Makes the replay of a step of a run ([`StepReplay`]): the cut of the run, with a rank for each stage and GPipe.

use std::sync::Arc;

use pipewright::batch::Batch;
use pipewright::checkpoint::Checkpoint;
use pipewright::nn::TensorParallel;
use pipewright::pipeline::{PipelineConfig, ReplayedBatches, StepReplay};
use pipewright::stage::Stage;
use pipewright::verification::Verify;
use pipewright_models::InitialParameters;
use pipewright_schedule::error_text::with_causes as sentence;
use pipewright_schedule::lower::{ProgramSource, TrainingLowering};
use pipewright_schedule::{LowerConfig, Recompute, ScheduleSpec, StageIndex, generate};

use crate::error::{ErrorKind, RunError};
use crate::settings::model::STREAM_WINDOW;
use crate::training::launch::{failure, pipeline_config, stage_maker};
use crate::training::prepare::Prepared;

/// A replay whose stages are made as in a run.
pub(crate) type RunReplay = StepReplay<Box<dyn Fn(StageIndex, &TensorParallel) -> Result<Stage, String>>>;

/// Returns a replay of the step of a run after a checkpoint.
pub(crate) fn replay(
    prepared: &Prepared,
    checkpoint: Option<&Arc<Checkpoint>>,
    batches: Vec<Batch>,
    learning_rate: f64,
) -> Result<RunReplay, RunError> {
    let Prepared { settings, model, partition, program, .. } = prepared;
    let (ranks, microbatches) = (partition.stages(), program.microbatches());
    let spec = ScheduleSpec { ranks, microbatches, ..ScheduleSpec::default() };
    let schedule =
        generate("gpipe", &spec).map_err(|error| RunError::new(ErrorKind::Bug, sentence(&error)))?;
    let stream_window = model.streams().then(|| settings.model.streaming().window.unwrap_or(STREAM_WINDOW));
    let trained = model.trained_stages(partition)?;
    let lowering = TrainingLowering { trained, stream_window, ..settings.mesh.lowering() };
    let program = ProgramSource::Schedule(schedule).program(&LowerConfig::from(lowering));
    let program = program.map_err(|error| RunError::new(ErrorKind::Bug, sentence(&error)))?;
    let config = pipeline_config(settings, &**model)?;
    // A stage that is computed again as a whole keeps its inputs alone.
    let recompute =
        if config.recompute == Recompute::None { Recompute::Stage } else { config.recompute.clone() };
    let config = PipelineConfig {
        recompute,
        offload: None,
        verify: Verify::Off,
        name_not_finite: false,
        post_validation: false,
        ..config
    };
    // As in a run that resumes, the checkpoint has all parameters, unless only adapters are trained.
    let is_whole = checkpoint.is_some() && model.adapter().is_none();
    let initial =
        if is_whole { InitialParameters::Seed(settings.run.seed) } else { prepared.initial.clone() };
    let make = stage_maker(model.clone(), initial, partition.clone(), config.precision);
    let step = ReplayedBatches { batches, learning_rate };
    let replay = StepReplay::new(program, config, checkpoint.cloned(), step, Box::new(make) as Box<_>);
    replay.map_err(|error| failure(&error))
}
