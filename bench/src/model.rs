//! The bench model: a Llama of 8 layers, hidden 512, sequences of 256, one row a microbatch, f32, AdamW.

use std::error::Error;
use std::sync::Arc;

use burn::tensor::{Device, Int, Tensor, TensorData};
use pipewright::checkpoint::RankState;
use pipewright::optimizer::AdamW;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::report::StepReport;
use pipewright::stage::Stage;
use pipewright::transport::World;
use pipewright_models::decoder::DecoderConfig;
use pipewright_models::llama::LlamaConfig;
use pipewright_models::{ConfigError, ModelFamily, cross_entropy};
use pipewright_schedule::{
    Level, LowerConfig, Method, ScheduleSpec, StageIndex, ValidatedProgram, csv, generate, lower, partition,
    validate,
};

pub(crate) const SEQUENCE: usize = 256;
const VOCABULARY: usize = 256;
const SEED: u64 = 7;

/// A pipeline of the bench model with its data.
pub(crate) struct Bench {
    pipeline: Pipeline,
    inputs: Tensor<2, Int>,
    targets: Tensor<2, Int>,
    pub(crate) tokens: usize,
}

impl Bench {
    /// The model under `schedule` on `ranks` ranks, one thread each.
    pub(crate) fn new(schedule: &str, ranks: u32, microbatches: u32) -> Result<Self, Box<dyn Error>> {
        Self::over(World::local(ranks), schedule, ranks, microbatches)
    }

    /// The same on the ranks of `world`.
    pub(crate) fn over(
        world: World,
        schedule: &str,
        ranks: u32,
        microbatches: u32,
    ) -> Result<Self, Box<dyn Error>> {
        let model = config();
        let weights = model.describe(SEQUENCE).weights();
        let program = program(schedule, ranks, microbatches)?;
        let stages = partition(&weights, program.placement().stages(), &Method::Optimal)?;
        let model = Arc::new(model);
        let last = program.placement().last_stage();
        let make = move |stage: StageIndex| -> Result<Stage, ConfigError> {
            let module = model.init_stage(stages.range(stage), SEED, &Device::flex().autodiff())?;
            Ok(if stage == last { Stage::with_loss(module, cross_entropy) } else { Stage::new(module) })
        };
        let optimizer = AdamW { betas: (0.9, 0.95), epsilon: 1e-8, weight_decay: 0.1 }.init();
        let config =
            PipelineConfig { optimizer: Some(optimizer), clip_norm: Some(1.0), ..PipelineConfig::default() };
        let pipeline = Pipeline::launch(program, world, &config, make)?;
        let rows = microbatches as usize;
        Ok(Self { pipeline, inputs: tokens(rows, 0), targets: tokens(rows, 1), tokens: rows * SEQUENCE })
    }

    /// What the ranks run.
    pub(crate) fn program(&self) -> &ValidatedProgram {
        self.pipeline.program()
    }

    /// The state between two steps.
    pub(crate) fn state(&mut self) -> Result<Vec<RankState>, Box<dyn Error>> {
        Ok(self.pipeline.state()?)
    }

    /// One training step.
    pub(crate) fn step(&mut self) -> Result<StepReport, Box<dyn Error>> {
        Ok(self.pipeline.step(self.inputs.clone(), self.targets.clone(), 3e-4)?)
    }

    /// `count` steps after `warmup` that are thrown away.
    pub(crate) fn steps(&mut self, warmup: usize, count: usize) -> Result<Vec<StepReport>, Box<dyn Error>> {
        for _ in 0..warmup {
            self.step()?;
        }
        (0..count).map(|_| self.step()).collect()
    }
}

/// Parameters of each stage when the model is cut into so many.
pub(crate) fn parameters(stages: u32) -> Result<Vec<u64>, Box<dyn Error>> {
    let layers = config().describe(SEQUENCE);
    let cut = partition(&layers.weights(), stages, &Method::Optimal)?;
    let of_range =
        |range: std::ops::Range<usize>| layers.layers[range].iter().map(|layer| layer.parameters).sum();
    Ok(cut.ranges().map(of_range).collect())
}

fn config() -> LlamaConfig {
    let decoder = DecoderConfig {
        hidden_size: 512,
        intermediate_size: 1376,
        num_hidden_layers: 8,
        ..DecoderConfig::new(VOCABULARY, 8)
    };
    decoder.into()
}

/// A sound program, with communication: of a schedule by name, or by its rows as CSV.
pub(crate) fn program(
    schedule: &str,
    ranks: u32,
    microbatches: u32,
) -> Result<ValidatedProgram, Box<dyn Error>> {
    let spec = ScheduleSpec { ranks, microbatches, ..ScheduleSpec::default() };
    let schedule = match schedule.contains(',') {
        true => csv::parse_schedule(schedule)?,
        false => generate(schedule, &spec)?,
    };
    let program = lower(&schedule, &LowerConfig::from(Level::Comms))?;
    Ok(validate(program, Level::Comms)?)
}

/// A stream of ids that a model can learn, from its place `shift` on.
fn tokens(rows: usize, shift: usize) -> Tensor<2, Int> {
    let id = |row: usize, place: usize| ((row * 31 + (place + shift) * (place + shift)) % VOCABULARY) as i32;
    let ids: Vec<i32> = (0..rows).flat_map(|row| (0..SEQUENCE).map(move |place| id(row, place))).collect();
    Tensor::from_data(TensorData::new(ids, [rows, SEQUENCE]), &Device::flex())
}
