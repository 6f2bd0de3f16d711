//! A Burn module of your own, pipelined over two ranks.
//!
//! ```text
//! cargo run -p pipewright --example own_module
//! ```

use std::error::Error;
use std::io::Write;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Distribution, Tensor, activation};
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::transport::World;
use pipewright_schedule::lower::{TrainingLowering, for_training};
use pipewright_schedule::{ScheduleSpec, StageIndex, generate};

/// Half of the model: each of the two stages is one.
#[derive(Module, Debug)]
struct Half {
    linear: Linear,
    #[module(skip)]
    place: u32,
}

impl StageModule for Half {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        input.clone() + activation::gelu(self.linear.forward(input))
    }

    // The two halves have parameters of their own, so paths of their own.
    fn parameter_path(&self, local: &str) -> String {
        format!("half.{}.{local}", self.place)
    }
}

/// Called on each rank for each of its stages; the last one ends in the loss.
fn make(stage: StageIndex) -> Result<Stage, String> {
    let linear = LinearConfig::new(16, 16).init(&Device::flex().autodiff());
    let half = Half { linear, place: stage.get() };
    Ok(match stage.get() {
        0 => Stage::new(half),
        _ => Stage::with_loss(half, |output: Tensor<2>, target: Tensor<2>| (output - target).square().mean()),
    })
}

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let spec = ScheduleSpec { ranks: 2, microbatches: 4, ..ScheduleSpec::default() };
    let program = for_training(&generate("1f1b", &spec)?, &TrainingLowering::default())?;
    let config = PipelineConfig { optimizer: Some(AdamWConfig::new().init()), ..PipelineConfig::default() };
    let mut pipeline = Pipeline::launch(program, World::local(2), &config, make)?;

    let inputs = Tensor::<2>::random([32, 16], Distribution::Default, &Device::flex());
    for _ in 0..20 {
        let report = pipeline.step(inputs.clone(), inputs.clone().flip([1]), 1e-2)?;
        writeln!(std::io::stdout(), "step {}  loss {:.4}", report.step, report.loss())?;
    }
    Ok(())
}
