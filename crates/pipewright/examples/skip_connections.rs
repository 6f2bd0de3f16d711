//! A model with skip connections, as a graph of named layers.
//!
//! `up` takes the output of `down`, two stages before it. The cut of the graph decides how the tensor is sent. The
//! losses have the same bits for every cut.
//!
//! ```text
//! cargo run -p pipewright --example skip_connections
//! ```

use std::error::Error;
use std::io::{Write, stdout};

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Tensor};
use pipewright::graph::{Graph, GraphError, GraphLayer};
use pipewright::pipeline::{Layers, Pipeline};
use pipewright::stage::StageContext;
use pipewright::tensor::{BoundaryError, Values, pack, unpack};

/// A layer of the model: a linear map of the sum of its inputs.
#[derive(Module, Debug)]
struct Sum {
    linear: Linear,
}

impl GraphLayer for Sum {
    fn forward(&self, inputs: Values, _context: &StageContext) -> Result<Values, BoundaryError> {
        let inputs = inputs.into_iter().map(|value| unpack::<Tensor<2>>(vec![value]));
        let inputs = inputs.collect::<Result<Vec<_>, _>>()?;
        let sum = inputs.into_iter().reduce(|sum, input| sum + input);
        let sum = sum.ok_or(BoundaryError::Missing { index: 0 })?;
        Ok(pack(self.linear.forward(sum).tanh()))
    }
}

/// Returns nodes with the numbers of features of their inputs and outputs, and the names of their inputs.
fn graph() -> Result<Graph<[usize; 2]>, GraphError> {
    Graph::builder()
        .input("image")
        .node("down", [16, 8], ["image"])
        .node("deep", [8, 8], ["down"])
        .node("middle", [8, 8], ["deep"])
        .node("up", [8, 8], ["middle", "down"])
        .node("out", [8, 16], ["up", "deep"])
        .output("out")
        .build()
}

pub(crate) fn run(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    for (ranks, schedule) in [(1, "1f1b"), (3, "1f1b"), (2, "zbvzerobubble")] {
        let make = |_name: &str, &[from, to]: &[usize; 2]| Sum {
            linear: LinearConfig::new(from, to).init(&Device::flex().autodiff()),
        };
        let mut pipeline = Pipeline::builder(Layers::graph(graph()?, make))
            .ranks(ranks)
            .schedule(schedule)
            .microbatches(4)
            .loss(|output: Tensor<2>, target: Tensor<2>| (output - target).square().mean())
            .optimizer(AdamWConfig::new().init())
            .launch()?;
        let places = Tensor::arange(0..256, &Device::flex()).float().reshape([16, 16]);
        let image = (places * 0.3).sin();
        let mut losses = Vec::new();
        for _ in 0..10 {
            losses.push(pipeline.step(image.clone(), image.clone(), 1e-2)?.loss());
        }
        let stages = pipeline.program().placement().stages();
        let (first, last) = (losses[0], losses[9]);
        writeln!(out, "{schedule}, ranks {ranks}, stages {stages}: loss {first:.6}, then {last:.6}")?;
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    run(&mut stdout())
}
