//! The bench model: a Llama of 8 layers, hidden 512, sequences of 256, one row a microbatch, f32, AdamW.

use std::error::Error;
use std::num::NonZeroU32;
use std::sync::Arc;

use burn::tensor::{Device, Int, Tensor, TensorData};
use pipewright::checkpoint::RankState;
use pipewright::mesh::DataParallelMode;
use pipewright::optimizer::AdamW;
use pipewright::pipeline::StepSummary;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::stage::Stage;
use pipewright::transport::World;
use pipewright_models::decoder::DecoderConfig;
use pipewright_models::llama::LlamaConfig;
use pipewright_models::{ConfigError, ModelFamily, TrainingModule};
use pipewright_schedule::lower::{TrainingLowering, UnshardConfig, for_training};
use pipewright_schedule::{
    Level, LowerConfig, Method, Recompute, ScheduleSpec, StageIndex, ValidatedProgram, csv, generate, lower,
    partition, validate,
};

/// Tokens of a row.
pub(crate) const SEQUENCE: usize = 256;
pub(crate) const LAYERS: usize = 8;
pub(crate) const WIDTH: usize = 512;
pub(crate) const HEADS: usize = 8;
pub(crate) const INTERMEDIATE: usize = 1376;
const VOCABULARY: usize = 256;
const SEED: u64 = 7;

/// A pipeline of the bench model with its data.
pub(crate) struct Bench {
    pipeline: Pipeline,
    inputs: Tensor<2, Int>,
    targets: Tensor<2, Int>,
    pub(crate) tokens: usize,
}

/// The settings of training.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup<'a> {
    /// The name of a schedule, or its rows as CSV.
    pub(crate) schedule: &'a str,
    /// Ranks of one pipeline.
    pub(crate) ranks: u32,
    /// `None` for the number that the schedule needs.
    pub(crate) stages_per_rank: Option<u32>,
    /// Microbatches of one pipeline.
    pub(crate) microbatches: u32,
    /// Tokens of a row.
    pub(crate) sequence: usize,
    pub(crate) replicas: u32,
    pub(crate) mode: DataParallelMode,
    /// The number of stages of a rank that are gathered at once, if parameters are sharded.
    pub(crate) window: NonZeroU32,
    /// The stages that compute their forward again.
    pub(crate) recompute: &'a Recompute,
    /// Whether to lower the schedule for training. Otherwise messages follow whole actions, for one replica.
    pub(crate) send_early: bool,
}

impl<'a> Setup<'a> {
    pub(crate) fn new(schedule: &'a str, ranks: u32, microbatches: u32) -> Self {
        Self {
            schedule,
            ranks,
            stages_per_rank: None,
            microbatches,
            sequence: SEQUENCE,
            replicas: 1,
            mode: DataParallelMode::Replicated,
            window: UnshardConfig::default().window,
            recompute: &Recompute::None,
            send_early: true,
        }
    }

    /// Makes the program of the setup.
    pub(crate) fn program(&self) -> Result<ValidatedProgram, Box<dyn Error>> {
        let Self { ranks, stages_per_rank, microbatches, .. } = *self;
        let spec = ScheduleSpec { ranks, stages_per_rank, microbatches, ..ScheduleSpec::default() };
        let schedule = match self.schedule.contains(',') {
            true => csv::parse_schedule(self.schedule)?,
            false => generate(self.schedule, &spec)?,
        };
        if !self.send_early {
            return Ok(validate(lower(&schedule, &LowerConfig::from(Level::Comms))?, Level::Comms)?);
        }
        let lowering = TrainingLowering {
            replicas: self.replicas,
            unshard_window: Some(self.window).filter(|_| self.mode == DataParallelMode::Sharded),
            ..TrainingLowering::default()
        };
        Ok(for_training(&schedule, &lowering)?)
    }
}

impl Bench {
    /// Starts the model under `schedule` on `ranks` ranks, with one thread each.
    pub(crate) fn new(schedule: &str, ranks: u32, microbatches: u32) -> Result<Self, Box<dyn Error>> {
        Self::over(World::local(ranks), &Setup::new(schedule, ranks, microbatches))
    }

