//! Measures the links between ranks: how long a message takes whatever its size, and how many bytes per
//! second follow, one way and both ways at once.
//!
//! The two ranks of a pair send a tensor back and forth, and processes then send several to each other at the same time. Each
//! reads what it receives, because storage that is moved within a process still has to come from the cache of the other core.
//! The time that a rank needs to read its own tensor is subtracted. Small messages show the latency, and the further time of
//! large ones the bandwidth.
//!
//! While both ends send, a message may wait until one of the other direction has passed, although the link has room for both:
//! MPI libraries agree on each large message over the connection that carries the data. If an end sends its next message only
//! when one has arrived, the link is idle in between. So each end has two messages under way.

use std::time::{Duration, Instant};

use burn::tensor::{Device, Distribution, Tensor};
use pipewright_schedule::{Microbatch, StageIndex};
use serde::{Deserialize, Serialize};

use super::agreement::{AgreementError, receive};
use super::endpoint::Endpoint;
use super::local;
use super::wait::end_of_wait;
use crate::device::Devices;
use crate::ids::WorldRank;
use crate::message::{Direction, Payload, Tag};
use crate::tensor::Value;

/// The time of a message between two ranks, in either direction.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinkSpeed {
    /// The two ranks.
    pub ranks: [WorldRank; 2],
    /// The time of an empty message, in seconds.
    pub latency_s: f64,
    /// The bytes that follow in a second, while nothing is sent the other way.
    pub bytes_per_s: f64,
    /// The bytes that follow in a second in each direction, while both directions are used.
    pub both_ways_bytes_per_s: f64,
}

/// The most ranks between which each pair is measured. The link of the first pair counts for more ranks.
pub(super) const MOST_RANKS: u32 = 16;
/// The numbers in a small and in a large message.
const SIZES: [usize; 2] = [1 << 10, 1 << 20];
/// How often each of them goes back and forth, and how often before that.
const ROUNDS: [u32; 2] = [60, 16];
const WARM_UP: u32 = 4;
/// The time of the rounds of large messages, if that allows fewer. There are two in any case.
const LARGE_TIME: f64 = 1.0;
/// The messages that each end has under way while both send.
const UNDER_WAY: usize = 2;
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
    let pair = [WorldRank::new(0), WorldRank::new(1)];
    std::thread::scope(|scope| {
        let second = scope.spawn(move || measure(&mut second, pair, devices, deadline));
        let speed = measure(&mut first, pair, devices, deadline);
        // If the second one fails, the first one only finds that it is silent.
        second.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        speed
    })
}

/// Returns the pairs of ranks to measure.
pub(super) fn pairs(ranks: u32) -> Vec<[WorldRank; 2]> {
    let measured = if ranks > MOST_RANKS { 2 } else { ranks };
    let with = |second| (0..second).map(move |first| [first, second].map(WorldRank::new));
    (1..measured).flat_map(with).collect()
}

/// Measures the link between two ranks. All others return at once. The first of them gets the result.
pub(super) fn measure(
    endpoint: &mut Endpoint,
    pair: [WorldRank; 2],
    devices: &Devices,
    deadline: Duration,
) -> Result<Option<LinkSpeed>, AgreementError> {
    let own = endpoint.rank();
    let begins = own == pair[0];
    if !pair.contains(&own) {
        return Ok(None);
    }
    let peer = pair[usize::from(begins)];
    let flex = Device::flex();
    let device = devices.of(own).cloned().unwrap_or_else(|| flex.clone());
    let peer_device = (!endpoint.is_distributed()).then(|| devices.of(peer).cloned().unwrap_or(flex));
    let mut link = Probe { peer, begins, device, peer_device, deadline, number: 0 };
    let mut times = [0.0; 2];
    let mut both_ways = 0.0;
    for ((time, size), rounds) in times.iter_mut().zip(SIZES).zip(ROUNDS) {
        let tensor = link.tensor(size);
        let first = link.round_trip(endpoint, &tensor)?.0;
        let is_large = size == SIZES[1];
        let rounds = if is_large { link.agreed_rounds(endpoint, first, rounds)? } else { rounds };
        let warm_up = WARM_UP.min(rounds / 2);
        let trips = (0..warm_up + rounds).map(|_| link.round_trip(endpoint, &tensor).map(|trip| trip.0));
        let trips = trips.collect::<Result<Vec<f64>, AgreementError>>()?;
        let read = median((0..warm_up + rounds).map(|_| link.read(tensor.clone()).1).collect(), warm_up);
        *time = (median(trips, warm_up) / 2.0 - read).max(0.0);
        if is_large && endpoint.is_distributed() {
            both_ways = (link.stream(endpoint, &tensor, rounds)? - read).max(0.0);
        }
    }
    let [small, large] = times;
    let bytes = NUMBER * (SIZES[1] - SIZES[0]) as f64;
    let bandwidth = |time: f64| (bytes / (time - small).max(bytes / FASTEST)).clamp(1.0, FASTEST);
    let bytes_per_s = bandwidth(large);
    let latency_s = (small - NUMBER * SIZES[0] as f64 / bytes_per_s).max(0.0);
    // Within a process, tensors are moved, and their ways do not share a link.
    let both_ways_bytes_per_s = if endpoint.is_distributed() { bandwidth(both_ways) } else { bytes_per_s };
    Ok(begins.then_some(LinkSpeed { ranks: pair, latency_s, bytes_per_s, both_ways_bytes_per_s }))
}

