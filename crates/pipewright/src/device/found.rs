//! The devices that exist.

use burn::tensor::Device;

use super::back_end::BackEnd;
use super::choice::{Adapter, DeviceChoice};
use super::error::DeviceError;

/// A device of this machine.
#[derive(Clone, Debug)]
pub struct FoundDevice {
    /// The name by which a configuration chooses it.
    pub choice: DeviceChoice,
    /// Its own name, such as the product's.
    pub name: String,
    /// Its memory in bytes; `None` if the back end does not know it.
    pub memory: Option<u64>,
    /// Whether the back end copies between two of its devices without going through the processor's memory.
    pub copies_directly: bool,
}

/// Returns the devices that this build can use on this machine, the processor first.
pub fn found() -> Vec<FoundDevice> {
    BackEnd::ALL.into_iter().flat_map(of_back_end).collect()
}

/// Returns a device that this build can use; `None` if it does not exist.
pub fn describe(choice: DeviceChoice) -> Option<FoundDevice> {
    open(&choice).ok().map(|_| described(choice))
}

fn of_back_end(back_end: BackEnd) -> Vec<FoundDevice> {
    adapters(back_end).into_iter().map(|adapter| described(DeviceChoice { back_end, adapter })).collect()
}

fn described(choice: DeviceChoice) -> FoundDevice {
    let device = handle(choice);
    #[cfg(feature = "cube")]
    if let Some(burn::backend::DispatchDevice::Cube(device)) = device.as_ref().map(Device::as_dispatch) {
        let client = device.client();
        let properties = client.properties();
        return FoundDevice {
            choice,
            name: properties.identity.name.clone(),
            memory: properties.memory.max_memory(),
            copies_directly: client.has_device_transport(),
        };
    }
    let _ = device;
    FoundDevice { choice, name: "processor".to_owned(), memory: None, copies_directly: true }
}

/// Returns the device that `choice` names.
pub(super) fn open(choice: &DeviceChoice) -> Result<Device, DeviceError> {
    let choice = *choice;
    if !choice.back_end.is_compiled_in() {
        return Err(DeviceError::NotCompiledIn { choice });
    }
    let there = adapters(choice.back_end);
    let is_there = match choice.adapter {
        Adapter::Default => !there.is_empty(),
        adapter => there.contains(&adapter),
    };
    match handle(choice) {
        Some(device) if is_there => Ok(device),
        _ => {
            let describe = |found: FoundDevice| format!("`{}` ({})", found.choice, found.name);
            Err(DeviceError::NotThere { choice, found: found().into_iter().map(describe).collect() })
        }
    }
}

/// Returns the devices of a back end.
fn adapters(back_end: BackEnd) -> Vec<Adapter> {
    match back_end {
        BackEnd::Flex => vec![Adapter::Default],
        #[cfg(feature = "cuda")]
        BackEnd::Cuda => numbered(&Device::enumerate(burn::tensor::DeviceType::Cuda)),
        #[cfg(feature = "rocm")]
        BackEnd::Rocm => numbered(&Device::enumerate(burn::tensor::DeviceType::Rocm)),
        #[cfg(feature = "metal")]
        BackEnd::Metal => kinds(&Device::enumerate(burn::tensor::DeviceType::Metal)),
        #[cfg(feature = "vulkan")]
        BackEnd::Vulkan => kinds(&Device::enumerate(burn::tensor::DeviceType::Vulkan)),
        #[cfg(any(feature = "wgpu", feature = "vulkan", feature = "metal"))]
        BackEnd::Wgpu => kinds(&Device::enumerate(burn::tensor::DeviceType::Wgpu)),
        #[cfg(not(all(feature = "cuda", feature = "rocm", feature = "metal", feature = "vulkan")))]
        _ => Vec::new(),
    }
}

/// Numbers the devices of a back end whose devices have no kinds.
#[cfg(any(feature = "cuda", feature = "rocm"))]
fn numbered(devices: &[Device]) -> Vec<Adapter> {
    (0..devices.len()).map(Adapter::Gpu).collect()
}

/// Returns the kinds of a graphics interface's adapters. Adapters that it cannot classify are left out.
#[cfg(any(feature = "wgpu", feature = "vulkan", feature = "metal"))]
fn kinds(devices: &[Device]) -> Vec<Adapter> {
    use burn::backend::{DispatchDevice, WgpuDeviceKind};
    let kind = |device: &Device| match device.as_dispatch() {
        DispatchDevice::Cube(burn::backend::CubeDevice::Wgpu(device)) => match device.kind {
            WgpuDeviceKind::DiscreteGpu(number) => Some(Adapter::Gpu(number)),
            WgpuDeviceKind::IntegratedGpu(number) => Some(Adapter::Integrated(number)),
            WgpuDeviceKind::VirtualGpu(number) => Some(Adapter::Virtual(number)),
            WgpuDeviceKind::Cpu => Some(Adapter::Cpu),
            _ => None,
        },
        _ => None,
    };
    devices.iter().filter_map(kind).collect()
}

/// Returns Burn's handle of a device, which need not be there; `None` if the back end is not compiled in or
/// has no such kind of devices.
fn handle(choice: DeviceChoice) -> Option<Device> {
    match choice.back_end {
        BackEnd::Flex => Some(Device::flex()),
        #[cfg(feature = "cuda")]
        BackEnd::Cuda => Some(Device::cuda(number(choice.adapter)?)),
        #[cfg(feature = "rocm")]
        BackEnd::Rocm => Some(Device::rocm(number(choice.adapter)?)),
        #[cfg(feature = "metal")]
        BackEnd::Metal => Some(Device::metal(device_kind(choice.adapter))),
        #[cfg(feature = "vulkan")]
        BackEnd::Vulkan => Some(Device::vulkan(device_kind(choice.adapter))),
        #[cfg(any(feature = "wgpu", feature = "vulkan", feature = "metal"))]
        BackEnd::Wgpu => Some(Device::wgpu(device_kind(choice.adapter))),
        #[cfg(not(all(feature = "cuda", feature = "rocm", feature = "metal", feature = "vulkan")))]
        _ => None,
    }
}

#[cfg(any(feature = "cuda", feature = "rocm"))]
fn number(adapter: Adapter) -> Option<usize> {
    match adapter {
        Adapter::Default => Some(0),
        Adapter::Gpu(number) => Some(number),
        _ => None,
    }
}

#[cfg(any(feature = "wgpu", feature = "vulkan", feature = "metal"))]
fn device_kind(adapter: Adapter) -> burn::tensor::DeviceKind {
    use burn::tensor::DeviceKind;
    match adapter {
        Adapter::Default => DeviceKind::DefaultDevice,
        Adapter::Gpu(number) => DeviceKind::DiscreteGpu(number),
        Adapter::Integrated(number) => DeviceKind::IntegratedGpu(number),
        Adapter::Virtual(number) => DeviceKind::VirtualGpu(number),
        Adapter::Cpu => DeviceKind::Cpu,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_is_there() {
        assert_eq!(open(&DeviceChoice::FLEX), Ok(Device::flex()));
        assert_eq!(found()[0].choice, DeviceChoice::FLEX);
    }

    #[test]
    #[cfg(not(feature = "cuda"))]
    fn a_back_end_that_is_not_compiled_in_is_refused_with_the_command() {
        let error = open(&"cuda:1".parse().expect("a name")).expect_err("no CUDA in this build");
        let expected =
            "this build cannot compute on `cuda:1`: build it with `cargo build --release --features cuda`";
        assert_eq!(error.to_string(), expected);
    }
}
