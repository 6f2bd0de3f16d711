//! A model of one linear layer per stage, for tests in which only the messages matter.

use burn::module::Module;
use burn::nn::{Initializer, Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Tensor};
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::transport::World;
use pipewright_schedule::{StageIndex, ValidatedProgram};

/// The features of each layer.
pub(crate) const FEATURES: usize = 8;

#[derive(Module, Debug)]
struct Layer {
    linear: Linear,
    #[module(skip)]
    stage: StageIndex,
}

impl StageModule for Layer {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        self.linear.forward(input)
    }

    fn parameter_path(&self, local: &str) -> String {
        format!("layers.{}.{local}", self.stage)
    }
}

pub(crate) fn launch(program: ValidatedProgram, world: World, config: PipelineConfig) -> Pipeline {
    let last = program.placement().last_stage();
    let make = move |stage: StageIndex| -> Result<Stage, std::convert::Infallible> {
        // The same values in every process.
        let config =
            LinearConfig::new(FEATURES, FEATURES).with_initializer(Initializer::Constant { value: 0.1 });
        let linear = config.init(&Device::flex().autodiff());
        let layer = Layer { linear, stage };
        let loss = |output: Tensor<2>, target: Tensor<2>| (output - target).square().mean();
        Ok(if stage == last { Stage::with_loss(layer, loss) } else { Stage::new(layer) })
    };
    let config = PipelineConfig { optimizer: Some(AdamWConfig::new().init()), ..config };
    Pipeline::launch(program, world, &config, make).expect("the pipeline starts")
}

pub(crate) fn rows(rows: usize) -> Tensor<2> {
    Tensor::ones([rows, FEATURES], &Device::flex())
}
