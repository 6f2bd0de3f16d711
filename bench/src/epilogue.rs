//! Measures the time of a step after its program, on ranks that compute nothing, so that only their messages
//! take time.

use burn::module::{Module, Param};
use burn::optim::SgdConfig;
use burn::tensor::{Device, Tensor};
use pipewright::batch::Batch;
use pipewright::pipeline::{Pipeline, PipelineConfig, StepSummary};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::tensor::{Values, pack};
use pipewright::transport::World;
use pipewright_schedule::{Rank, StageIndex};

use crate::harness::{Outcome, Spread};
use crate::model::Setup;

/// Size of the measurement.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Ranks, each with one stage.
    #[arg(long, value_delimiter = ',', default_values_t = [2, 8, 32, 128])]
    ranks: Vec<u32>,
    /// Parameters of a stage, which count for the gradient norm and get no gradient.
    #[arg(long, default_value_t = 8)]
    parameters: usize,
    /// Steps that count.
    #[arg(long, default_value_t = 50)]
    steps: usize,
}

/// A stage that does nothing.
#[derive(Module, Debug)]
struct Nothing {
    parameters: Vec<Param<Tensor<1>>>,
    #[module(skip)]
    stage: StageIndex,
}

impl StageModule for Nothing {
    type Input = Tensor<1>;
    type Output = Tensor<1>;

    fn forward(&self, input: Tensor<1>, _context: &StageContext) -> Tensor<1> {
        input
    }

    fn parameter_path(&self, local: &str) -> String {
        format!("stages.{}.{local}", self.stage)
    }
}

pub(crate) fn run(options: &Options) -> Outcome {
    for &ranks in &options.ranks {
        measure(ranks, options)?;
    }
    Ok(())
}

/// A pipeline whose stages do nothing.
pub(crate) struct Idle {
    pub(crate) pipeline: Pipeline,
    microbatches: usize,
}

impl Idle {
    /// Starts a pipeline with one stage per rank, each with so many parameters.
    pub(crate) fn launch(setup: Setup<'_>, parameters: usize) -> Outcome<Self> {
        let Setup { ranks, microbatches, .. } = setup;
        let make = move |stage: StageIndex| -> Result<Stage, std::convert::Infallible> {
            let device = Device::flex().autodiff();
            let parameters = (0..parameters).map(|_| Param::from_tensor(Tensor::ones([1], &device)));
            let module = Nothing { parameters: parameters.collect(), stage };
            Ok(if stage.get() + 1 == ranks {
                Stage::with_loss(module, |output: Tensor<1>, _target: ()| output)
            } else {
                Stage::new(module)
            })
        };
        let config = PipelineConfig { optimizer: Some(SgdConfig::new().init()), ..PipelineConfig::default() };
        let pipeline = Pipeline::launch(setup.program()?, World::local(ranks), &config, make)?;
        Ok(Self { pipeline, microbatches: microbatches as usize })
    }

    pub(crate) fn step(&mut self) -> Outcome<StepSummary> {
        let inputs = vec![pack(Tensor::<1>::ones([1], &Device::flex())); self.microbatches];
        Ok(self.pipeline.step_batch(Batch::new(inputs, vec![Values::new(); self.microbatches]), 0.1)?)
    }
}

/// Returns the schedule of one microbatch through all ranks and back, as CSV.
fn one_microbatch(ranks: u32) -> String {
    let row = |rank: u32| {
        let cell = |time: u32| match time {
            time if time == rank => format!("{rank}F0"),
            time if time == 2 * ranks - 1 - rank => format!("{rank}B0"),
            _ => String::new(),
        };
        (0..2 * ranks).map(cell).collect::<Vec<_>>().join(",")
    };
    (0..ranks).map(|rank| row(rank) + "\n").collect()
}

fn measure(ranks: u32, options: &Options) -> Outcome {
    let mut pipeline = Idle::launch(Setup::new(&one_microbatch(ranks), ranks, 1), options.parameters)?;
    let mut outside = || -> Outcome<f64> {
        let step = pipeline.step()?;
        // The end of the program on the last rank. The rest of the step is the time that is measured.
        let all = (0..ranks).flat_map(|rank| step.timeline.events_of(Rank::new(rank)));
        let end = all.map(|event| event.end).fold(0.0, f64::max);
        Ok((step.wall.as_secs_f64() - end) * 1e6)
    };
    let first = outside()?;
    outside()?;
    let times = (0..options.steps).map(|_| outside()).collect::<Result<Vec<f64>, _>>()?;
    let times = Spread::new(times);
    let growth = f64::from(ranks) * f64::from(ranks).log2();
    println!(
        "{ranks} ranks: {times} microseconds after the program, {:.3} for each of p log2 p = {growth:.0}; \
         first step {first:.0}",
        times.median() / growth
    );
    Ok(())
}
