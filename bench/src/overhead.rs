//! Measures the overhead of the runtime per action, with stages that return their input.

use std::error::Error;
use std::time::Duration;

use burn::module::Module;
use burn::optim::SgdConfig;
use burn::tensor::{Device, Tensor};
use pipewright::batch::Batch;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::tensor::Values;
use pipewright::tensor::pack;
use pipewright::transport::World;
use pipewright_schedule::{Rank, StageIndex};

use crate::model::Setup;
use crate::statistics::Spread;

/// Size of the measurement.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Ranks.
    #[arg(long, default_value_t = 2)]
    ranks: u32,
    /// Microbatches of a step.
    #[arg(long, default_value_t = 512)]
    microbatches: u32,
    /// Steps that count.
    #[arg(long, default_value_t = 20)]
    steps: usize,
}

/// A stage that returns its input.
#[derive(Module, Debug)]
struct Nothing {}

impl StageModule for Nothing {
    type Input = Tensor<1>;
    type Output = Tensor<1>;

    fn forward(&self, input: Tensor<1>, _context: &StageContext) -> Tensor<1> {
        input
    }
}

pub(crate) fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    for schedule in ["1f1b", "gpipe"] {
        measure(schedule, options)?;
    }
    Ok(())
}

fn measure(schedule: &str, &Options { ranks, microbatches, steps }: &Options) -> Result<(), Box<dyn Error>> {
    let make = move |stage: StageIndex| -> Result<Stage, std::convert::Infallible> {
        Ok(if stage.get() + 1 == ranks {
            Stage::with_loss(Nothing {}, |output: Tensor<1>, _target: ()| output)
        } else {
            Stage::new(Nothing {})
        })
    };
    let config = PipelineConfig { optimizer: Some(SgdConfig::new().init()), ..PipelineConfig::default() };
    // The program has the actions of the schedule. With split backwards, each half would count as an action.
    let setup = Setup { send_early: false, ..Setup::new(schedule, ranks, microbatches) };
    let program = setup.program()?;
    let longest = (0..ranks).map(|rank| program.row(Rank::new(rank)).len()).max().unwrap_or(0);
    let mut pipeline = Pipeline::launch(program, World::local(ranks), &config, make)?;
    let inputs: Vec<Values> =
        (0..microbatches).map(|_| pack(Tensor::<1>::ones([1], &Device::flex()))).collect();
    let targets = vec![Values::new(); microbatches as usize];
    let mut step = || pipeline.step_batch(Batch::new(inputs.clone(), targets.clone()), 0.1);
    for _ in 0..3 {
        step()?;
    }
    let mut times = Vec::new();
    for _ in 0..steps {
        let wall: Duration = step()?.wall;
        times.push(wall.as_secs_f64() * 1e6 / longest as f64);
    }
    println!(
        "{schedule}, {ranks} ranks, {longest} actions per rank: {} microseconds per action",
        Spread::new(times)
    );
    Ok(())
}
