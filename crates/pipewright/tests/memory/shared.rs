//! Storage that a rank sends and continues to use counts for that rank.

use std::convert::Infallible;

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use pipewright::nn::Linear;
use pipewright::optimizer::AdamW;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::transport::World;
use pipewright_schedule::StageIndex;

use crate::support::{linear, loss, numbers, program};

const WIDTH: usize = 64;
const ROWS: usize = 1024;
const MICROBATCHES: usize = 6;
/// Bytes of a tensor that crosses a boundary.
const MESSAGE: u64 = (ROWS * WIDTH * 4) as u64;

#[derive(Module, Debug)]
struct First {
    linear: Linear,
}

impl StageModule for First {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        self.linear.forward(input)
    }
}

/// Sends its input on. Its backward needs the input too.
#[derive(Module, Debug)]
struct Passing {
    linear: Linear,
}

impl StageModule for Passing {
    type Input = Tensor<2>;
    type Output = (Tensor<2>, Tensor<2>);

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> (Tensor<2>, Tensor<2>) {
        (self.linear.forward(input.clone()), input)
    }
}

/// Adds its inputs, whose backward needs none of them.
#[derive(Module, Debug)]
struct Last {}

impl StageModule for Last {
    type Input = (Tensor<2>, Tensor<2>);
    type Output = Tensor<2>;

    fn forward(&self, (one, other): (Tensor<2>, Tensor<2>), _context: &StageContext) -> Tensor<2> {
        one + other
    }
}

/// Returns the peak of each rank in the third step, in messages.
fn peaks() -> Vec<f64> {
    let config = PipelineConfig { optimizer: Some(AdamW::default().init()), ..PipelineConfig::default() };
    let make = |stage: StageIndex| -> Result<Stage, Infallible> {
        Ok(match stage.get() {
            0 => Stage::new(First { linear: linear(0, [WIDTH, WIDTH]) }).with_prefix("first"),
            1 => Stage::new(Passing { linear: linear(1, [WIDTH, WIDTH]) }).with_prefix("passing"),
            _ => Stage::with_loss(Last {}, loss).with_prefix("last"),
        })
    };
    let program = program("gpipe", 3, MICROBATCHES as u32);
    let mut pipeline = Pipeline::launch(program, World::local(3), &config, make).expect("it starts");
    let batch = [0, 1].map(|seed| numbers(seed, [ROWS * MICROBATCHES, WIDTH]));
    let mut peaks = Vec::new();
    for _ in 0..3 {
        let [inputs, targets] = batch.clone().map(|data| Tensor::<2>::from_data(data, &Device::flex()));
        peaks = pipeline.step(inputs, targets, 1e-4).expect("a step").peak_bytes;
    }
    peaks.iter().map(|&bytes| bytes as f64 / MESSAGE as f64).collect()
}

/// The peaks are about 9 and 8 messages. If the storage moved to the receiver's count, they would be 5 lower and 6 higher: the
/// inputs of all microbatches are among them until the first backward.
#[test]
fn a_sender_that_goes_on_using_its_storage_holds_it() {
    let peaks = peaks();
    assert!(peaks[1] > 6.5, "{peaks:?}");
    assert!(peaks[2] < 11.0, "{peaks:?}");
}
