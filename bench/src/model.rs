//! The bench model: a Llama of 8 layers, hidden 512, sequences of 256, one row per microbatch, AdamW, and f32
//! unless a bench sets another precision.

use std::num::NonZeroU32;
use std::path::Path;
use std::time::Duration;

use burn::tensor::{Device, Int, Tensor, TensorData};
use pipewright::checkpoint::RankState;
use pipewright::mesh::DataParallelMode;
use pipewright::optimizer::AdamW;
use pipewright::pipeline::StepSummary;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::tensor::Precision;
use pipewright::train::Trainer;
use pipewright::train::data::TokenRows;
use pipewright::transport::World;
use pipewright::verification::Verify;
use pipewright_models::decoder::DecoderConfig;
use pipewright_models::hf;
use pipewright_models::llama::LlamaConfig;
use pipewright_models::{CutModel, InitialParameters, ModelConfig, ModelError, ModelFamily};
use pipewright_schedule::lower::{TrainingLowering, UnshardConfig, for_training};
use pipewright_schedule::{
    Level, LowerConfig, Method, Recompute, ScheduleSpec, StageIndex, TrainedStages, ValidatedProgram, csv,
    generate, lower, partition, validate,
};

use crate::harness::Outcome;

/// Tokens of a row.
pub(crate) const SEQUENCE: usize = 256;
pub(crate) const LAYERS: usize = 8;
pub(crate) const WIDTH: usize = 512;
pub(crate) const HEADS: usize = 8;
pub(crate) const INTERMEDIATE: usize = 1376;
pub(crate) const VOCABULARY: usize = 256;
pub(crate) const SEED: u64 = 7;

/// A pipeline of the bench model with its data.
pub(crate) struct Bench {
    pipeline: Pipeline,
    inputs: Tensor<2, Int>,
    targets: Tensor<2, Int>,
    rate: f64,
    pub(crate) tokens: usize,
}

/// The learning rate.
const RATE: f64 = 3e-4;

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
    /// How the layers are cut into stages.
    pub(crate) cut: &'a Method,
    pub(crate) replicas: u32,
    pub(crate) mode: DataParallelMode,
    /// The number of stages of a rank that are gathered at once, if parameters are sharded.
    pub(crate) window: NonZeroU32,
    /// The stages that compute their forward again.
    pub(crate) recompute: &'a Recompute,
    pub(crate) precision: Precision,
    /// Whether suspicious steps are computed again.
    pub(crate) verify: Verify,
    /// The largest norm of the gradients.
    pub(crate) clip_norm: f64,
    /// Whether ranks update while the gradient norm is computed.
    pub(crate) post_validation: bool,
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
            cut: &Method::Optimal,
            replicas: 1,
            mode: DataParallelMode::Replicated,
            window: UnshardConfig::default().window,
            recompute: &Recompute::None,
            precision: Precision::F32,
            verify: Verify::Off,
            clip_norm: 1.0,
            post_validation: false,
            send_early: true,
        }
    }

    /// Makes the program of the setup, in which all stages are trained.
    pub(crate) fn program(&self) -> Outcome<ValidatedProgram> {
        self.program_of(TrainedStages::ALL)
    }

    /// Makes the program of the setup in which these stages are trained.
    fn program_of(&self, trained: TrainedStages) -> Outcome<ValidatedProgram> {
        let Self { ranks, stages_per_rank, microbatches, .. } = *self;
        let spec = ScheduleSpec { ranks, stages_per_rank, microbatches, ..ScheduleSpec::default() };
        let schedule = if self.schedule.contains(',') {
            csv::parse_schedule(self.schedule)?
        } else {
            generate(self.schedule, &spec)?
        };
        if !self.send_early {
            return Ok(validate(lower(&schedule, &LowerConfig::from(Level::Comms))?, Level::Comms)?);
        }
        let lowering = TrainingLowering {
            replicas: self.replicas,
            unshard_window: Some(self.window).filter(|_| self.mode.shards(self.replicas) > 1),
            trained,
            ..TrainingLowering::default()
        };
        Ok(for_training(&schedule, &lowering)?)
    }
}

