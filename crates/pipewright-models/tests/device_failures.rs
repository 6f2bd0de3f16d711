//! A kernel that fails on a device ends the step with a report.

use burn::module::{Module, Param};
use burn::optim::SgdConfig;
use burn::tensor::{Device, Tensor};
use pipewright::device::{DeviceChoice, Devices};
use pipewright::pipeline::{Layers, Pipeline};
use pipewright::stage::{StageContext, StageModule};

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
fn a_kernel_that_fails_is_reported_with_its_step() {
    let device: DeviceChoice = "wgpu:cpu".parse().expect("a device");
    let devices = match Devices::open(&[device]) {
        Ok(devices) => devices,
        Err(error) if std::env::var_os("PIPEWRIGHT_REQUIRE_DEVICE").is_some() => panic!("{error}"),
        Err(error) => return println!("not tested: {error}"),
    };
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
    // Work on a device runs later, so the failure appears where a rank reads its first result. The error names the last
    // action that the device got.
    for part in ["step 1: rank ", ", stage ", ", microbatch ", ", action "] {
        assert!(error.contains(part), "{error}");
    }
}
