//! Measures how much of the exchange of experts is hidden under a schedule with overlaps: two processes over
//! MPI hold the experts of a Qwen3-MoE together, with overlaps whose halves run by turns and with overlaps
//! taken apart.
//!
//! Both alternate. The processes run this program under `mpirun`; the first prints its figures as JSON.
//!
//! A trained router gives all experts about as many tokens. The routers of a new model do not: the tokens of a
//! row become alike from layer to layer, and most of them choose the same experts. Then a replica mostly waits
//! for the computation of another one that has more rows. So the tokens of this model have large embeddings,
//! which stay different, unless `--uneven` says otherwise.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use burn::tensor::{Device, Int, Tensor, TensorData};
use pipewright::nn::TensorParallel;
use pipewright::optimizer::AdamW;
use pipewright::pipeline::{ExchangeTime, Pipeline, PipelineConfig, StepSummary};
use pipewright::transport::World;
use pipewright_models::{
    CutModel, InitialParameters, ModelError, ModelFamily, ParameterKind, ParameterSource, ParameterSpec,
    Place, hf,
};
use pipewright_schedule::lower::{TrainingLowering, for_training};
use pipewright_schedule::{GenerateError, Method, Schedule, ScheduleSpec, StageIndex, generate, partition};
use serde::{Deserialize, Serialize};

use crate::family_models::{Family, qwen3_moe};
use crate::harness::{Figures, Outcome, Spread, as_process, in_processes};
use crate::model::{SEED, SEQUENCE, VOCABULARY};

/// Size of the measurement.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Turns that count.
    #[arg(long, default_value_t = 5)]
    turns: usize,
    /// Steps of each turn; the first two do not count.
    #[arg(long, default_value_t = 6)]
    steps: usize,
    /// Microbatches of each process, of one row.
    #[arg(long, default_value_t = 8)]
    microbatches: u32,
    /// The schedule of the overlaps.
    #[arg(long, value_enum, default_value_t = Overlapped::Dualpipev)]
    schedule: Overlapped,
    /// Keep the routers of a new model, which give some experts most of the tokens.
    #[arg(long)]
    uneven: bool,
    /// The folder of the model's weights.
    #[arg(long, hide = true)]
    weights: Option<PathBuf>,
    /// Take overlaps apart.
    #[arg(long, hide = true)]
    apart: bool,
    /// Run as one of the processes.
    #[arg(long, hide = true)]
    child: bool,
}

const REPLICAS: u32 = 2;

/// A schedule with overlaps.
#[derive(Clone, Copy, clap::ValueEnum)]
enum Overlapped {
    Dualpipev,
    /// Interleaved 1F1B with four stages on the rank and the setting `overlap`.
    Interleaved,
    /// ZBV with the setting `overlap`.
    Zbv,
}

impl Overlapped {
    fn argument(self) -> &'static str {
        match self {
            Self::Dualpipev => "dualpipev",
            Self::Interleaved => "interleaved",
            Self::Zbv => "zbv",
        }
    }

    /// Returns the schedule of one rank.
    fn generate(self, microbatches: u32) -> Result<Schedule, GenerateError> {
        let spec = ScheduleSpec { ranks: 1, microbatches, ..ScheduleSpec::default() };
        match self {
            Self::Dualpipev => generate("dualpipev", &spec),
            Self::Interleaved => {
                generate("interleaved1f1b", &ScheduleSpec { stages_per_rank: Some(4), overlap: true, ..spec })
            }
            Self::Zbv => generate("zbvzerobubble", &ScheduleSpec { overlap: true, ..spec }),
        }
    }
}

/// Milliseconds of a step, as medians over the steps; of exchanges, means over the processes.
#[derive(Serialize, Deserialize)]
struct Times {
    step: f64,
    /// The fields of [`ExchangeTime`].
    exchange: f64,
    exposed: f64,
    waited: f64,
}

impl Times {
    fn of(steps: &[StepSummary]) -> Self {
        let median =
            |time: &dyn Fn(&StepSummary) -> f64| Spread::new(steps.iter().map(time).collect()).median();
        let exchange = |time: fn(&ExchangeTime) -> Duration| {
            median(&|step| {
                let times = step.expert_exchange.iter().map(|exchange| time(exchange).as_secs_f64());
                1e3 * times.sum::<f64>() / step.expert_exchange.len().max(1) as f64
            })
        };
        Self {
            step: median(&|step| 1e3 * step.wall.as_secs_f64()),
            exchange: exchange(|time| time.total),
            exposed: exchange(|time| time.exposed),
            waited: exchange(|time| time.waited),
        }
    }

