//! The order of copies between two devices.
//!
//! A back end that copies between devices without the processor's memory queues two operations: a send on one
//! device and a receive on the other. Each waits for the other. If two threads queued opposite copies at the
//! same time, both devices could get their send first, and neither receive would ever run. So a process
//! queues one copy at a time.

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::tensor::Device;

static QUEUEING: Mutex<()> = Mutex::new(());

/// Returns a guard that the caller holds while it queues a copy. Copies from and to the processor's memory
/// need none: they involve one device.
pub(super) fn queueing(from: &Device, to: &Device) -> Option<MutexGuard<'static, ()>> {
    let processor = Device::flex();
    let are_devices = *from != processor && *to != processor;
    // The lock protects no data, so a panic under it leaves nothing behind.
    are_devices.then(|| QUEUEING.lock().unwrap_or_else(PoisonError::into_inner))
}