impl Bench {
    /// Starts the model under `schedule` on `ranks` ranks, with one thread each.
    pub(crate) fn new(schedule: &str, ranks: u32, microbatches: u32) -> Outcome<Self> {
        Self::over(World::local(ranks), &Setup::new(schedule, ranks, microbatches))
    }

    /// Starts the model on the ranks of `world`.
    pub(crate) fn over(world: World, setup: &Setup<'_>) -> Outcome<Self> {
        Self::of_model(world, setup, ModelConfig::Llama(config()), InitialParameters::Seed(SEED))
    }

    /// Starts another model with the bench model's vocabulary.
    pub(crate) fn of_model(
        world: World,
        setup: &Setup<'_>,
        model: ModelConfig,
        initial: InitialParameters,
    ) -> Outcome<Self> {
        Self::of_cut(world, setup, model.into(), initial)
    }

    /// Starts a model that may have adapters. It is cut as if all of its parameters were trained.
    pub(crate) fn of_cut(
        world: World,
        setup: &Setup<'_>,
        model: CutModel,
        initial: InitialParameters,
    ) -> Outcome<Self> {
        let weights = model.model().describe(setup.sequence).weights();
        let stages = partition(&weights, setup.program()?.placement().stages(), setup.cut)?;
        let program = setup.program_of(model.trained_stages(&stages)?)?;
        let make = move |stage: StageIndex| {
            model.training_stage(stages.range(stage), &initial, Device::flex().autodiff())
        };
        let optimizer = AdamW { betas: (0.9, 0.95), epsilon: 1e-8, weight_decay: 0.1 }.init();
        let config = PipelineConfig {
            optimizer: Some(optimizer),
            clip_norm: Some(setup.clip_norm),
            post_validation: setup.post_validation,
            data_parallel: setup.replicas,
            data_parallel_mode: setup.mode,
            recompute: setup.recompute.clone(),
            precision: setup.precision,
            verify: setup.verify,
            ..PipelineConfig::default()
        };
        let pipeline = Pipeline::launch(program, world, &config, make)?;
        let shape = [(setup.microbatches * setup.replicas) as usize, setup.sequence];
        let [inputs, targets] = [0, 1].map(|shift| tokens(shape, shift));
        Ok(Self { pipeline, inputs, targets, rate: RATE, tokens: shape.iter().product() })
    }

    /// Trains on these rows, each with one id more than the model sees at once, instead of [`tokens`].
    pub(crate) fn on_rows(mut self, rows: &[Vec<i32>]) -> Self {
        let length = rows.first().map_or(0, Vec::len).saturating_sub(1);
        let part = |start: usize| {
            rows.iter().flat_map(|row| row[start..].iter().take(length)).copied().collect::<Vec<i32>>()
        };
        self.set_batch([part(0), part(1)], [rows.len(), length]);
        self
    }

    /// Trains on a batch of the shape `[rows, sequence]`: inputs and targets.
    pub(crate) fn set_batch(&mut self, ids: [Vec<i32>; 2], shape: [usize; 2]) {
        [self.inputs, self.targets] =
            ids.map(|ids| Tensor::from_data(TensorData::new(ids, shape), &Device::flex()));
    }

    /// Trains with another learning rate.
    pub(crate) fn with_rate(self, rate: f64) -> Self {
        Self { rate, ..self }
    }

    /// Returns a trainer of the model on these rows.
    pub(crate) fn into_trainer(self, rows: TokenRows) -> Trainer {
        let (batch_rows, rate) = (self.tokens / rows.seq_len(), self.rate);
        Trainer::new(self.pipeline, rows, batch_rows, move |_: u64| rate)
    }

    /// Returns the program of the ranks.
    pub(crate) fn program(&self) -> &ValidatedProgram {
        self.pipeline.program()
    }

    /// Returns the state of the ranks between two steps.
    pub(crate) fn state(&mut self) -> Outcome<Vec<RankState>> {
        Ok(self.pipeline.state()?)
    }

    /// Runs a training step.
    pub(crate) fn step(&mut self) -> Outcome<StepSummary> {
        Ok(self.pipeline.step(self.inputs.clone(), self.targets.clone(), self.rate)?)
    }

