//! Gradients of one stage summed over its replicas.
//!
//! # Protocol
//!
//! A stage's gradients, one after the other in the order of its parameters, are cut into as many shards as there are
//! replicas. Each replica sends every other one that one's shard ([`Tag::GradientShard`]), adds what it gets for its
//! own in the order of the replicas, and sends the sum to all ([`Tag::GradientSum`]): a reduce-scatter and an
//! all-gather, which move `2 (n - 1) / n` of the gradients and give every replica the same bits. Sends do not wait, so
//! no order of replicas can block another. The rank computes on meanwhile; whenever it is polled it takes what has
//! come.
//!
//! A parameter without a gradient on some replicas counts as zero there; without one on all, it stays without.

use burn::tensor::{Bool, Device, Tensor};
use pipewright_schedule::StageIndex;

use super::machine::Executor;
use super::step::Blocked;
use crate::failure::Cause;
use crate::memory::bytes_of;
use crate::transport::{Payload, Tag};
use crate::value::Value;

/// The gradients of a stage on their way.
pub(super) struct Reduction {
    stage: StageIndex,
    /// Which parameters have a gradient on any replica heard of.
    present: Vec<bool>,
    /// This replica's shard from each replica, then none of them.
    parts: Vec<Option<Tensor<1>>>,
    /// The sum of each replica's shard.
    sums: Vec<Option<Tensor<1>>>,
    is_done: bool,
}

/// Places of shard `replica` in `elements` cut into `replicas` shards.
fn shard(elements: usize, replicas: u32, replica: u32) -> (usize, usize) {
    let size = elements.div_ceil(replicas as usize);
    let start = (size * replica as usize).min(elements);
    (start, (start + size).min(elements))
}

impl Executor {
    /// Whether gradients are summed over replicas at the end of this step.
    pub(super) fn reduces(&self) -> bool {
        self.endpoint.replicas() > 1 && self.step.update_follows
    }

    /// Sends the stage's gradients on their way, unless they are already; not those of losses that are not finite.
    pub(super) fn start_reduction(&mut self, stage: StageIndex) -> Result<(), Cause> {
        if !self.reduces() || self.step.reductions.iter().any(|reduction| reduction.stage == stage) {
            return Ok(());
        }
        self.read_losses()?;
        self.read_auxiliary()?;
        let (own, replicas) = (self.endpoint.seat().replica, self.endpoint.replicas());
        let runner = &self.chunk(stage).runner;
        let device = runner.device().inner();
        let gradients: Vec<Option<Value>> =
            (0..runner.paths().len()).map(|place| runner.gradient(place)).collect();
        let present: Vec<bool> = gradients.iter().map(Option::is_some).collect();
        let flat = gradients.into_iter().zip(runner.shapes()).map(|(gradient, shape)| {
            let elements = shape.iter().product();
            gradient.map_or_else(|| Tensor::zeros([elements], &device), |gradient| gradient.flat(elements))
        });
        let flat: Vec<Tensor<1>> = flat.collect();
        let elements = flat.iter().map(|part| part.dims()[0]).sum();
        let mut parts = vec![None; replicas as usize];
        if elements > 0 {
            let flat = Tensor::cat(flat, 0);
            for replica in 0..replicas {
                let (start, end) = shard(elements, replicas, replica);
                let part = (start < end).then(|| flat.clone().narrow(0, start, end - start));
                match replica == own {
                    true => parts[own as usize] = part,
                    false => self.send_shard(replica, Tag::GradientShard { stage }, part, &present),
                }
            }
        }
        let sums = vec![None; replicas as usize];
        let is_done = elements == 0;
        self.step.reductions.push(Reduction { stage, present, parts, sums, is_done });
        self.advance_reductions();
        Ok(())
    }

    fn send_shard(&mut self, replica: u32, tag: Tag, shard: Option<Tensor<1>>, present: &[bool]) {
        let present = Tensor::<1, Bool>::from_data(present, &Device::flex());
        let tensors = vec![shard.map(|shard| Value::of(shard).copied()), Some(Value::of(present))];
        self.uncount(&tensors);
        self.endpoint.send_across(replica, tag, Payload::Tensors(tensors));
    }

    /// Takes what has come for any stage, without waiting.
    pub(super) fn advance_reductions(&mut self) {
        let mut reductions = std::mem::take(&mut self.step.reductions);
        reductions.iter_mut().for_each(|reduction| self.advance(reduction));
        self.step.reductions = reductions;
    }

