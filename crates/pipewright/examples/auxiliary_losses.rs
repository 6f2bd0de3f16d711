//! Losses in the middle of the model, and an evaluation between steps.
//!
//! Every layer, in any stage, adds a loss that favours small activations. The evaluation runs the forward part of the
//! same program on other data, with and without targets.
//!
//! ```text
//! cargo run -p pipewright --example auxiliary_losses
//! ```

use std::error::Error;
use std::io::{Write, stdout};

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Distribution, Tensor};
use pipewright::batch::{Merge, merge_by};
use pipewright::pipeline::{Layers, Pipeline};
use pipewright::stage::{StageContext, StageModule};
use pipewright::tensor::unpack;

/// A layer of the model.
#[derive(Module, Debug)]
struct Block {
    linear: Linear,
}

impl StageModule for Block {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, context: &StageContext) -> Tensor<2> {
        let output = self.linear.forward(input).tanh();
        // The step's loss includes a hundredth of it; the summary has the whole value.
        context.auxiliary_loss("activations", 0.01, output.clone().square().mean());
        output
    }
}

pub(crate) fn run(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let block = |_layer| Block { linear: LinearConfig::new(8, 8).init(&Device::flex().autodiff()) };
    let mut pipeline = Pipeline::builder(Layers::new(4, block))
        .ranks(2)
        .schedule("zbvzerobubble")
        .microbatches(4)
        .loss(|output: Tensor<2>, target: Tensor<2>| (output - target).square().mean())
        .optimizer(AdamWConfig::new().init())
        .launch()?;

    let rows = || Tensor::<2>::random([32, 8], Distribution::Uniform(-1.0, 1.0), &Device::flex());
    let (training, unseen) = (rows(), rows());
    for round in 0..3 {
        for _ in 0..10 {
            pipeline.step(training.clone(), training.clone() * 0.5, 1e-2)?;
        }
        let summary = pipeline.eval(unseen.clone(), Some(unseen.clone() * 0.5))?;
        let loss = summary.losses.iter().sum::<f64>() / summary.losses.len() as f64;
        let activations = summary.auxiliary["activations"];
        let steps = 10 * (round + 1);
        writeln!(out, "after {steps} steps: loss {loss:.4} on unseen rows, activations {activations:.4}")?;
    }

    // Without targets there is no loss, and the outputs are returned per microbatch.
    let outputs = pipeline.eval(unseen.clone(), None::<Tensor<2>>)?.outputs;
    let microbatches = outputs.len();
    let whole: Tensor<2> = unpack(merge_by(outputs, Merge::Along(0))?.concat())?;
    writeln!(out, "{microbatches} microbatches of outputs make {:?}", whole.dims())?;
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    run(&mut stdout())
}
