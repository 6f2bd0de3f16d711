//! The memory of a rank's work on its device, and whether the device computes asynchronously.

use burn::tensor::Device;

/// Returns the bytes that the back end has reserved on `device` for the tensors of the calling thread. Freed
/// memory that the back end keeps for later tensors counts too, so the number is the highest that was needed
/// so far. Returns `None` for the processor, whose memory is counted where it is allocated, and for a back
/// end that does not report it.
///
/// The back end's own buffers do not count: buffers for copies to the processor, and with `wgpu` buffers for
/// the arguments of kernels. It keeps the arguments of its latest kernels, at most 512. Every step has
/// arguments of its own, because the optimizer's factors are among them, so these buffers grow for many steps
/// and then stay as they are.
///
/// The call waits until the back end has accepted the work that the thread has submitted, but not for its
/// results.
pub(crate) fn held_on(device: &Device) -> Option<u64> {
    #[cfg(feature = "cube")]
    if let burn::backend::DispatchDevice::Cube(device) = device.clone().without_autodiff().as_dispatch() {
        let report = device.client().memory_report(burn::cubecl::MemoryScope::CurrentStream);
        return Some(report.streams.iter().map(|stream| stream.pools.usage().bytes_reserved).sum());
    }
    let _ = device;
    None
}

/// Returns whether the device computes behind the rank that gives it work. A failure is then noticed when the
/// rank reads a result, or later.
pub(crate) fn computes_behind(device: &Device) -> bool {
    device.clone().without_autodiff() != Device::flex()
}