    fn advance(&mut self, reduction: &mut Reduction) {
        if reduction.is_done {
            return;
        }
        let (own, stage) = (self.endpoint.seat().replica, reduction.stage);
        if reduction.sums[own as usize].is_none() {
            let tag = Tag::GradientShard { stage };
            if !self.take_shards(tag, &mut reduction.parts, &mut reduction.present) {
                return;
            }
            let parts = std::mem::take(&mut reduction.parts);
            let sum = parts.into_iter().flatten().reduce(|sum, part| sum + part);
            for replica in (0..self.endpoint.replicas()).filter(|&replica| replica != own) {
                self.send_shard(replica, Tag::GradientSum { stage }, sum.clone(), &reduction.present);
            }
            // A replica whose shard is empty has an empty sum.
            let device = self.chunk(stage).runner.device().inner();
            reduction.sums[own as usize] = Some(sum.unwrap_or_else(|| Tensor::zeros([0], &device)));
        }
        let tag = Tag::GradientSum { stage };
        if self.take_shards(tag, &mut reduction.sums, &mut reduction.present) {
            let sums = std::mem::take(&mut reduction.sums);
            self.set_sums(stage, sums.into_iter().flatten().collect(), &reduction.present);
            reduction.is_done = true;
        }
    }

    /// Takes the shards of other replicas that have come; whether all are there.
    fn take_shards(&mut self, tag: Tag, shards: &mut [Option<Tensor<1>>], present: &mut [bool]) -> bool {
        let own = self.endpoint.seat().replica;
        for replica in (0..self.endpoint.replicas()).filter(|&replica| replica != own) {
            if shards[replica as usize].is_some() {
                continue;
            }
            let Some(message) = self.endpoint.try_take_across(replica, tag) else { return false };
            let Payload::Tensors(tensors) = message.into_payload() else {
                unreachable!("the tag says tensors")
            };
            self.memory.take_over(bytes_of(tensors.iter().flatten()));
            let mut tensors = tensors.into_iter();
            let device = self.chunks[0].runner.device().inner();
            let shard = tensors.next().flatten().map(|shard| shard.to_device(&device));
            let elements = shard.as_ref().map_or(0, |shard| shard.shape().num_elements());
            shards[replica as usize] =
                Some(shard.map_or_else(|| Tensor::zeros([0], &device), |shard| shard.flat(elements)));
            let theirs =
                tensors.next().flatten().map(|mask| Tensor::<1, Bool>::from_dispatch(mask.into_dispatch()));
            let theirs =
                theirs.map(|mask| mask.into_data().iter::<bool>().collect::<Vec<_>>()).unwrap_or_default();
            present.iter_mut().zip(theirs).for_each(|(own, theirs)| *own |= theirs);
        }
        true
    }

    /// Gives each parameter its part of the sums.
    fn set_sums(&mut self, stage: StageIndex, sums: Vec<Tensor<1>>, present: &[bool]) {
        let sums: Vec<Tensor<1>> = sums.into_iter().filter(|sum| sum.dims()[0] > 0).collect();
        let flat = Tensor::cat(sums, 0);
        let runner = &mut self.chunk(stage).runner;
        let mut start = 0;
        for (place, shape) in runner.shapes().to_vec().into_iter().enumerate() {
            let elements: usize = shape.iter().product();
            let sum = flat.clone().narrow(0, start, elements);
            start += elements;
            let sum = present[place].then(|| Value::of(sum).reshaped(&shape));
            runner.set_gradient(place, sum);
        }
    }

    /// What the stage's reduction waits for; none when it is done, or there is none.
    pub(super) fn awaited_reduction(&self, stage: StageIndex) -> Option<Blocked> {
        let reduction =
            self.step.reductions.iter().find(|reduction| reduction.stage == stage && !reduction.is_done)?;
        let own = self.endpoint.seat().replica as usize;
        let (shards, tag) = match reduction.sums[own] {
            None => (&reduction.parts, Tag::GradientShard { stage }),
            Some(_) => (&reduction.sums, Tag::GradientSum { stage }),
        };
        let replica = (0..).zip(shards).find(|(_, shard)| shard.is_none()).map_or(0, |(replica, _)| replica);
        Some(Blocked { from: self.endpoint.in_replica(replica), tag })
    }

    /// What any stage's reduction waits for; none when all are done.
    pub(super) fn awaited_reductions(&self) -> Option<Blocked> {
        self.chunks.iter().find_map(|chunk| self.awaited_reduction(chunk.stage))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_cover_everything_once() {
        for (elements, replicas) in [(10, 2), (10, 3), (1, 4), (7, 7), (3, 2)] {
            let mut next = 0;
            for replica in 0..replicas {
                let (start, end) = shard(elements, replicas, replica);
                assert_eq!(start, next);
                next = end;
            }
            assert_eq!(next, elements);
        }
    }
}
