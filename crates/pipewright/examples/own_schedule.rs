//! A schedule of your own, written as a table: one line per rank, one cell per action.
//!
//! `0F1` is the forward of stage 0 for microbatch 1, `B` is a backward, and `I` and `W` are its halves for inputs and
//! weights. In an empty cell the rank is idle. The table has no communication: lowering adds it, and validation checks
//! the result before a rank starts. PyTorch writes and reads the same format.
//!
//! ```text
//! cargo run -p pipewright --example own_schedule
//! ```

use std::error::Error;
use std::io::{Write, stdout};

use burn::module::Module;
use burn::nn::LinearConfig;
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Tensor};
use pipewright::nn::Linear;
use pipewright::pipeline::{Layers, Pipeline};
use pipewright::stage::{StageContext, StageModule};
use pipewright_schedule::csv::{parse_schedule, print_program};

/// Rank 1 defers its weight gradients, so that rank 0 gets the gradients that it waits for early.
const SCHEDULE: &str = "\
0F0,0F1,   ,   ,0B0,   ,0B1
   ,1F0,1I0,1F1,1I1,1W0,1W1
";

/// The same table with a backward before its forward.
const UNSOUND: &str = "\
0F0,0F1,0B0,0B1
1B0,1F0,1F1,1B1
";

/// A layer of the model. `pipewright::nn::Linear` can defer its weight gradients; Burn's `Linear` computes all at once.
#[derive(Module, Debug)]
struct Block {
    linear: Linear,
}

impl StageModule for Block {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        self.linear.forward(input).tanh()
    }
}

fn launch(schedule: &str) -> Result<Pipeline, Box<dyn Error>> {
    let block = |_layer| Block { linear: LinearConfig::new(8, 8).init(&Device::flex().autodiff()).into() };
    let builder = Pipeline::builder(Layers::new(4, block))
        .schedule(parse_schedule(schedule)?)
        .loss(|output: Tensor<2>, target: Tensor<2>| (output - target).square().mean())
        .optimizer(AdamWConfig::new().init());
    Ok(builder.launch()?)
}

pub(crate) fn run(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let mut pipeline = launch(SCHEDULE)?;
    writeln!(out, "each rank runs:\n{}", print_program(pipeline.program().as_program()))?;
    let places = Tensor::arange(0..128, &Device::flex()).float().reshape([16, 8]);
    let rows = (places * 0.7).sin();
    for _ in 0..5 {
        let summary = pipeline.step(rows.clone(), rows.clone() * 0.5, 1e-2)?;
        writeln!(out, "step {}  loss {:.6}", summary.step, summary.loss())?;
    }
    if let Err(error) = launch(UNSOUND) {
        writeln!(out, "another is refused: {error}")?;
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    run(&mut stdout())
}
