//! Measures how much of the exchange of experts is hidden under a schedule with overlaps: two processes over
//! MPI hold the experts of a Qwen3-MoE together, with overlaps whose halves run by turns and with overlaps
//! taken apart.
//!
//! Both alternate. The processes run this program under `mpirun`; the first prints its figures as JSON.

use std::error::Error;
use std::time::Duration;

use burn::tensor::{Device, Int, Tensor, TensorData};
use pipewright::nn::TensorParallel;
use pipewright::optimizer::AdamW;
use pipewright::pipeline::{Pipeline, PipelineConfig, StepSummary};
use pipewright::transport::World;
use pipewright_models::{CutModel, InitialParameters, Place};
use pipewright_schedule::lower::{TrainingLowering, for_training};
use pipewright_schedule::{GenerateError, Method, Schedule, ScheduleSpec, StageIndex, generate, partition};

use crate::family_models::Family;
use crate::model::{SEED, SEQUENCE, VOCABULARY};
use crate::processes::mpirun;
use crate::statistics::Spread;

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
struct Figures {
    step: f64,
    exchange: f64,
    exposed: f64,
}

impl Figures {
    fn share(&self) -> f64 {
        self.exposed / self.exchange
    }
}

pub(crate) fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    if options.child {
        return run_child(options);
    }
    let (mut hidden, mut apart, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for turn in 1..=options.turns {
        let by_turns = run_processes(options, false)?;
        let alone = run_processes(options, true)?;
        println!(
            "turn {turn}: exchange {:.1} ms a step, exposed {:.1} ms: {:.3}; apart {:.1} ms, exposed {:.1} ms: {:.3}",
            by_turns.exchange,
            by_turns.exposed,
            by_turns.share(),
            alone.exchange,
            alone.exposed,
            alone.share()
        );
        hidden.push(by_turns.share());
        apart.push(alone.share());
        ratios.push(by_turns.step / alone.step);
    }
    println!("exposed over exchange, by turns: {}", Spread::new(hidden));
    println!("exposed over exchange, apart:    {}", Spread::new(apart));
    println!("step by turns over step apart:   {}", Spread::new(ratios));
    Ok(())
}

fn run_processes(options: &Options, apart: bool) -> Result<Figures, Box<dyn Error>> {
    let (steps, microbatches) = (options.steps.to_string(), options.microbatches.to_string());
    let mut arguments = vec!["exchange", "--child", "--steps", &steps, "--microbatches", &microbatches];
    arguments.extend(["--schedule", options.schedule.argument()]);
    arguments.extend(apart.then_some("--apart"));
    let figures: serde_json::Value = serde_json::from_str(&mpirun(&arguments)?)?;
    let figure = |name: &str| figures[name].as_f64().ok_or_else(|| format!("no `{name}` in {figures}"));
    Ok(Figures { step: figure("step")?, exchange: figure("exchange")?, exposed: figure("exposed")? })
}

fn run_child(options: &Options) -> Result<(), Box<dyn Error>> {
    let world = World::mpi(Duration::from_secs(60))?;
    let speaks = world.own_ranks().any(|rank| rank.get() == 0);
    let Figures { step, exchange, exposed } = measure(world, options)?;
    if speaks {
        println!("{}", serde_json::json!({ "step": step, "exchange": exchange, "exposed": exposed }));
    }
    Ok(())
}

fn measure(world: World, options: &Options) -> Result<Figures, Box<dyn Error>> {
    let lowering =
        TrainingLowering { replicas: REPLICAS, keep_overlaps: !options.apart, ..TrainingLowering::default() };
    let program = for_training(&options.schedule.generate(options.microbatches)?, &lowering)?;
    let model = CutModel::from(Family::Qwen3Moe.config());
    let weights = model.describe(SEQUENCE).weights();
    let stages = partition(&weights, program.placement().stages(), &Method::Optimal)?;
    let initial = InitialParameters::Seed(SEED);
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
    let counted = &steps[2.min(steps.len().saturating_sub(1))..];
    let median =
        |time: &dyn Fn(&StepSummary) -> f64| Spread::new(counted.iter().map(time).collect()).median();
    let mean = |times: Vec<Duration>| {
        1e3 * times.iter().map(Duration::as_secs_f64).sum::<f64>() / times.len().max(1) as f64
    };
    Ok(Figures {
        step: median(&|step| 1e3 * step.wall.as_secs_f64()),
        exchange: median(&|step| mean(step.expert_exchange.iter().map(|exchange| exchange.total).collect())),
        exposed: median(&|step| mean(step.expert_exchange.iter().map(|exchange| exchange.exposed).collect())),
    })
}
