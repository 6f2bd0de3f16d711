//! The memory of a device, which for the processor is the memory that this process may use.

use pipewright::device::{BackEnd, DeviceChoice, describe};
use pipewright_system::machine_memory::machine_bytes;

/// Returns the memory of a device in bytes, if its back end knows it.
pub fn device_bytes(device: DeviceChoice) -> Option<u64> {
    match device.back_end {
        BackEnd::Flex => machine_bytes(),
        _ => describe(device)?.memory,
    }
}
