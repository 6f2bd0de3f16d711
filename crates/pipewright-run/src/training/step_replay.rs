//! Makes the replay of a step of a run ([`StepReplay`]): the cut of the run, with a rank for each stage, which runs all forwards
//! before its backwards.

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
use pipewright_schedule::{
    Action, LowerConfig, Microbatch, Placement, Recompute, Schedule, ScheduleError, StageIndex,
};

use crate::error::{ErrorKind, RunError};
use crate::settings::model::STREAM_WINDOW;
use crate::training::launch::stage_maker;
use crate::training::pipeline_settings::pipeline_config;
use crate::training::prepare::Prepared;

/// A replay whose stages are made as in a run.
pub(crate) type RunReplay =
    StepReplay<Box<dyn Fn(StageIndex, &TensorParallel) -> Result<Stage, String> + Sync>>;

/// Returns a replay of the step of a run after a checkpoint.
pub(crate) fn replay(
    prepared: &Prepared,
    checkpoint: Option<&Arc<Checkpoint>>,
    batches: Vec<Batch>,
    learning_rate: f64,
) -> Result<RunReplay, RunError> {
    let Prepared { settings, model, partition, program, .. } = prepared;
    let schedule = forwards_first(&program.as_program().computation());
    let schedule = schedule.map_err(|error| RunError::new(ErrorKind::Bug, sentence(&error)))?;
    let stream_window = model.streams().then(|| settings.model.streaming().window.unwrap_or(STREAM_WINDOW));
    let trained = model.trained_stages(partition)?;
    let lowering = TrainingLowering { trained, stream_window, ..settings.mesh.lowering() };
    let program = ProgramSource::Schedule(schedule).program(&LowerConfig::from(lowering));
    let program = program.map_err(|error| RunError::new(ErrorKind::Bug, sentence(&error)))?;
    let config = pipeline_config(settings, &**model)?;
    // A stage that is computed again as a whole keeps its inputs alone. Slices cannot be recomputed.
    let recompute = match &config.recompute {
        Recompute::None if program.slices().is_one() => Recompute::Stage,
        recompute => recompute.clone(),
    };
    let config = PipelineConfig {
        recompute,
        offload: None,
        verify: Verify::Off,
        name_not_finite: false,
        post_validation: false,
        // Batches are also computed alone.
        keep_gathered: false,
        ..config
    };
    // As in a run that resumes, the checkpoint has all parameters, unless only adapters are trained.
    let is_whole = checkpoint.is_some() && model.adapter().is_none();
    let initial =
        if is_whole { InitialParameters::Seed(settings.run.seed) } else { prepared.initial.clone() };
    let make = stage_maker(model.clone(), initial, partition.clone(), config.precision);
    let step = ReplayedBatches { batches, learning_rate };
    Ok(StepReplay::new(program, config, checkpoint.cloned(), step, Box::new(make) as Box<_>))
}

/// Returns a schedule of the same stages, each on a rank of its own, which runs all forwards before its backwards, so that it waits
/// least often. A stage adds its gradients in the order of the run, on which sums in half precision and of slices depend.
fn forwards_first(run: &Schedule) -> Result<Schedule, ScheduleError> {
    let all = || (0..run.microbatches()).map(Microbatch::new);
    let mut added: Vec<Vec<Microbatch>> = run.placement().all_stages().map(|_| Vec::new()).collect();
    for action in run.rows().iter().flatten().flatten().flat_map(|action| action.parts()) {
        if let Action::Backward { stage, microbatch } | Action::WeightBackward { stage, microbatch } = action
        {
            added[stage.index()].push(microbatch);
        }
    }
    let row = |(stage, added): (StageIndex, Vec<Microbatch>)| {
        // A frozen stage adds nothing.
        let backwards = if added.is_empty() { in_order_of_backwards(run) } else { added };
        let forwards = all().map(|microbatch| Action::Forward { stage, microbatch });
        let backwards = backwards.into_iter().map(|microbatch| Action::Backward { stage, microbatch });
        forwards.chain(backwards).map(Some).collect()
    };
    let rows = run.placement().all_stages().zip(added).map(row).collect();
    let placement = Placement::looped(run.placement().stages(), 1)?;
    Schedule::new(placement, run.microbatches(), rows)?.with_slices(run.slices())
}

/// Returns the microbatches in ascending order, the slices of each in descending order.
fn in_order_of_backwards(run: &Schedule) -> Vec<Microbatch> {
    let slices = run.slices().get();
    let of_whole = |whole: u32| (0..slices).rev().map(move |slice| Microbatch::new(whole * slices + slice));
    (0..run.microbatches() / slices).flat_map(of_whole).collect()
}
