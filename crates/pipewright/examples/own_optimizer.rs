//! An optimizer of your own, and a learning rate that changes from step to step.
//!
//! The optimizer moves every parameter by the sign of its averaged gradient. Each stage has the optimizer's state for
//! its own parameters; checkpoints store it.
//!
//! ```text
//! cargo run -p pipewright --example own_optimizer
//! ```

use std::error::Error;
use std::io::{Write, stdout};

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{LearningRate as Rate, LionState, ModuleOptimizer, Optimizer};
use burn::tensor::{Device, Distribution, Tensor};
use pipewright::pipeline::{Layers, Pipeline};
use pipewright::stage::{StageContext, StageModule};
use pipewright::train::{Decay, LearningRate};

/// Moves by the sign of the gradients' moving average.
#[derive(Clone, Debug)]
struct SignDescent {
    /// The share of the average that each step keeps.
    keep: f32,
}

impl Optimizer for SignDescent {
    // Burn's type for one average. A state of your own derives `RecordState`.
    type State<const D: usize> = LionState<D>;

    fn step<const D: usize>(
        &self,
        rate: Rate,
        parameter: Tensor<D>,
        gradient: Tensor<D>,
        state: Option<LionState<D>>,
    ) -> (Tensor<D>, Option<LionState<D>>) {
        let average = match state {
            Some(state) => state.momentum * self.keep + gradient * (1.0 - self.keep),
            None => gradient,
        };
        (parameter - average.clone().sign() * rate, Some(LionState::new(average)))
    }

    fn to_device<const D: usize>(state: LionState<D>, device: &Device) -> LionState<D> {
        LionState::new(state.momentum.to_device(device))
    }
}

/// A layer of the model.
#[derive(Module, Debug)]
struct Block {
    linear: Linear,
}

impl StageModule for Block {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        input.clone() + self.linear.forward(input).tanh()
    }
}

pub(crate) fn run(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let block = |_layer| Block { linear: LinearConfig::new(8, 8).init(&Device::flex().autodiff()) };
    let mut pipeline = Pipeline::builder(Layers::new(4, block))
        .ranks(2)
        .microbatches(4)
        .loss(|output: Tensor<2>, target: Tensor<2>| (output - target).square().mean())
        .optimizer(ModuleOptimizer::from(SignDescent { keep: 0.9 }))
        .launch()?;

    // Any function of the step works. This one rises over three steps and then falls to 0 along half a cosine.
    let steps = 30;
    let rate = LearningRate { decay: Decay::Cosine, warmup_steps: 3, steps, ..LearningRate::constant(0.01) };
    let inputs = Tensor::<2>::random([32, 8], Distribution::Default, &Device::flex());
    for step in 0..steps {
        let summary = pipeline.step(inputs.clone(), inputs.clone().flip([1]), rate.at(step))?;
        if step < 4 || step % 5 == 4 {
            let (rate, loss) = (rate.at(step), summary.loss());
            writeln!(out, "step {:2}  learning rate {rate:.5}  loss {loss:.4}", summary.step)?;
        }
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    run(&mut stdout())
}
