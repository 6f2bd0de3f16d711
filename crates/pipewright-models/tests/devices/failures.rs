//! A failure on a device is reported with its place.

use burn::module::{Module, Param};
use burn::optim::SgdConfig;
use burn::tensor::{Device, Tensor};
use pipewright::pipeline::{Layers, Pipeline};
use pipewright::stage::{StageContext, StageModule};

use crate::{DEVICE, devices};

/// Multiplies by its factor. In the second microbatch, the second layer asks for more memory than any device has.
#[derive(Module, Debug)]
struct Greedy {
    factor: Param<Tensor<1>>,
    #[module(skip)]
    is_greedy: bool,
}

impl StageModule for Greedy {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, context: &StageContext) -> Tensor<2> {
        let mut output = input * self.factor.val().unsqueeze();
        if self.is_greedy && context.microbatch().get() == 1 {
            output =
                output + Tensor::<2>::ones([1 << 24, 1 << 16], &self.factor.val().device()).sum().unsqueeze();
        }
        output
    }
}

#[test]
fn a_device_without_memory_is_reported_with_rank_and_step() {
    let Some(devices) = devices(&[DEVICE]) else { return };
    let layer = |place| Greedy {
        factor: Param::from_tensor(Tensor::ones([4], &Device::flex())),
        is_greedy: place == 1,
    };
    let mut pipeline = Pipeline::builder(Layers::new(2, layer))
        .ranks(2)
        .microbatches(4)
        .devices(devices)
        .loss(|output: Tensor<2>, target: Tensor<2>| (output - target).square().mean())
        .optimizer(SgdConfig::new().init())
        .launch()
        .expect("it starts");
    let batch = || Tensor::<2>::ones([8, 4], &Device::flex());
    let error = pipeline.step(batch(), batch(), 0.1).expect_err("there is no such memory").to_string();
    println!("{error}");
    assert!(error.contains("step 1") && error.contains("rank 1"), "{error}");
}
