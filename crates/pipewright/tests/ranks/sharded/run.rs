//! Launches sharded pipelines, trains them, and compares what they show.

use std::convert::Infallible;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use pipewright::batch::Batch;
use pipewright::checkpoint::{Checkpoint, CheckpointFolder, CheckpointWriter, TrainingState};
use pipewright::mesh::DataParallelMode::{self, Replicated, Sharded};
use pipewright::pipeline::{Pipeline, PipelineConfig, SeededPipeline};
use pipewright::stage::Stage;
use pipewright::train::data::Cursor;
use pipewright::transport::World;
use pipewright_schedule::lower::UnshardConfig;
use pipewright_schedule::{
    Level, LowerConfig, ScheduleSpec, StageIndex, ValidatedProgram, generate, lower, validate,
};
use tempfile::TempDir;

use crate::support::{self, Step, WIDTH, batch, config, split, stage, take_steps};

pub(crate) fn config_of(replicas: u32, mode: DataParallelMode) -> PipelineConfig {
    PipelineConfig { data_parallel: replicas, data_parallel_mode: mode, ..config() }
}

/// Returns a program that gathers the parameters of at most `window` stages of a rank at once.
pub(crate) fn program(
    schedule: &str,
    ranks: u32,
    per_rank: Option<u32>,
    microbatches: u32,
    window: u32,
) -> ValidatedProgram {
    let spec = ScheduleSpec { ranks, stages_per_rank: per_rank, microbatches, ..ScheduleSpec::default() };
    let schedule = generate(schedule, &spec).expect("a schedule");
    let window = NonZeroU32::new(window).expect("a window");
    let unshard = Some(UnshardConfig { window, ..UnshardConfig::default() });
    // With a narrow window, messages follow whole actions; with a wide one, they are sent early.
    let send_early = window.get() > 1;
    let config = LowerConfig { send_early, unshard, ..LowerConfig::from(Level::Full) };
    validate(lower(&schedule, &config).expect("it lowers"), Level::Full).expect("it is sound")
}

pub(crate) type Make = fn(StageIndex, u32) -> Result<Stage, Infallible>;

pub(crate) fn launch_with(
    program: ValidatedProgram,
    replicas: u32,
    mode: DataParallelMode,
    make: Make,
) -> Pipeline {
    let (stages, world) = (program.placement().stages(), World::local(program.ranks() * replicas));
    Pipeline::launch(program, world, &config_of(replicas, mode), move |index| make(index, stages))
        .expect("the pipeline starts")
}

/// Returns the inputs and targets of a step, cut into microbatches.
pub(crate) fn batch_of(step: u64, microbatches: u32) -> Batch {
    let cut = |step| split(batch(step, microbatches), microbatches);
    Batch::new(cut(step), cut(100 + step))
}

/// By path, to the bit.
pub(crate) type Parameters = Vec<(Arc<str>, Vec<u32>)>;

/// Returns the results of steps, and one replica's parameters after them.
pub(crate) fn train(
    pipeline: &mut Pipeline,
    steps: std::ops::Range<u64>,
    microbatches: u32,
) -> (Vec<Step>, Parameters) {
    (take_steps(pipeline, steps, microbatches), parameters(pipeline))
}

pub(crate) fn parameters(pipeline: &mut Pipeline) -> Parameters {
    let named = pipeline.parameters().expect("every rank answers");
    let bits = named.into_iter().map(|parameter| {
        (parameter.path, parameter.data.iter::<f32>().map(f32::to_bits).collect::<Vec<_>>())
    });
    let mut all: Vec<_> = bits.collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// Checks that replicas train in each of the modes to the bits of replicas that hold all parameters.
pub(crate) fn check_modes(
    make: Make,
    program: impl Fn() -> ValidatedProgram,
    (replicas, modes): (u32, &[DataParallelMode]),
    what: &str,
) {
    let microbatches = program().microbatches() * replicas;
    let run = |mode| train(&mut launch_with(program(), replicas, mode, make), 0..4, microbatches);
    let (expected, expected_parameters) = run(Replicated);
    for &mode in modes {
        let (found, parameters) = run(mode);
        assert_eq!(found, expected, "{what}, {mode:?}: losses and norms");
        assert!(parameters == expected_parameters, "{what}, {mode:?}: parameters");
    }
}

pub(crate) fn check_with(make: Make, program: impl Fn() -> ValidatedProgram, replicas: u32, what: &str) {
    check_modes(make, program, (replicas, &[Sharded]), what);
}

/// Returns the pipeline's state after `step`, written and read again. Tensors are read from the folder on
/// demand.
pub(crate) fn saved(pipeline: &mut Pipeline, step: u64) -> (TempDir, Arc<Checkpoint>) {
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let ranks = pipeline.state().expect("a state");
    let (folder, parts) = (CheckpointFolder::own(scratch.path()).expect("a folder"), ranks.len() as u32);
    let mut writer = CheckpointWriter::start(folder, 1, parts, Duration::from_secs(20)).expect("a writer");
    let cursor = Cursor { epoch: 0, index: step };
    let state = TrainingState { step, cursor, description: Default::default(), ranks };
    writer.save(state).expect("it is saved");
    writer.wait().expect("it is written");
    let checkpoint = CheckpointFolder::newest(scratch.path()).expect("a checkpoint");
    (scratch, Arc::new(checkpoint))
}

/// Compares a run that is saved after three steps of `first` and resumed as `second` with an undisturbed run.
pub(crate) fn check_resume(first: (DataParallelMode, u32), second: (DataParallelMode, u32)) {
    const MICROBATCHES: u32 = 12;
    let launch = |(mode, replicas): (DataParallelMode, u32), schedule| {
        launch_with(program(schedule, 2, None, MICROBATCHES / replicas, 3), replicas, mode, stage)
    };
    let mut before = launch(first, "1f1b");
    train(&mut before, 0..3, MICROBATCHES);
    let (_folder, checkpoint) = saved(&mut before, 3);
    let shapes: Vec<Vec<usize>> = checkpoint.parameters().map(|stored| stored.shape.to_vec()).collect();
    assert!(shapes.iter().all(|shape| shape[0] == WIDTH), "a reader sees whole parameters: {shapes:?}");
    let resumed = |cut| {
        let mut after = launch(cut, "interleaved1f1b");
        after.restore(&checkpoint).expect("it is restored");
        let taken = parameters(&mut after);
        (taken, train(&mut after, 3..5, MICROBATCHES))
    };
    let (expected_start, expected) = resumed((Replicated, second.1));
    let (start, found) = resumed(second);
    assert!(
        start == parameters(&mut before),
        "{first:?} to {second:?}: the run continues with the saved parameters"
    );
    assert!(start == expected_start && found == expected, "{first:?} to {second:?}: the next steps");
}

/// Checks that two steps have the same bits for each of the [`support::seeds`] of orders of the ranks.
pub(crate) fn check_interleavings(launch: impl Fn(u64) -> SeededPipeline, microbatches: u32, seeds: u64) {
    let run = |seed| {
        let mut pipeline = launch(seed);
        [0, 1].map(|step| {
            let report = pipeline.step_batch(batch_of(step, microbatches), 1e-2).expect("a step");
            (report.losses, report.gradient_norm)
        })
    };
    let expected = run(0);
    for seed in support::seeds(seeds) {
        assert_eq!(run(seed), expected, "seed {seed}");
    }
}
