//! A device that fails ends the step with a report: in a kernel of an action, in the update, and when the
//! device is lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use burn::module::{Module, Param};
use burn::optim::{LearningRate, LionState, ModuleOptimizer, Optimizer, SgdConfig};
use burn::tensor::wgpu::{WgpuBackend, wgpu};
use burn::tensor::{Device, DeviceKind, Tensor};
use pipewright::device::{DeviceChoice, Devices};
use pipewright::pipeline::{Layers, Pipeline};
use pipewright::stage::{StageContext, StageModule};

/// Longer than anything in these tests takes, also on a machine that is busy with other work.
const NEVER_REACHED: Duration = Duration::from_secs(120);

/// Multiplies by its factor. In the second microbatch, the second layer asks for more memory than any device
/// has.
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
            output = output + too_much(&self.factor.val().device()).unsqueeze();
        }
        output
    }
}

/// Returns one of more numbers than any device can hold.
fn too_much(device: &Device) -> Tensor<1> {
    Tensor::<2>::ones([1 << 24, 1 << 16], device).slice([0..1, 0..1]).reshape([1])
}

/// Plain gradient descent. On the thread of rank 1, it asks for more memory than any device has.
#[derive(Clone)]
struct GreedyOptimizer;

impl Optimizer for GreedyOptimizer {
    type State<const D: usize> = LionState<D>;

    fn step<const D: usize>(
        &self,
        rate: LearningRate,
        parameter: Tensor<D>,
        gradient: Tensor<D>,
        state: Option<LionState<D>>,
    ) -> (Tensor<D>, Option<LionState<D>>) {
        let mut updated = parameter - gradient * rate;
        if std::thread::current().name() == Some("rank-1") {
            let device = updated.device();
            updated = updated + too_much(&device).reshape([1; D]);
        }
        (updated, state)
    }

    fn to_device<const D: usize>(state: LionState<D>, _device: &Device) -> LionState<D> {
        state
    }
}

/// Multiplies by its factor. In the second microbatch of the second step, the second layer loses its device.
#[derive(Module, Debug)]
struct Losing {
    factor: Param<Tensor<1>>,
    #[module(skip)]
    device: Option<wgpu::Device>,
    #[module(skip)]
    calls: Arc<AtomicU32>,
}

impl StageModule for Losing {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, input: Tensor<2>, _context: &StageContext) -> Tensor<2> {
        if let Some(device) = &self.device
            && self.calls.fetch_add(1, Ordering::SeqCst) == MICROBATCHES + 1
        {
            device.destroy();
        }
        input * self.factor.val().unsqueeze()
    }
}

const MICROBATCHES: u32 = 4;

/// Opens the tested device; returns `None` if it does not exist.
#[expect(clippy::print_stdout, reason = "a test that is left out says so")]
fn device() -> Option<Devices> {
    let device: DeviceChoice = "wgpu:cpu".parse().expect("a device");
    match Devices::open(&[device]) {
        Ok(devices) => Some(devices),
        Err(error) if std::env::var_os("PIPEWRIGHT_REQUIRE_DEVICE").is_some() => panic!("{error}"),
        Err(error) => {
            println!("not tested: {error}");
            None
        }
    }
}

/// Starts a pipeline of two layers on two ranks.
fn launch(layers: Layers, devices: Devices, optimizer: ModuleOptimizer) -> Pipeline {
    Pipeline::builder(layers)
        .ranks(2)
        .microbatches(MICROBATCHES)
        .devices(devices)
        .loss(|output: Tensor<2>, target: Tensor<2>| (output - target).square().mean())
        .optimizer(optimizer)
        .launch()
        .expect("it starts")
}

/// Takes a step, which must end in time, and returns the error.
fn step(pipeline: &mut Pipeline) -> Result<(), String> {
    let batch = || Tensor::<2>::ones([8, 4], &Device::flex());
    let start = Instant::now();
    let outcome = pipeline.step(batch(), batch(), 0.1).map(drop).map_err(|error| error.to_string());
    assert!(start.elapsed() < NEVER_REACHED, "it took {:?}", start.elapsed());
    outcome
}

fn factor() -> Param<Tensor<1>> {
    Param::from_tensor(Tensor::ones([4], &Device::flex()))
}

#[test]
fn a_kernel_that_fails_is_reported_with_its_step() {
    let Some(devices) = device() else { return };
    let layer = |index| Greedy { factor: factor(), is_greedy: index == 1 };
    let mut pipeline = launch(Layers::new(2, layer), devices, SgdConfig::new().init());
    let error = step(&mut pipeline).expect_err("there is no such memory");
    // Work on a device runs later, so the failure appears where a rank reads its first result. The error
    // names the last action that the device got.
    for part in ["step 1: rank ", ", stage ", ", microbatch ", ", action "] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn an_update_that_fails_is_reported_with_its_stage() {
    let Some(devices) = device() else { return };
    let layer = |_| Greedy { factor: factor(), is_greedy: false };
    let mut pipeline = launch(Layers::new(2, layer), devices, GreedyOptimizer.into());
    let error = step(&mut pipeline).expect_err("there is no such memory");
    let expected =
        "step 1: rank 1, stage 1, update: the device has no memory left: 4398046511104 bytes were asked for";
    assert_eq!(error, expected);
    let error = step(&mut pipeline).expect_err("rank 0 has updated");
    assert!(error.contains("step 1"), "{error}");
}

#[test]
fn a_device_that_is_lost_is_reported_and_nothing_hangs() {
    if device().is_none() {
        return;
    }
    // A device of its own, because nothing else can run on it later.
    let options = Device::wgpu_options().device_kind(DeviceKind::Cpu).graphics_api(WgpuBackend::Vulkan);
    let (device, setup) = options.init_with_setup().expect("the device exists");
    let layer = move |index| Losing {
        factor: factor(),
        device: (index == 1).then(|| setup.device.clone()),
        calls: Arc::default(),
    };
    let mut pipeline = launch(Layers::new(2, layer), device.into(), SgdConfig::new().init());
    step(&mut pipeline).expect("the device exists");
    let error = step(&mut pipeline).expect_err("the device is lost");
    for part in ["step 2: rank ", ", stage ", ", microbatch ", ", action "] {
        assert!(error.contains(part), "{error}");
    }
    step(&mut pipeline).expect_err("the device is still lost");
    let start = Instant::now();
    drop(pipeline);
    assert!(start.elapsed() < NEVER_REACHED, "it took {:?}", start.elapsed());
}
