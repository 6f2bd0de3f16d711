//! Two processes, each with a part of the batch: the results are the results of one process with the whole
//! batch.

use std::time::Duration;

use burn::module::{Module, Param};
use burn::optim::SgdConfig;
use burn::tensor::{Device, Tensor};
use pipewright::batch::{Batch, SplitRule};
use pipewright::nn::Linear;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::tensor::Metadata;
use pipewright::transport::World;
use pipewright_schedule::StageIndex;

use super::mpirun;

#[derive(Module, Debug)]
struct Layer {
    linear: Linear,
}

impl StageModule for Layer {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        self.linear.forward(input)
    }
}

fn launch(world: World) -> Pipeline {
    let make = |stage: StageIndex| -> Result<Stage, std::convert::Infallible> {
        let device = Device::flex().autodiff();
        let weight = Tensor::from_data([[0.5, -0.25], [1.0, 0.75]], &device) + f64::from(stage.get());
        let linear = Linear { weight: Param::from_tensor(weight), bias: None };
        let loss = |output: Tensor<2>, target: Tensor<2>| (output - target).square().mean();
        let made = Layer { linear };
        let made = if stage.get() == 1 { Stage::with_loss(made, loss) } else { Stage::new(made) };
        Ok(made.with_prefix(&format!("stages.{stage}")))
    };
    let metadata = Metadata::Dynamic { free: vec![0] };
    let config =
        PipelineConfig { optimizer: Some(SgdConfig::new().init()), metadata, ..PipelineConfig::default() };
    Pipeline::launch(super::two_ranks(), world, &config, make).expect("it starts")
}

fn rows(count: i64, shift: f64) -> Tensor<2> {
    let numbers = Tensor::<1, burn::tensor::Int>::arange(0..2 * count, &Device::flex()).float();
    (numbers / 7.0 + shift).reshape([count as usize, 2])
}

/// Trains on the parts of one batch, and refuses the parts of different ones.
pub(super) fn train_on_parts() {
    let world = World::mpi(Duration::from_secs(20)).expect("mpirun started this process");
    let is_first = world.own_ranks().next().is_some_and(|rank| rank.get() == 0);
    let mut pipeline = launch(world);
    let part = |count| {
        if is_first {
            Batch::split(rows(count, 0.0), (), SplitRule::balanced(2))
        } else {
            Batch::split((), rows(if count == 5 { 4 } else { count }, 0.5), SplitRule::balanced(2))
        }
    };
    let error =
        pipeline.step_batch(part(5).expect("it splits"), 0.1).map(drop).expect_err("five rows and four");
    let expected = "rank 0 has 5 rows of inputs, by microbatch [3, 2], and rank 1 has 4 rows of targets, by \
                    microbatch [2, 2]";
    assert!(error.to_string().contains(expected), "{error}");
    let batch = part(7).expect("it splits").keep_input_gradients();
    let found = pipeline.step_batch(batch, 0.1).expect("a step");
    let whole = Batch::split(rows(7, 0.0), rows(7, 0.5), SplitRule::balanced(2))
        .expect("it splits")
        .keep_input_gradients();
    let expected = launch(World::local(2)).step_batch(whole, 0.1).expect("a step");
    assert_eq!(
        (&found.losses, found.loss(), found.gradient_norm),
        (&expected.losses, expected.loss(), expected.gradient_norm)
    );
    if is_first {
        let gradient = |summary: &pipewright::pipeline::StepSummary| {
            summary.input_gradient::<2>(0).expect("the process has the first stage").into_data()
        };
        assert_eq!(gradient(&found), gradient(&expected));
        mpirun::report("two processes with parts of a batch");
    } else {
        assert!(found.input_gradients.is_empty(), "another process has the first stage");
    }
}
