//! The memory that ranks report on a device, and what the back end keeps for itself.

use burn::backend::DispatchDevice;
use burn::cubecl::{MemoryReport, MemoryScope};
use burn::module::Module;
use burn::nn::LinearConfig;
use burn::tensor::{Device, Int, Tensor, TensorData};
use pipewright::nn::{Linear, cross_entropy};
use pipewright::optimizer::AdamW;
use pipewright::pipeline::{Layers, Pipeline};
use pipewright::stage::{StageContext, StageModule};
use pipewright::tensor::Precision;
use pipewright_models::decoder::{DecoderConfig, MixtureConfig};
use pipewright_models::llama::LlamaConfig;
use pipewright_models::qwen3_moe::Qwen3MoeConfig;
use pipewright_models::training_memory::{ComputeDevices, layers_in};
use pipewright_models::{CutModel, ModelConfig, ModelFamily};

use crate::reference::Reference;
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

/// Returns the memory of `device`.
fn report(device: &Device) -> MemoryReport {
    let DispatchDevice::Cube(device) = device.as_dispatch() else { panic!("another back end") };
    device.client().memory_report(MemoryScope::Device)
}

/// Returns the bytes that the back end has reserved on `device` for tensors, and the bytes for everything.
fn reserved(device: &Device) -> [u64; 2] {
    let report = report(device);
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

/// The tokens of the row whose memory is measured. With so many, an attention that kept its scores would keep
/// twice as much.
const TOKENS: usize = 256;

/// Checks that the tape of a model's forward and loss keeps the bytes that the estimate counts, up to a tenth,
/// and that the backward pass can compute with them.
fn check_kept<F>(family: &F, config: ModelConfig)
where
    F: ModelFamily,
{
    if devices(&[DEVICE]).is_none() {
        return;
    }
    let (device, vocabulary) = (own_device(), config.vocab_size() as i64);
    let model = CutModel::new(config, 1).expect("a whole head");
    let layers = layers_in(&model, TOKENS, Precision::F32, ComputeDevices::Others).layers;
    let expected: u64 = layers.iter().map(|layer| layer.activation_bytes).sum();
    let on_tape = device.clone().autodiff();
    let stage = family.init_stage(0..layers.len(), 7, &on_tape).expect("all layers");
    let ids = |shift: i64| -> Tensor<1, Int> {
        let ids: Vec<i64> = (0..TOKENS as i64).map(|index| (index * 7 + shift) % vocabulary).collect();
        Tensor::from_data(TensorData::new(ids, [TOKENS]), &device)
    };
    let (inputs, targets) = (ids(0), ids(1));
    let loss = || {
        let logits = stage.run(inputs.clone().reshape([1, TOKENS]));
        cross_entropy(logits.flatten(0, 1), targets.clone())
    };
    let in_use = || {
        device.sync().expect("the device computes");
        let report = report(&device);
        report.streams.iter().map(|stream| stream.pools.usage().bytes_in_use).sum::<u64>()
    };
    // The first forward may make tables.
    drop(loss());
    let before = in_use();
    let kept = loss();
    let found = in_use() - before;
    // The backward pass finds all that it needs.
    kept.backward();
    let ratio = found as f64 / expected as f64;
    assert!(
        (0.9..1.1).contains(&ratio),
        "{found} bytes are kept, and the estimate is {expected}: {layers:#?}"
    );
}

fn sizes() -> DecoderConfig {
    DecoderConfig {
        hidden_size: 64,
        intermediate_size: 160,
        num_hidden_layers: 2,
        num_key_value_heads: 2,
        ..DecoderConfig::new(256, 4)
    }
}

#[test]
fn dense_blocks_keep_what_the_estimate_counts() {
    let config = LlamaConfig::from(sizes());
    check_kept(&config, ModelConfig::Llama(config.clone()));
}

#[test]
fn mixtures_keep_what_the_estimate_counts() {
    let mixture = MixtureConfig { num_experts: 4, num_experts_per_tok: 2, ..MixtureConfig::of_width(96) };
    let config = Qwen3MoeConfig { mixture, ..sizes().into() };
    check_kept(&config, ModelConfig::Qwen3Moe(config.clone()));
}

#[test]
fn mamba_blocks_keep_what_the_estimate_counts() {
    let config = Reference::load("nemotron-h-tiny").config;
    let ModelConfig::NemotronH(family) = config.clone() else { panic!("another family: {config:?}") };
    check_kept(&family, config);
}
