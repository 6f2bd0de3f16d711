//! Dropout and other random numbers: the same for every cut of the model, and when a forward is computed a second time.
//!
//! ```text
//! cargo run -p pipewright --example dropout
//! ```

use std::error::Error;
use std::io::{Write, stdout};

use burn::nn::{Linear, LinearConfig};
use pipewright::nn::Dropout;
use pipewright::prelude::*;
use rand::RngExt;

/// A layer that drops elements of its output, and adds noise to all of them.
#[derive(Module, Debug)]
struct Block {
    linear: Linear,
    dropout: Dropout,
    /// The names of the layer's random numbers, which must not depend on the cut.
    #[module(skip)]
    name: String,
}

impl Block {
    fn new(layer: usize) -> Self {
        let linear = LinearConfig::new(8, 8).init(&Device::flex().autodiff());
        Self { linear, dropout: Dropout::new(0.2), name: format!("layers.{layer}") }
    }
}

impl StageModule for Block {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, x: Tensor<2>, context: &StageContext) -> Tensor<2> {
        let output = x.clone() + self.linear.forward(x).tanh();
        let output = self.dropout.forward(output, context.random(&format!("{}.dropout", self.name)));
        let mut stream = context.random(&format!("{}.noise", self.name));
        // In an evaluation there is no generator.
        let noise = stream.generator().map_or(0.0, |generator| generator.random_range(-0.01..0.01));
        output + noise
    }
}

/// Returns the losses of two steps, and of an evaluation after them.
fn losses(ranks: u32, recompute: Recompute) -> Result<[f64; 3], Box<dyn Error>> {
    let mut pipeline = Pipeline::builder(Layers::new(4, Block::new))
        .ranks(ranks)
        .microbatches(4)
        .recompute(recompute)
        .loss(|output: Tensor<2>, target: Tensor<2>| (output - target).square().mean())
        .optimizer(AdamWConfig::new().init())
        .launch()?;
    let x = Tensor::<1, Int>::arange(0..128, &Device::flex()).float().reshape([16, 8]).sin();
    let mut step = || Ok::<_, PipelineError>(pipeline.step(x.clone(), x.clone(), 1e-2)?.loss());
    let (first, second) = (step()?, step()?);
    Ok([first, second, pipeline.eval(x.clone(), Some(x))?.loss()])
}

pub(crate) fn run(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    for (ranks, recompute) in [(1, Recompute::None), (2, Recompute::None), (4, Recompute::Stage)] {
        let [first, second, evaluation] = losses(ranks, recompute.clone())?;
        let how = if recompute == Recompute::None { "" } else { ", forwards computed twice" };
        writeln!(out, "ranks {ranks}{how}: losses {first:.9} {second:.9}, evaluation {evaluation:.9}")?;
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    run(&mut stdout())
}
