//! Tensor ranks that share the tokens keep their share of what every rank would keep whole.

use std::convert::Infallible;

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor, TensorData};
use pipewright::nn::{Linear, RmsNorm, TensorParallel};
use pipewright::optimizer::AdamW;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::tensor::{EdgePlacement, Placement};
use pipewright::transport::World;
use pipewright_schedule::StageIndex;

use crate::support::{numbers, program};

const RANKS: u32 = 2;
const MICROBATCHES: usize = 8;
const ROWS: usize = 4;
const TOKENS: usize = 64;
const WIDTH: usize = 64;
const LAYERS: usize = 4;
/// Bytes of the hidden states of a microbatch.
const HIDDEN: u64 = (ROWS * TOKENS * WIDTH * 4) as u64;

/// `x + down(tanh(up(norm(x))))`.
#[derive(Module, Debug)]
struct Layer {
    norm: RmsNorm,
    up: Linear,
    down: Linear,
}

#[derive(Module, Debug)]
struct Layers {
    layers: Vec<Layer>,
    #[module(skip)]
    tensor: TensorParallel,
}

impl Layers {
    fn new(tensor: &TensorParallel) -> Self {
        let layer = |seed: u64| {
            let matrix = |seed, dimension| {
                let shard = tensor.shard(Placement::split(dimension, RANKS));
                let values = numbers(seed, [WIDTH, WIDTH]).try_to_vec().expect("floats");
                let data = TensorData::new(shard.cut(values, &[WIDTH, WIDTH]), shard.shape(&[WIDTH, WIDTH]));
                Linear { weight: Param::from_data(data, &Device::flex().autodiff()), bias: None }
            };
            let weight = Param::from_data(numbers(seed, [WIDTH]), &Device::flex().autodiff());
            Layer {
                norm: RmsNorm { weight, epsilon: 1e-5 },
                up: matrix(10 + seed, 1),
                down: matrix(20 + seed, 0),
            }
        };
        Self { layers: (0..LAYERS as u64).map(layer).collect(), tensor: tensor.clone() }
    }
}

impl StageModule for Layers {
    type Input = Tensor<3>;
    type Output = Tensor<3>;

    fn forward(&self, input: Tensor<3>, _context: &StageContext) -> Tensor<3> {
        let shape = input.dims();
        let region = self.tensor.region(shape[0]);
        let forward = |x: Tensor<2>, layer: &Layer| {
            let inner = layer.up.forward(region.enter(layer.norm.forward(x.clone())));
            x + layer.down.forward_region(inner.tanh(), &region)
        };
        self.layers.iter().fold(input.flatten(0, 1), forward).reshape(shape)
    }

    fn placement(&self, local: &str) -> Placement {
        match local.rsplit_once('.').map_or(local, |(layer, _)| layer).rsplit('.').next() {
            Some("up") => Placement::split(1, RANKS),
            Some("down") => Placement::split(0, RANKS),
            _ if self.tensor.shares_tokens() => Placement::REPLICATED_PARTIAL,
            _ => Placement::REPLICATED,
        }
    }

    fn input_placement(&self, _input: usize) -> EdgePlacement {
        self.output_placement(0)
    }

    fn output_placement(&self, _output: usize) -> EdgePlacement {
        if self.tensor.shares_tokens() { EdgePlacement::split(1) } else { EdgePlacement::WHOLE }
    }
}

/// Returns the losses of three steps, and the peak of each rank in the last one.
fn run(sequence_parallel: bool) -> (Vec<f64>, Vec<u64>) {
    let make = |_: StageIndex, tensor: &TensorParallel| -> Result<Stage, Infallible> {
        let group = tensor.clone();
        // The mean square over the tokens of all ranks.
        let loss = move |output: Tensor<3>, _target: Tensor<2>| {
            let own = output.square().mean();
            if !group.shares_tokens() {
                return own;
            }
            group.sum(own.unsqueeze::<2>() / f64::from(RANKS)).reshape([1])
        };
        Ok(Stage::with_loss(Layers::new(tensor), loss))
    };
    let config = PipelineConfig {
        optimizer: Some(AdamW::default().init()),
        tensor_parallel: RANKS,
        sequence_parallel,
        ..PipelineConfig::default()
    };
    let program = program("gpipe", 1, MICROBATCHES as u32);
    let mut pipeline =
        Pipeline::launch_split(program, World::local(RANKS), &config, make).expect("it starts");
    let (mut losses, mut peaks) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let rows = MICROBATCHES * ROWS;
        let inputs = Tensor::<3>::from_data(numbers(3, [rows, TOKENS, WIDTH]), &Device::flex());
        let summary =
            pipeline.step(inputs, Tensor::<2>::zeros([rows, 1], &Device::flex()), 1e-4).expect("a step");
        losses.push(summary.loss());
        peaks = summary.peak_bytes;
    }
    (losses, peaks)
}

#[test]
fn shares_take_their_part_of_the_memory() {
    let (expected, whole) = run(false);
    let (losses, shares) = run(true);
    for (loss, expected) in losses.iter().zip(&expected) {
        assert!((loss - expected).abs() <= 5e-6 * expected, "{losses:?} {expected:?}");
    }
    // Each layer keeps the input and the result of its norm. The whole batch stays, and a rank's share of it is a copy.
    let replicated = 2 * HIDDEN * (LAYERS * MICROBATCHES) as u64;
    let copied = HIDDEN / u64::from(RANKS) * MICROBATCHES as u64;
    let expected = (replicated - replicated / u64::from(RANKS) - copied) as f64;
    for (whole, shares) in whole.iter().zip(&shares) {
        let saved = whole.saturating_sub(*shares) as f64 / expected;
        assert!((0.97..1.03).contains(&saved), "{saved}: {whole} {shares}");
    }
}
