//! The memory that ranks report on a device, and what the back end keeps for itself.

use burn::backend::DispatchDevice;
use burn::cubecl::MemoryScope;
use burn::module::Module;
use burn::nn::LinearConfig;
use burn::tensor::{Device, Tensor};
use pipewright::nn::Linear;
use pipewright::optimizer::AdamW;
use pipewright::pipeline::{Layers, Pipeline};
use pipewright::stage::{StageContext, StageModule};

use crate::run::Run;
use crate::{DEVICE, devices, own_device};

#[test]
fn a_rank_reports_what_it_holds_on_its_device_and_the_report_does_not_grow() {
    let Some(devices) = devices(&[DEVICE]) else { return };
    let steps = Run { ranks: 2, steps: 8, ..Run::default() }.train(&devices);
    let peaks: Vec<&[u64]> = steps.iter().map(|step| step.peak_bytes.as_slice()).collect();
    // Each rank holds half of 404,000 parameters four times: values, gradients and two moments.
    assert!(peaks[7].iter().all(|&bytes| (3 << 20..256 << 20).contains(&bytes)), "{peaks:?}");
    // The optimizer makes its state in the first step, and the second is the first that begins with it.
    assert!(peaks[2..].iter().all(|&bytes| bytes == peaks[2]), "{peaks:?}");
}

#[derive(Module, Debug)]
struct Dense {
    linear: Linear,
}

impl StageModule for Dense {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        self.linear.forward(input)
    }
}

/// Returns the bytes that the back end has reserved on `device` for tensors, and the bytes for everything.
fn reserved(device: &Device) -> [u64; 2] {
    let DispatchDevice::Cube(device) = device.as_dispatch() else { panic!("another back end") };
    let report = device.client().memory_report(MemoryScope::Device);
    let tensors = report.streams.iter().map(|stream| stream.pools.usage().bytes_reserved).sum();
    [tensors, report.usage().bytes_reserved]
}

/// Every step launches kernels with arguments that no step had before: the optimizer's factors. The back end
/// keeps the arguments of its latest kernels, 512 with `wgpu`, in buffers of its own. So it holds more with
/// each step at first, which is not a leak.
#[test]
fn the_back_end_holds_no_more_once_it_replaces_the_arguments_that_it_keeps() {
    if devices(&[DEVICE]).is_none() {
        return;
    }
    let device = own_device();
    let layer = |index: usize| {
        let linear = LinearConfig::new(4 + index, 5 + index).init(&Device::flex().autodiff());
        Dense { linear: linear.into() }
    };
    let mut pipeline = Pipeline::builder(Layers::new(4, layer))
        .microbatches(1)
        .devices(device.clone())
        .loss(|output: Tensor<2>, target: Tensor<2>| (output - target).square().mean())
        .optimizer(AdamW::default().init())
        .launch()
        .expect("it starts");
    let mut found = Vec::new();
    for step in 0..120 {
        let host = Device::flex();
        let (input, target) = (Tensor::<2>::ones([2, 4], &host), Tensor::<2>::ones([2, 8], &host));
        pipeline.step(input, target, 1e-3).expect("a step");
        if step % 10 == 9 {
            found.push(reserved(&device));
        }
    }
    let [early, late] = [found[0], found[11]];
    assert!(early[0] == late[0], "tensors: {found:?}");
    assert!(early[1] < late[1], "every step has arguments of its own: {found:?}");
    assert_eq!(found[6..], [late; 6], "{found:?}");
}
