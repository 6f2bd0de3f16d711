//! Measures the link between two ranks: how long a message takes whatever its size, and how many bytes per
//! second follow.
//!
//! Ranks 0 and 1 send a tensor back and forth. Each reads what it receives, because storage that is moved
//! within a process still has to come from the cache of the other core. The time that a rank needs to read
//! its own tensor is subtracted. Small messages show the latency, and the further time of large ones the
//! bandwidth.

use std::time::{Duration, Instant};

use burn::tensor::{Device, Distribution, Tensor};
use pipewright_schedule::{Microbatch, StageIndex};

use super::agreement::{AgreementError, receive};
use super::endpoint::Endpoint;
use super::local;
use super::wait::end_of_wait;
use crate::device::Devices;
use crate::ids::WorldRank;
use crate::message::{Direction, Payload, Tag};
use crate::tensor::Value;

/// The time of a message.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkSpeed {
    /// The time of an empty message, in seconds.
    pub latency_s: f64,
    /// The bytes that follow in a second.
    pub bytes_per_s: f64,
}

/// The numbers in a small and in a large message.
const SIZES: [usize; 2] = [1 << 10, 1 << 20];
/// How often each of them goes back and forth, and how often before that.
const ROUNDS: [u32; 2] = [60, 16];
const WARM_UP: u32 = 4;
/// The bytes of a number.
const NUMBER: f64 = 4.0;
/// The bandwidth of a link on which large messages do not take longer than small ones.
const FASTEST: f64 = 1e15;

/// Measures the link between two threads of this process.
pub(super) fn between_threads(
    devices: &Devices,
    deadline: Duration,
) -> Result<Option<LinkSpeed>, AgreementError> {
    let mut ends = local::world(2).into_iter().map(Endpoint::Local);
    let (Some(mut first), Some(mut second)) = (ends.next(), ends.next()) else { return Ok(None) };
    std::thread::scope(|scope| {
        let second = scope.spawn(move || measure(&mut second, devices, deadline));
        let speed = measure(&mut first, devices, deadline);
        // If the second one fails, the first one only finds that it is silent.
        second.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        speed
    })
}

/// Measures the link between the first two ranks. Returns the result on the first of them.
pub(super) fn measure(
    endpoint: &mut Endpoint,
    devices: &Devices,
    deadline: Duration,
) -> Result<Option<LinkSpeed>, AgreementError> {
    let own = endpoint.rank();
    let peer = match own.get() {
        0 if endpoint.ranks() > 1 => WorldRank::new(1),
        1 => WorldRank::new(0),
        _ => return Ok(None),
    };
    let flex = Device::flex();
    let device = devices.of(own).cloned().unwrap_or_else(|| flex.clone());
    let peer_device = (!endpoint.is_distributed()).then(|| devices.of(peer).cloned().unwrap_or(flex));
    let link = Probe { peer, device, peer_device, deadline };
    let mut times = [0.0; 2];
    let mut number = 0;
    for ((time, size), rounds) in times.iter_mut().zip(SIZES).zip(ROUNDS) {
        let tensor = Value::of(Tensor::<1>::random([size], Distribution::Default, &link.device));
        let mut trips = Vec::new();
        for _ in 0..WARM_UP + rounds {
            trips.push(link.round_trip(endpoint, own.get() == 0, &tensor, number)?);
            number += 1;
        }
        let reads = (0..WARM_UP + rounds).map(|_| link.read(tensor.clone()).1).collect();
        *time = (median(trips) / 2.0 - median(reads)).max(0.0);
    }
    let [small, large] = times;
    let bytes = NUMBER * (SIZES[1] - SIZES[0]) as f64;
    let bytes_per_s = (bytes / (large - small).max(bytes / FASTEST)).clamp(1.0, FASTEST);
    let latency_s = (small - NUMBER * SIZES[0] as f64 / bytes_per_s).max(0.0);
    Ok((own.get() == 0).then_some(LinkSpeed { latency_s, bytes_per_s }))
}

/// One end of the measurement.
struct Probe {
    peer: WorldRank,
    device: Device,
    /// The device to which a tensor is moved before it is sent, within a process.
    peer_device: Option<Device>,
    deadline: Duration,
}

impl Probe {
    /// Sends a tensor and waits for one, or the other way round. Returns the time, in seconds.
    fn round_trip(
        &self,
        endpoint: &mut Endpoint,
        begins: bool,
        tensor: &Value,
        number: u32,
    ) -> Result<f64, AgreementError> {
        let (microbatch, start) = (Microbatch::new(number), Instant::now());
        let tag = |direction| Tag::Boundary { direction, stage: StageIndex::new(0), microbatch };
        let (there, back) = (tag(Direction::Forward), tag(Direction::Backward));
        if begins {
            self.send(endpoint, there, tensor.clone());
            self.take(endpoint, back)?;
        } else {
            let copy = self.take(endpoint, there)?;
            self.send(endpoint, back, copy.unwrap_or_else(|| tensor.clone()));
        }
        Ok(start.elapsed().as_secs_f64())
    }

    fn send(&self, endpoint: &mut Endpoint, tag: Tag, tensor: Value) {
        let tensor = match &self.peer_device {
            Some(device) => tensor.to_device(device),
            None => tensor,
        };
        endpoint.send(self.peer, tag, Payload::Tensors(vec![Some(tensor)]));
    }

    /// Waits for a tensor and reads it.
    fn take(&self, endpoint: &mut Endpoint, tag: Tag) -> Result<Option<Value>, AgreementError> {
        let until = end_of_wait(self.deadline);
        let message = receive(endpoint, self.peer, tag, until, self.deadline)?;
        let tensors = message.into_tensors()?;
        Ok(tensors.into_iter().flatten().next().map(|tensor| self.read(tensor).0))
    }

    /// Copies a tensor on the own device, and returns the copy and the time in seconds.
    fn read(&self, tensor: Value) -> (Value, f64) {
        let start = Instant::now();
        let copy = tensor.to_device(&self.device).copied();
        // A device that fails reports it at the next use of the tensor.
        let _ = self.device.sync();
        (copy, start.elapsed().as_secs_f64())
    }
}

/// Returns the median of the values after the first [`WARM_UP`].
fn median(values: Vec<f64>) -> f64 {
    let mut values = values.split_at(WARM_UP as usize).1.to_vec();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_have_a_link() {
        let speed = between_threads(&Devices::default(), Duration::from_secs(20)).expect("both answer");
        let LinkSpeed { latency_s, bytes_per_s } = speed.expect("the first rank measures");
        assert!((0.0..0.1).contains(&latency_s), "{latency_s}");
        assert!((1e6..=FASTEST).contains(&bytes_per_s), "{bytes_per_s}");
    }
}