/// One end of the measurement.
struct Probe {
    peer: WorldRank,
    /// Whether this end sends first.
    begins: bool,
    device: Device,
    /// The device to which a tensor is moved before it is sent, within a process.
    peer_device: Option<Device>,
    deadline: Duration,
    /// The number of the next round, which both ends count.
    number: u32,
}

impl Probe {
    /// Returns a tensor of `size` numbers on the own device.
    fn tensor(&self, size: usize) -> Value {
        Value::of(Tensor::<1>::random([size], Distribution::Default, &self.device))
    }

    /// Returns the tags of the messages of the next round: from the end that begins, and back.
    fn next_tags(&mut self) -> [Tag; 2] {
        let microbatch = Microbatch::new(self.number);
        self.number += 1;
        let tag = |direction| Tag::Boundary { direction, stage: StageIndex::new(0), microbatch };
        [tag(Direction::Forward), tag(Direction::Backward)]
    }

    /// Sends a tensor and waits for one, or the other way round. Returns the time, in seconds, and the numbers in the
    /// tensor that has arrived.
    fn round_trip(
        &mut self,
        endpoint: &mut Endpoint,
        tensor: &Value,
    ) -> Result<(f64, usize), AgreementError> {
        let start = Instant::now();
        let [there, back] = self.next_tags();
        let length = |arrived: &Option<Value>| arrived.as_ref().map_or(0, |it| it.shape().num_elements());
        let arrived = if self.begins {
            self.send(endpoint, there, tensor.clone());
            length(&self.take(endpoint, back)?)
        } else {
            let copy = self.take(endpoint, there)?;
            let arrived = length(&copy);
            self.send(endpoint, back, copy.unwrap_or_else(|| tensor.clone()));
            arrived
        };
        Ok((start.elapsed().as_secs_f64(), arrived))
    }

    /// Returns how many large messages go back and forth, at most `most`. The end that begins decides by the time of the
    /// first one, and the length of a message has the number.
    fn agreed_rounds(
        &mut self,
        endpoint: &mut Endpoint,
        first: f64,
        most: u32,
    ) -> Result<u32, AgreementError> {
        let rounds = (LARGE_TIME / first.max(1e-9)).clamp(2.0, f64::from(most)) as usize;
        let (_, arrived) = self.round_trip(endpoint, &self.tensor(rounds))?;
        Ok(u32::try_from(arrived).unwrap_or(most).clamp(1, most))
    }

    /// Sends a tensor several times while the other end does the same. Returns the mean time from one arrival to the next,
    /// for `count` of them after the first one, in seconds.
    fn stream(&mut self, endpoint: &mut Endpoint, tensor: &Value, count: u32) -> Result<f64, AgreementError> {
        let tags = |it: &mut Self| {
            let [there, back] = it.next_tags();
            if it.begins { (there, back) } else { (back, there) }
        };
        let all: Vec<(Tag, Tag)> = (0..=count).map(|_| tags(self)).collect();
        let mut own = all.iter().map(|(own, _)| *own);
        for tag in own.by_ref().take(UNDER_WAY) {
            self.send(endpoint, tag, tensor.clone());
        }
        let mut start = Instant::now();
        for (arrived, (_, other)) in all.iter().enumerate() {
            self.take(endpoint, *other)?;
            if arrived == 0 {
                start = Instant::now();
            }
            if let Some(tag) = own.next() {
                self.send(endpoint, tag, tensor.clone());
            }
        }
        Ok(start.elapsed().as_secs_f64() / f64::from(count.max(1)))
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

/// Returns the median of the values after the first `warm_up`.
fn median(values: Vec<f64>, warm_up: u32) -> f64 {
    let mut values = values.split_at(warm_up as usize).1.to_vec();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_have_a_link() {
        let speed = between_threads(&Devices::default(), Duration::from_secs(20)).expect("both answer");
        let LinkSpeed { ranks, latency_s, bytes_per_s, both_ways_bytes_per_s } =
            speed.expect("the first rank measures");
        assert_eq!(ranks.map(WorldRank::get), [0, 1]);
        assert!((0.0..0.1).contains(&latency_s), "{latency_s}");
        for bandwidth in [bytes_per_s, both_ways_bytes_per_s] {
            assert!((1e6..=FASTEST).contains(&bandwidth), "{bandwidth}");
        }
    }

    #[test]
    fn each_pair_of_a_few_ranks_is_measured() {
        let numbers =
            |ranks| pairs(ranks).into_iter().map(|pair| pair.map(WorldRank::get)).collect::<Vec<_>>();
        assert_eq!(numbers(1), [[0; 2]; 0]);
        assert_eq!(numbers(3), [[0, 1], [0, 2], [1, 2]]);
        assert_eq!(numbers(MOST_RANKS).len(), 120);
        assert_eq!(numbers(MOST_RANKS + 1), [[0, 1]]);
    }
}
