//! A Burn module of your own, as the layers of a pipeline of two ranks.
//!
//! ```text
//! cargo run -p pipewright --example own_module
//! ```

use std::error::Error;
use std::io::{Write, stdout};

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Distribution, Tensor, activation};
use pipewright::pipeline::{Layers, Pipeline};
use pipewright::stage::{StageContext, StageModule};

/// A layer of the model.
#[derive(Module, Debug)]
struct Block {
    linear: Linear,
}

impl StageModule for Block {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        input.clone() + activation::gelu(self.linear.forward(input))
    }
}

pub(crate) fn run(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    // Called on the rank of the layer, with the layer's place in the model.
    let block = |_layer| Block { linear: LinearConfig::new(16, 16).init(&Device::flex().autodiff()) };
    let mut pipeline = Pipeline::builder(Layers::new(8, block))
        .ranks(2)
        .schedule("1f1b")
        .microbatches(4)
        .loss(|output: Tensor<2>, target: Tensor<2>| (output - target).square().mean())
        .optimizer(AdamWConfig::new().init())
        .launch()?;

    let inputs = Tensor::<2>::random([32, 16], Distribution::Default, &Device::flex());
    for _ in 0..20 {
        let summary = pipeline.step(inputs.clone(), inputs.clone().flip([1]), 1e-2)?;
        writeln!(out, "step {}  loss {:.4}", summary.step, summary.loss())?;
    }
    for parameter in pipeline.parameters()?.iter().step_by(2) {
        writeln!(out, "stage {} has {}", parameter.stage, parameter.path)?;
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    run(&mut stdout())
}
