//! The program of `docs/from-pytorch.md`: two stages that train with 1F1B, next to the same script for PyTorch.
//!
//! ```text
//! cargo run -p pipewright --example two_stages
//! ```

use std::error::Error;
use std::io::{Write, stdout};

use burn::nn::LinearConfig;
use pipewright::nn::Linear;
use pipewright::prelude::*;

#[derive(Module, Debug)]
struct Block {
    linear: Linear,
}

impl Block {
    fn new() -> Self {
        Self { linear: LinearConfig::new(16, 16).init(&Device::flex().autodiff()).into() }
    }
}

impl StageModule for Block {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, x: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        x.clone() + self.linear.forward(x).tanh()
    }
}

pub(crate) fn run(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let mut pipeline = Pipeline::builder(Layers::new(8, |_layer| Block::new()))
        .ranks(2)
        .schedule("1f1b")
        .microbatches(4)
        .loss(|output: Tensor<2>, target: Tensor<2>| (output - target).square().mean())
        .optimizer(AdamWConfig::new().with_weight_decay(0.01).init())
        .launch()?;

    let x = Tensor::<1, Int>::arange(0..512, &Device::flex()).float().reshape([32, 16]).sin();
    let y = x.clone().flip([1]);
    for step in 1..=10 {
        let summary = pipeline.step(x.clone(), y.clone(), 1e-2)?;
        writeln!(out, "step {step}  loss {:.4}", summary.loss())?;
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    run(&mut stdout())
}
