//! Losses and gradient norms of whole runs. Norms are clipped at 1, which most steps exceed.

use std::sync::OnceLock;

use burn::module::Module;
use burn::nn::LinearConfig;
use burn::optim::AdamWConfig;
use burn::tensor::{Bool, Device, Int, Tensor};
use pipewright::device::Devices;
use pipewright::nn::Linear;
use pipewright::pipeline::{Layers, Pipeline};
use pipewright::stage::{StageContext, StageModule};

use crate::reference::Step;
use crate::run::Run;
use crate::{DEVICE, devices, own_device};

/// Returns the steps of one rank on the device.
fn one_rank(devices: &Devices) -> &'static [Step] {
    static STEPS: OnceLock<Vec<Step>> = OnceLock::new();
    STEPS.get_or_init(|| Run::default().check(devices))
}

/// Checks a run against PyTorch, and against one rank to the bit.
fn check(schedule: &str, ranks: u32) {
    let Some(devices) = devices(&[DEVICE]) else { return };
    let steps = Run { schedule, ranks, ..Run::default() }.check(&devices);
    assert_eq!(steps, one_rank(&devices), "{schedule} on {ranks} ranks: the bits of one rank");
}

#[test]
fn all_steps_retrace_pytorch() {
    let Some(devices) = devices(&[DEVICE]) else { return };
    Run { steps: 12, ..Run::default() }.check(&devices);
}

#[test]
fn gpipe() {
    check("gpipe", 1);
    check("gpipe", 4);
}

#[test]
fn one_f_one_b() {
    check("1f1b", 2);
    check("1f1b", 4);
}

#[test]
fn interleaved() {
    check("interleaved1f1b", 1);
    check("interleaved1f1b", 4);
}

#[test]
fn zero_bubble() {
    check("zbvzerobubble", 1);
    check("zbvzerobubble", 4);
}

#[test]
fn dual_pipe() {
    check("dualpipev", 1);
    check("dualpipev", 2);
}

#[test]
fn recomputation_keeps_the_bits() {
    let Some(devices) = devices(&[DEVICE]) else { return };
    for (recompute, schedule) in [("block", "1f1b"), ("stage", "zbvzerobubble")] {
        for offloads in [false, true] {
            let steps = Run { schedule, ranks: 2, recompute, offloads, ..Run::default() }.check(&devices);
            assert_eq!(steps, one_rank(&devices), "{schedule}, {recompute}, offloads: {offloads}");
        }
    }
}

#[test]
fn two_devices_have_the_bits_of_one() {
    let Some(one) = devices(&[DEVICE]) else { return };
    let two = Devices::from(vec![own_device(), own_device()]);
    let steps = Run { schedule: "zbvzerobubble", ranks: 2, ..Run::default() }.check(&two);
    assert_eq!(steps, one_rank(&one));
}

#[test]
fn the_processor_and_a_device_train_together() {
    let Some(devices) = devices(&["flex", DEVICE]) else { return };
    let run = Run { ranks: 2, ..Run::default() };
    let first = run.check(&devices);
    assert_eq!(first, run.check(&devices), "the same bits in every run");
    Run { schedule: "zbvzerobubble", ..run }.check(&devices);
}

#[test]
fn tied_embeddings_on_two_devices() {
    let run = Run { model: "llama-tied-tiny", ranks: 2, ..Run::default() };
    for names in [[DEVICE, DEVICE], ["flex", DEVICE]] {
        let Some(devices) = devices(&names) else { return };
        run.check(&devices);
    }
}

#[test]
fn replicas_and_shards() {
    let close = |a: &[Step], b: &[Step]| {
        for (a, b) in a.iter().zip(b) {
            assert!((a.loss - b.loss).abs() <= 1e-6 * b.loss, "{} {}", a.loss, b.loss);
        }
    };
    let run = Run { ranks: 2, microbatches: 2, replicas: 2, ..Run::default() };
    for names in [&[DEVICE][..], &["flex", DEVICE]] {
        let Some(devices) = devices(names) else { return };
        let replicated = run.check(&devices);
        let sharded = Run { is_sharded: true, ..run }.check(&devices);
        assert_eq!(replicated, sharded, "the bits of whole replicas");
        close(&sharded, &Run { ranks: 1, ..Run::default() }.check(&devices));
    }
}

/// A layer that passes on integers and booleans in addition to its numbers.
#[derive(Module, Debug)]
struct Masked {
    linear: Linear,
}

impl StageModule for Masked {
    type Input = (Tensor<2>, Tensor<1, Int>, Tensor<2, Bool>);
    type Output = Self::Input;

    fn forward(&self, (x, indices, mask): Self::Input, _context: &StageContext) -> Self::Output {
        let y = self.linear.forward(x.clone()).mask_fill(mask.clone(), 0.0);
        (x + y, indices.flip([0]), mask.bool_not())
    }
}

#[test]
fn tensors_of_every_kind_cross_between_devices() {
    let train = |names: &[&str]| {
        let layer = |_| Masked { linear: LinearConfig::new(4, 4).init(&Device::flex().autodiff()).into() };
        let mut pipeline = Pipeline::builder(Layers::new(4, layer))
            .ranks(4)
            .microbatches(4)
            .devices(devices(names)?)
            .loss(|(y, indices, mask): <Masked as StageModule>::Output, target: Tensor<2>| {
                let chosen = y.select(0, indices).mask_fill(mask, 0.5);
                (chosen - target).square().mean()
            })
            .optimizer(AdamWConfig::new().init())
            .launch()
            .expect("it starts");
        let device = Device::flex();
        let x = Tensor::<1, Int>::arange(0..32, &device).float().reshape([8, 4]).sin();
        let indices = Tensor::<1, Int>::from_data([0, 1, 1, 0, 0, 0, 1, 1], &device);
        let mask = x.clone().greater_elem(0.2);
        let step = |_| {
            let inputs = (x.clone(), indices.clone(), mask.clone());
            pipeline.step(inputs, x.clone().flip([1]), 1e-2).expect("a step").loss()
        };
        Some((0..3).map(step).collect::<Vec<f64>>())
    };
    let expected = train(&["flex"]);
    for names in [&[DEVICE][..], &["flex", DEVICE], &[DEVICE, "flex"]] {
        let (Some(found), Some(expected)) = (train(names), &expected) else { return };
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() <= 1e-5 * expected, "{names:?}: {found} {expected}");
        }
    }
}
