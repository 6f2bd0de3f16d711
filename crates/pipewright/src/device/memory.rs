//! The memory of a rank's work on its device, and whether the device computes asynchronously.

use std::time::{Duration, Instant};

use burn::tensor::Device;
use pipewright_kernel::peak::{run_bf16, run_single};

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

/// The rounds of a measurement: about 0.1 ms, or 0.5 ms with AMX.
const ROUNDS: usize = 20_000;
/// The time of all measurements. The fastest counts, because others were only interrupted.
const TIME: Duration = Duration::from_millis(5);

/// Measures how many floating-point operations per second a thread of this processor computes at most, a
/// multiplication and an addition counting as two. Takes 5 ms. Returns `None` if this is not known: on
/// processors without FMA, and on others than x86.
///
/// With `is_bf16`, the operations take pairs of bfloat16, if the processor has them. Otherwise it
/// widens bfloat16 and computes in single precision.
pub fn thread_peak(is_bf16: bool) -> Option<f64> {
    let run = || if is_bf16 { run_bf16(ROUNDS).or_else(|| run_single(ROUNDS)) } else { run_single(ROUNDS) };
    // A processor lowers its clock for wide instructions only after the first of them.
    run()?;
    let (start, mut fastest) = (Instant::now(), 0.0_f64);
    while start.elapsed() < TIME {
        let before = Instant::now();
        let operations = run()?;
        fastest = fastest.max(operations / before.elapsed().as_secs_f64());
    }
    Some(fastest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_precisions_have_a_peak_or_neither() {
        let peaks = [false, true].map(thread_peak);
        assert_eq!(peaks[0].is_some(), peaks[1].is_some());
        assert!(peaks.iter().flatten().all(|peak| peak.is_finite() && *peak > 0.0), "{peaks:?}");
    }
}