    /// Returns the part of the exchanges in which a process computes nothing.
    fn share(&self) -> f64 {
        self.exposed / self.exchange
    }
}

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { step, exchange, exposed, waited } = self;
        write!(f, "exchange {exchange:.1} ms a step, exposed {exposed:.1} ms: {:.3}; ", self.share())?;
        write!(f, "wait for the other replica {waited:.1} ms; step {step:.1} ms")
    }
}

pub(crate) fn run(options: &Options) -> Outcome {
    if options.child {
        return as_process(|world| measure(world, options));
    }
    let folder = tempfile::tempdir()?;
    if !options.uneven {
        write_even(folder.path())?;
    }
    let weights = (!options.uneven).then_some(folder.path());
    let mut figures = Figures::default();
    for turn in 1..=options.turns {
        let by_turns = run_processes(options, weights, false)?;
        let alone = run_processes(options, weights, true)?;
        println!("turn {turn}, by turns: {by_turns}");
        println!("turn {turn}, apart:    {alone}");
        figures.add("exposed over exchange, by turns", by_turns.share());
        figures.add("exposed over exchange, apart", alone.share());
        figures.add("exposed by turns over exchange apart", by_turns.exposed / alone.exchange);
        figures.add("step by turns over step apart", by_turns.step / alone.step);
    }
    print!("{figures}");
    Ok(())
}

/// Initial parameters with embeddings of a standard deviation of about 1, as models have them that scale
/// embeddings by the root of their width.
struct LargeEmbeddings<'a>(Box<dyn ParameterSource + 'a>);

impl ParameterSource for LargeEmbeddings<'_> {
    fn parameter(&mut self, spec: &ParameterSpec) -> Result<Vec<f32>, ModelError> {
        let factor = if spec.kind == ParameterKind::Table { 50.0 } else { 1.0 };
        Ok(self.0.parameter(spec)?.into_iter().map(|number| factor * number).collect())
    }
}

/// Writes a model whose routers give all experts about as many tokens.
fn write_even(folder: &Path) -> Outcome {
    let config = qwen3_moe();
    let mut source = LargeEmbeddings(config.initial(SEED));
    let stage = config.build_stage(0..config.layers(), &mut source, &Device::flex().into())?;
    Ok(hf::save(folder, &config, &[&stage])?)
}

fn run_processes(options: &Options, weights: Option<&Path>, apart: bool) -> Outcome<Times> {
    let (steps, microbatches) = (options.steps.to_string(), options.microbatches.to_string());
    let mut arguments = vec!["exchange", "--child", "--steps", &steps, "--microbatches", &microbatches];
    arguments.extend(["--schedule", options.schedule.argument()]);
    arguments.extend(apart.then_some("--apart"));
    if let Some(weights) = weights {
        arguments.extend(["--weights", weights.to_str().ok_or("the folder's name is not UTF-8")?]);
    }
    in_processes(&arguments)
}

fn measure(world: World, options: &Options) -> Outcome<Times> {
    let lowering =
        TrainingLowering { replicas: REPLICAS, keep_overlaps: !options.apart, ..TrainingLowering::default() };
    let program = for_training(&options.schedule.generate(options.microbatches)?, &lowering)?;
    let model = CutModel::from(Family::Qwen3Moe.config());
    let weights = model.describe(SEQUENCE).weights();
    let stages = partition(&weights, program.placement().stages(), &Method::Optimal)?;
    let initial = match &options.weights {
        Some(folder) => InitialParameters::Directory { path: folder.clone(), seed: 0 },
        None => InitialParameters::Seed(SEED),
    };
    let make = move |stage: StageIndex, tensor: &TensorParallel| {
        let place = Place { tensor: tensor.clone(), ..Device::flex().autodiff().into() };
        model.training_stage(stages.range(stage), &initial, place)
    };
    let config = PipelineConfig {
        optimizer: Some(AdamW { betas: (0.9, 0.95), epsilon: 1e-8, weight_decay: 0.1 }.init()),
        data_parallel: REPLICAS,
        expert_parallel: REPLICAS,
        ..PipelineConfig::default()
    };
    let mut pipeline = Pipeline::launch_split(program, world, &config, make)?;
    let shape = [(options.microbatches * REPLICAS) as usize, SEQUENCE];
    let ids = |shift: usize| {
        let count: usize = shape.iter().product();
        let ids = (shift..count + shift).map(|index| (index * 31 % VOCABULARY) as i32).collect();
        Tensor::<2, Int>::from_data(TensorData::new::<i32, _>(ids, shape), &Device::flex())
    };
    let mut steps = Vec::with_capacity(options.steps);
    for _ in 0..options.steps {
        steps.push(pipeline.step(ids(0), ids(1), 3e-4)?);
    }
    Ok(Times::of(&steps[2.min(steps.len().saturating_sub(1))..]))
}
