//! A layer of your own whose weight gradients wait for `W`: a low-rank adapter (LoRA) on a frozen matrix, under a
//! zero-bubble schedule.
//!
//! The output is `x base + scale (x down) up`. In the backward pass, `I` computes the gradient of `x`, which the stage
//! before waits for. `W` computes the gradients of `down` and `up` when the rank would be idle.
//!
//! ```text
//! cargo run -p pipewright --example own_weight_gradients
//! ```

use std::error::Error;
use std::io::{Write, stdout};

use burn::module::{Module, Param};
use burn::nn::{Initializer, Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Distribution, Tensor};
use pipewright::nn::SplitBackward;
use pipewright::pipeline::{Layers, Pipeline};
use pipewright::stage::{StageContext, StageModule};

/// A frozen layer with an adapter.
#[derive(Module, Debug)]
pub(crate) struct Adapted {
    pub(crate) base: Linear,
    /// Shape `[inputs, rank]`.
    pub(crate) down: Param<Tensor<2>>,
    /// Shape `[rank, outputs]`.
    pub(crate) up: Param<Tensor<2>>,
}

impl Adapted {
    pub(crate) fn new(width: usize, rank: usize) -> Self {
        let device = Device::flex().autodiff();
        let small = Initializer::Normal { mean: 0.0, std: 0.2 };
        Self {
            base: LinearConfig::new(width, width).with_bias(false).init(&device).no_grad(),
            down: small.init([width, rank], &device),
            up: small.init([rank, width], &device),
        }
    }
}

impl StageModule for Adapted {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        let product = AdaptedProduct { base: self.base.weight.val(), scale: 2.0 };
        input.clone() + product.apply(input, (&self.down, &self.up)).tanh()
    }
}

/// The product, with its backward pass in two parts. Values without a gradient are fields.
struct AdaptedProduct {
    base: Tensor<2>,
    scale: f64,
}

/// What `I` leaves for `W`: the input, `x down`, and the gradients of `x down` and of the output.
struct Waiting {
    x: Tensor<2>,
    low: Tensor<2>,
    d_low: Tensor<2>,
    d_output: Tensor<2>,
}

impl SplitBackward<2, 2> for AdaptedProduct {
    type Weights = (Tensor<2>, Tensor<2>);
    type Saved = (Tensor<2>, Tensor<2>);
    type Waiting = Waiting;

    fn forward(&self, x: Tensor<2>, (down, up): Self::Weights) -> (Tensor<2>, Self::Saved) {
        let low = x.clone().matmul(down);
        let output = x.clone().matmul(self.base.clone()) + low.clone().matmul(up) * self.scale;
        (output, (x, low))
    }

    fn backward_input(
        &self,
        (x, low): &Self::Saved,
        (down, up): Self::Weights,
        gradient: Tensor<2>,
        wanted: bool,
    ) -> (Option<Tensor<2>>, Waiting) {
        let d_low = gradient.clone().matmul(up.transpose()) * self.scale;
        let d_x = wanted.then(|| {
            gradient.clone().matmul(self.base.clone().transpose()) + d_low.clone().matmul(down.transpose())
        });
        (d_x, Waiting { x: x.clone(), low: low.clone(), d_low, d_output: gradient })
    }

    fn backward_weights(&self, Waiting { x, low, d_low, d_output }: Waiting) -> Self::Weights {
        (x.transpose().matmul(d_low), low.transpose().matmul(d_output) * self.scale)
    }
}

pub(crate) fn run(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let mut pipeline = Pipeline::builder(Layers::new(4, |_layer| Adapted::new(16, 2)))
        .ranks(2)
        .schedule("zbvzerobubble")
        .microbatches(4)
        .loss(|output: Tensor<2>, target: Tensor<2>| (output - target).square().mean())
        .optimizer(AdamWConfig::new().init())
        .launch()?;

    let inputs = Tensor::<2>::random([32, 16], Distribution::Default, &Device::flex());
    for _ in 0..20 {
        let summary = pipeline.step(inputs.clone(), inputs.clone().flip([1]), 1e-2)?;
        writeln!(out, "step {}  loss {:.4}", summary.step, summary.loss())?;
        if summary.step.get() == 1 {
            writeln!(out, "{} parameters whose gradients cannot wait", summary.undeferred.len())?;
        }
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    run(&mut stdout())
}
