//! The bytes that a rank holds with sharded parameters, counted by the allocator: its shards and one gathered
//! stage.

use std::convert::Infallible;
use std::num::NonZeroU32;

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use pipewright::batch::Batch;
use pipewright::mesh::DataParallelMode;
use pipewright::nn::Linear;
use pipewright::optimizer::AdamW;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::transport::World;
use pipewright_schedule::lower::UnshardConfig;
use pipewright_schedule::{Level, LowerConfig, ScheduleSpec, StageIndex, generate, lower, validate};

const WIDTH: usize = 256;
const STAGES: u32 = 8;
const MICROBATCHES: u32 = 2;
/// Bytes of one stage's parameters.
const STAGE: u64 = (WIDTH * WIDTH * 4) as u64;

#[derive(Module, Debug)]
struct Layer {
    linear: Linear,
}

impl StageModule for Layer {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        input.clone() + self.linear.forward(input)
    }
}

fn stage(index: StageIndex) -> Result<Stage, Infallible> {
    let device = Device::flex().autodiff();
    let weight = Param::from_tensor(Tensor::<2>::ones([WIDTH, WIDTH], &device.clone().inner()) * 1e-3);
    let module = Layer {
        linear: Linear { weight: weight.map(|weight| weight.autodiff().require_grad()), bias: None },
    };
    let loss = |output: Tensor<2>, target: Tensor<2>| (output - target).powf_scalar(2.0).mean();
    let made = if index.get() + 1 == STAGES { Stage::with_loss(module, loss) } else { Stage::new(module) };
    Ok(made.with_prefix(&format!("layers.{index}")))
}

/// Launches a pipeline with all stages on one rank, which gathers one stage at a time.
fn launch(schedule: &str, config: PipelineConfig) -> Pipeline {
    let spec = ScheduleSpec {
        ranks: 1,
        stages_per_rank: Some(STAGES),
        microbatches: MICROBATCHES,
        ..ScheduleSpec::default()
    };
    let unshard = Some(UnshardConfig { window: NonZeroU32::MIN, ..UnshardConfig::default() });
    let lowering = LowerConfig { unshard, ..LowerConfig::from(Level::Full) };
    let lowered = lower(&generate(schedule, &spec).expect("a schedule"), &lowering).expect("it lowers");
    let program = validate(lowered, Level::Full).expect("it is sound");
    let config = PipelineConfig { optimizer: Some(AdamW::default().init()), ..config };
    let world = World::local(config.data_parallel);
    Pipeline::launch(program, world, &config, stage).expect("it starts")
}

/// Returns the inputs, or the targets, of a step of this many replicas.
fn rows(replicas: u32) -> Tensor<2> {
    Tensor::ones([(MICROBATCHES * replicas) as usize, WIDTH], &Device::flex())
}

/// Returns the highest peak of any rank in the third step of `schedule`.
fn peak(schedule: &str, replicas: u32, mode: DataParallelMode) -> u64 {
    let config =
        PipelineConfig { data_parallel: replicas, data_parallel_mode: mode, ..PipelineConfig::default() };
    let mut pipeline = launch(schedule, config);
    let batch = || rows(replicas);
    let mut step = || pipeline.step(batch(), batch(), 1e-3).expect("a step").peak_bytes;
    let (_, _, peaks) = (step(), step(), step());
    peaks.into_iter().max().expect("a rank")
}

/// A limit in bytes: a rank's shards, whole tensors of some stages, and room for activations and for the
/// packed operands of matrix products.
fn check(schedule: &str, replicas: u32, stages_beside: u64) {
    check_mode(schedule, replicas, DataParallelMode::Sharded, stages_beside);
}

fn check_mode(schedule: &str, replicas: u32, mode: DataParallelMode, stages_beside: u64) {
    let whole = peak(schedule, replicas, DataParallelMode::Replicated);
    // Parameters, gradients and two moments.
    let all = 4 * STAGE * u64::from(STAGES);
    assert!(whole >= all, "{schedule}: {whole} of {all} bytes");
    let found = peak(schedule, replicas, mode);
    let part = all / u64::from(mode.shards(replicas));
    let limit = part + stages_beside * STAGE + STAGE / 2;
    assert!(
        (part..=limit).contains(&found),
        "{schedule}, {replicas} replicas: {found} bytes, at most {limit}"
    );
}

#[test]
fn a_rank_holds_its_part_and_one_stage() {
    // The stage's parameters and gradients, and the messages of both.
    check("loopedbfs", 2, 4);
    check("loopedbfs", 4, 4);
}

#[test]
fn a_rank_in_groups_holds_the_part_of_its_group() {
    check_mode("loopedbfs", 4, DataParallelMode::Hybrid { shards: 2 }, 4);
    check_mode("loopedbfs", 8, DataParallelMode::Hybrid { shards: 4 }, 4);
}

#[test]
fn gradients_wait_for_their_reduction() {
    // A stage holds whole gradients until its last microbatch.
    check("interleaved1f1b", 2, 4 + u64::from(STAGES));
}

#[test]
fn gathered_parameters_are_held_between_batches() {
    let peak = |keep_gathered| {
        let config = PipelineConfig {
            data_parallel: 2,
            data_parallel_mode: DataParallelMode::Sharded,
            keep_gathered,
            ..PipelineConfig::default()
        };
        let mut pipeline = launch("loopedbfs", config);
        let batch = || Batch::split(rows(2), rows(2), 2 * MICROBATCHES).expect("it splits");
        let mut peaks = Vec::new();
        for _ in 0..2 {
            pipeline.accumulate(batch()).expect("a batch");
            peaks = pipeline.accumulate(batch()).expect("a batch").peak_bytes;
            pipeline.step_batch(batch(), 1e-3).expect("a step");
        }
        peaks.into_iter().max().expect("a rank")
    };
    let (kept, dropped) = (peak(true), peak(false));
    // All stages but the one or two that the window holds anyway.
    let more = kept.saturating_sub(dropped) / STAGE;
    assert!((u64::from(STAGES) - 3..=u64::from(STAGES)).contains(&more), "{kept} and {dropped} bytes");
}