    /// Starts the model on the ranks of `world`.
    pub(crate) fn over(world: World, setup: &Setup<'_>) -> Result<Self, Box<dyn Error>> {
        let model = config();
        let weights = model.describe(setup.sequence).weights();
        let program = setup.program()?;
        let stages = partition(&weights, program.placement().stages(), &Method::Optimal)?;
        let model = Arc::new(model);
        let last = program.placement().last_stage();
        let make = move |stage: StageIndex| -> Result<Stage, ConfigError> {
            let module = model.init_stage(stages.range(stage), SEED, &Device::flex().autodiff())?;
            Ok(module.into_stage(stage == last))
        };
        let optimizer = AdamW { betas: (0.9, 0.95), epsilon: 1e-8, weight_decay: 0.1 }.init();
        let config = PipelineConfig {
            optimizer: Some(optimizer),
            clip_norm: Some(1.0),
            data_parallel: setup.replicas,
            data_parallel_mode: setup.mode,
            recompute: setup.recompute.clone(),
            ..PipelineConfig::default()
        };
        let pipeline = Pipeline::launch(program, world, &config, make)?;
        let shape = [(setup.microbatches * setup.replicas) as usize, setup.sequence];
        let [inputs, targets] = [0, 1].map(|shift| tokens(shape, shift));
        Ok(Self { pipeline, inputs, targets, tokens: shape.iter().product() })
    }

    /// Returns the program of the ranks.
    pub(crate) fn program(&self) -> &ValidatedProgram {
        self.pipeline.program()
    }

    /// Returns the state of the ranks between two steps.
    pub(crate) fn state(&mut self) -> Result<Vec<RankState>, Box<dyn Error>> {
        Ok(self.pipeline.state()?)
    }

    /// Runs a training step.
    pub(crate) fn step(&mut self) -> Result<StepSummary, Box<dyn Error>> {
        Ok(self.pipeline.step(self.inputs.clone(), self.targets.clone(), 3e-4)?)
    }

    /// Runs `warmup` steps, then `count` steps whose results it returns.
    pub(crate) fn steps(&mut self, warmup: usize, count: usize) -> Result<Vec<StepSummary>, Box<dyn Error>> {
        for _ in 0..warmup {
            self.step()?;
        }
        (0..count).map(|_| self.step()).collect()
    }
}

/// Returns the bytes of each stage's input for one microbatch, if the model is cut into `stages` stages.
pub(crate) fn input_bytes(stages: u32) -> Result<Vec<u64>, Box<dyn Error>> {
    let layers = config().describe(SEQUENCE);
    let cut = partition(&layers.weights(), stages, &Method::Optimal)?;
    let ids = (SEQUENCE * size_of::<i64>()) as u64;
    let input = |range: std::ops::Range<usize>| match range.start.checked_sub(1) {
        Some(before) => layers.layers[before].output_bytes,
        None => ids,
    };
    Ok(cut.ranges().map(input).collect())
}

/// Returns the number of parameters of each stage, if the model is cut into `stages` stages.
pub(crate) fn parameters(stages: u32) -> Result<Vec<u64>, Box<dyn Error>> {
    let layers = config().describe(SEQUENCE);
    let cut = partition(&layers.weights(), stages, &Method::Optimal)?;
    let of_range =
        |range: std::ops::Range<usize>| layers.layers[range].iter().map(|layer| layer.parameters).sum();
    Ok(cut.ranges().map(of_range).collect())
}

/// Returns the inputs and outputs of a layer's matrices.
pub(crate) fn weight_shapes() -> [[usize; 2]; 7] {
    let (square, up) = ([WIDTH, WIDTH], [WIDTH, INTERMEDIATE]);
    [square, square, square, square, up, up, [INTERMEDIATE, WIDTH]]
}

/// Returns the configuration of the bench model.
pub(crate) fn config() -> LlamaConfig {
    let decoder = DecoderConfig {
        hidden_size: WIDTH,
        intermediate_size: INTERMEDIATE,
        num_hidden_layers: LAYERS,
        ..DecoderConfig::new(VOCABULARY, HEADS)
    };
    decoder.into()
}

/// Makes a stream of ids that a model can learn, from position `shift` on.
pub(crate) fn tokens([rows, sequence]: [usize; 2], shift: usize) -> Tensor<2, Int> {
    let id = |row: usize, place: usize| ((row * 31 + (place + shift) * (place + shift)) % VOCABULARY) as i32;
    let ids: Vec<i32> = (0..rows).flat_map(|row| (0..sequence).map(move |place| id(row, place))).collect();
    Tensor::from_data(TensorData::new(ids, [rows, sequence]), &Device::flex())
}