    /// Runs `warmup` steps, then `count` steps whose results it returns.
    pub(crate) fn steps(&mut self, warmup: usize, count: usize) -> Outcome<Vec<StepSummary>> {
        for _ in 0..warmup {
            self.step()?;
        }
        (0..count).map(|_| self.step()).collect()
    }
}

/// Returns the seconds of a step without the optimizer.
pub(crate) fn without_update(step: &StepSummary) -> f64 {
    let update = step.update.iter().max().map_or(0.0, Duration::as_secs_f64);
    step.wall.as_secs_f64() - update
}

/// Runs a step of each pipeline at the same time.
pub(crate) fn side_by_side(pipelines: &mut [Bench]) -> Outcome<Vec<StepSummary>> {
    let step = |bench: &mut Bench| bench.step().map_err(|error| error.to_string());
    let reports: Result<Vec<StepSummary>, String> = std::thread::scope(|scope| {
        let threads: Vec<_> = pipelines.iter_mut().map(|bench| scope.spawn(move || step(bench))).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err("a thread panicked".into())))
            .collect()
    });
    Ok(reports?)
}

/// Returns the bytes of each stage's input for one microbatch, if the model is cut into `stages` stages.
pub(crate) fn input_bytes(stages: u32) -> Outcome<Vec<u64>> {
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
pub(crate) fn parameters(stages: u32) -> Outcome<Vec<u64>> {
    let layers = config().describe(SEQUENCE);
    let cut = partition(&layers.weights(), stages, &Method::Optimal)?;
    let of_range =
        |range: std::ops::Range<usize>| layers.layers[range].iter().map(|layer| layer.parameters).sum();
    Ok(cut.ranges().map(of_range).collect())
}

/// Returns how many blocks the first of two ranks has. The embedding is the first layer of a model.
pub(crate) fn blocks_of_first(model: &ModelConfig, sequence: usize) -> Outcome<usize> {
    let cut = partition(&model.describe(sequence).weights(), 2, &Method::Optimal)?;
    let first = cut.ranges().next().ok_or("a partition has stages")?;
    Ok(first.len() - 1)
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

/// Writes a model with random parameters as a Hugging Face directory. `folder` must not exist or must be
/// empty.
pub(crate) fn write<F: ModelFamily>(config: &F, folder: &Path) -> Result<(), ModelError> {
    let model = config.init_stage(0..config.layers(), SEED, Device::flex())?;
    hf::save(folder, config, &[&model])
}

/// Makes rows of ids without a pattern, each with one id more than `sequence`. Routers spread them over all
/// experts.
pub(crate) fn random_rows(rows: u32, sequence: usize) -> Vec<Vec<i32>> {
    let mut ids = random_numbers().map(|number| (number % VOCABULARY as u64) as i32);
    (0..rows).map(|_| ids.by_ref().take(sequence + 1).collect()).collect()
}

/// Returns random numbers below 2^31, the same in each run.
pub(crate) fn random_numbers() -> impl Iterator<Item = u64> {
    let mut state = SEED;
    std::iter::repeat_with(move || {
        // Knuth's generator for 64 bits; its highest bits are the most random.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 33
    })
}

/// Makes a stream of ids that a model can learn, from position `shift` on.
pub(crate) fn tokens([rows, sequence]: [usize; 2], shift: usize) -> Tensor<2, Int> {
    let id = |row: usize, place: usize| ((row * 31 + (place + shift) * (place + shift)) % VOCABULARY) as i32;
    let ids: Vec<i32> = (0..rows).flat_map(|row| (0..sequence).map(move |place| id(row, place))).collect();
    Tensor::from_data(TensorData::new(ids, [rows, sequence]), &Device::flex())
}

/// The options of the size, which most benches share.
#[derive(Clone, Copy, clap::Args)]
pub(crate) struct Size {
    /// Ranks.
    #[arg(long, default_value_t = 2)]
    pub(crate) ranks: u32,
    /// Microbatches of a step.
    #[arg(long, default_value_t = 8)]
    pub(crate) microbatches: u32,
}
