//! Training on a device other than the processor: against PyTorch, against the processor, and on mixed
//! devices.
//!
//! The device is a Vulkan adapter that computes on the processor (Mesa's lavapipe), so the tests run on any
//! machine. Without such an adapter they print a message and pass, unless `PIPEWRIGHT_REQUIRE_DEVICE` is set.

mod layers;
mod memory;
#[expect(dead_code, reason = "these tests use a part of it")]
#[path = "../references/reference.rs"]
mod reference;
mod run;
mod training;

use std::sync::OnceLock;

use burn::tensor::wgpu::{WgpuBackend, WgpuSetup};
use burn::tensor::{Device, DeviceKind, Tensor};
use pipewright::device::{DeviceChoice, Devices};
use pipewright::ids::WorldRank;

/// The name of the tested device.
pub(crate) const DEVICE: &str = "wgpu:cpu";

/// Returns the devices of these names, or `None` if the tested one does not exist.
#[expect(clippy::print_stdout, reason = "a test that is left out says so")]
pub(crate) fn devices(names: &[&str]) -> Option<Devices> {
    static IS_THERE: OnceLock<bool> = OnceLock::new();
    let open = |names: &[&str]| {
        let choices: Vec<DeviceChoice> = names.iter().map(|name| name.parse().expect("a device")).collect();
        Devices::open(&choices)
    };
    let is_there = *IS_THERE.get_or_init(|| match open(&[DEVICE]) {
        Ok(devices) => {
            start_threads(devices.of(WorldRank::new(0)).expect("the device of all ranks"));
            true
        }
        Err(error) if std::env::var_os("PIPEWRIGHT_REQUIRE_DEVICE").is_some() => panic!("{error}"),
        Err(error) => {
            println!("not tested: {error}");
            false
        }
    });
    is_there.then(|| open(names).expect("they are there"))
}

/// Starts the threads that compute for `device`. They have the priority of the thread that starts them, which
/// must not be the thread of a rank ([`take_lowest_priority`]).
fn start_threads(device: &Device) {
    assert_eq!(Tensor::<1>::ones([2], device).sum().into_scalar::<f32>(), 2.0);
}

/// Gives the calling thread, which is a rank's thread, the lowest priority. Burn waits for a busy device in a
/// loop that sleeps only after milliseconds. The tested device computes on the same processor, so the ranks
/// would take its time.
pub(crate) fn take_lowest_priority() {
    rustix::process::nice(19).expect("a thread may lower its own priority");
}

/// Returns a device of its own for Burn, on the tested adapter. It has its own tensors and buffers.
pub(crate) fn own_device() -> Device {
    static SETUP: OnceLock<WgpuSetup> = OnceLock::new();
    let setup = SETUP.get_or_init(|| {
        let options = Device::wgpu_options().device_kind(DeviceKind::Cpu).graphics_api(WgpuBackend::Vulkan);
        options.init_with_setup().expect("the adapter exists").1
    });
    let device = Device::wgpu_options().setup(setup.clone()).init().expect("the adapter exists");
    start_threads(&device);
    device
}
