//! Replicas in one process hold the frozen base of an adapter once.

use std::convert::Infallible;

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use pipewright::nn::{Linear, TensorParallel};
use pipewright::optimizer::AdamW;
use pipewright::pipeline::{Pipeline, PipelineConfig};
use pipewright::stage::{Stage, StageContext, StageModule};
use pipewright::transport::World;
use pipewright_schedule::StageIndex;

use crate::support::{linear, loss, numbers, program};

const WIDTH: usize = 512;
const OUTPUTS: usize = 8;
/// Bytes of the base.
const BASE: u64 = (WIDTH * WIDTH * 4) as u64;

#[derive(Module, Debug)]
struct Adapted {
    base: Linear,
    trained: Linear,
}

impl StageModule for Adapted {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        self.trained.forward(self.base.forward(input))
    }
}

/// Returns the losses of three steps of `replicas`, and the peaks of their ranks in the last one. The base is
/// shared if `shares`.
fn run(replicas: u32, shares: bool) -> (Vec<f64>, Vec<u64>) {
    let make = move |_: StageIndex, tensor: &TensorParallel| -> Result<Stage, Infallible> {
        let values = Tensor::<2>::from_data(numbers(1, [WIDTH, WIDTH]), &Device::flex());
        let values = if shares { tensor.share_frozen("base.weight", values) } else { values };
        let base = Linear { weight: Param::from_tensor(values), bias: None };
        let module = Adapted { base, trained: linear(2, [WIDTH, OUTPUTS]) };
        Ok(Stage::with_loss(module, loss).with_base(|path| path.starts_with("base.")))
    };
    let config = PipelineConfig {
        optimizer: Some(AdamW::default().init()),
        data_parallel: replicas,
        ..PipelineConfig::default()
    };
    let program = program("gpipe", 1, 2);
    let mut pipeline =
        Pipeline::launch_split(program, World::local(replicas), &config, make).expect("it starts");
    let rows = 2 * replicas as usize;
    let (mut losses, mut peaks) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let [inputs, targets] = [(3, WIDTH), (4, OUTPUTS)]
            .map(|(seed, width)| Tensor::<2>::from_data(numbers(seed, [rows, width]), &Device::flex()));
        let summary = pipeline.step(inputs, targets, 1e-4).expect("a step");
        losses.push(summary.loss());
        peaks = summary.peak_bytes;
    }
    (losses, peaks)
}

#[test]
fn the_base_counts_for_the_first_replica_alone() {
    let (expected, apart) = run(3, false);
    assert!(apart.iter().all(|&peak| peak >= BASE), "{apart:?}");
    let (losses, peaks) = run(3, true);
    assert_eq!(losses, expected);
    assert!(peaks[0] >= BASE, "{peaks:?}");
    assert!(peaks[1..].iter().all(|&peak| peak < BASE / 2), "{peaks:?}");
}
