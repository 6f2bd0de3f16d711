//! The end of a step: losses, the global gradient norm, the optimizer.
//!
//! No rank updates before every rank has contributed to the norm, and none contributes before its losses are found
//! finite. So when any loss or gradient is not finite, all parameters are still those before the step.

use std::sync::Arc;

use pipewright_schedule::{Microbatch, Rank};

use super::machine::Executor;
use crate::failure::Cause;
use crate::message::{Contribution, Payload, Tag};
use crate::tensor::OptionalTensor;

/// What is added to the norm before dividing by it, as PyTorch's `clip_grad_norm_` does.
const CLIP_EPSILON: f64 = 1e-6;

impl Executor {
    /// Reads the losses off the device, in microbatch order. Training stops at one that is not finite.
    pub(super) fn read_losses(&mut self) -> Result<(), Cause> {
        let evaluates = self.program.is_forward_only();
        // Over all replicas, as the caller counts them.
        let first = self.endpoint.coord().replica * self.program.microbatches();
        let last = self.stages.last_mut().expect("every rank owns a stage");
        for (microbatch, loss) in (first..).map(Microbatch::new).zip(&mut last.losses) {
            let Some(loss) = loss.take() else { continue };
            let loss = f64::from(loss.into_scalar::<f32>());
            if !loss.is_finite() && !evaluates {
                return Err(Cause::LossNotFinite { microbatch, loss });
            }
            self.step.losses.push(loss);
        }
        Ok(())
    }

    /// Reads the auxiliary losses off the device: per name, the mean over the microbatches.
    pub(super) fn read_auxiliary(&mut self) -> Result<(), Cause> {
        let evaluates = self.program.is_forward_only();
        let microbatches = f64::from(self.program.microbatches() * self.endpoint.replica_count());
        for local in &mut self.stages {
            for (place, losses) in local.auxiliary.iter_mut().enumerate() {
                let loss_weight = self.step.loss_weights[place] / microbatches;
                for (name, loss) in std::mem::take(losses) {
                    let loss = f64::from(loss.into_scalar::<f32>());
                    if !loss.is_finite() && !evaluates {
                        let microbatch =
                            self.endpoint.coord().replica * self.program.microbatches() + place as u32;
                        let microbatch = Microbatch::new(microbatch);
                        return Err(Cause::AuxiliaryNotFinite { stage: local.stage, microbatch, name, loss });
                    }
                    *self.step.auxiliary.entry(name).or_default() += loss_weight * loss;
                }
            }
        }
        Ok(())
    }

    /// Computes this rank's part of the norm. Replicas have the same, or where they are sharded a part of it each,
    /// which they send each other.
    pub(super) fn compute_norm_part(&mut self) {
        let is_sharded = self.endpoint.part().is_some();
        let parts = if is_sharded { 1 } else { self.endpoint.replica_count() };
        let parts = self.stages.iter().flat_map(|local| {
            let squares = local.runner.paths().iter().cloned().zip(local.runner.gradient_squares(parts));
            let counted = (0..).zip(squares).filter(|(place, _)| self.counts(local.stage, *place));
            counted.map(|(_, part)| part)
        });
        self.step.norm_parts = parts.collect();
        if is_sharded {
            self.step.squared_norms = vec![None; self.endpoint.replicas().members().len()];
            for (_, to) in self.endpoint.replicas().clone().others() {
                let parts = Payload::Contribution(self.step.norm_parts.clone());
                self.endpoint.send_world(to, Tag::SquaredNorms, parts);
            }
        }
    }

    /// Takes another replica's part of the squares; false while it has not arrived.
    pub(super) fn take_square_sums(&mut self, place: usize) -> bool {
        let from = self.endpoint.replicas().members()[place];
        let Some(message) = self.endpoint.try_take_world(from, Tag::SquaredNorms) else { return false };
        let Payload::Contribution(parts) = message.into_payload() else {
            unreachable!("the tag says a contribution")
        };
        self.step.squared_norms[place] = Some(parts);
        true
    }

    /// Adds the replicas' parts up, in their order.
    pub(super) fn add_square_sums(&mut self) {
        let own = self.endpoint.replicas().place();
        let mut parts = std::mem::take(&mut self.step.squared_norms);
        parts[own] = Some(std::mem::take(&mut self.step.norm_parts));
        let parts: Vec<Contribution> = parts.into_iter().flatten().collect();
        let sum = |place: usize| parts.iter().map(|parts| parts[place].1).sum();
        let paths = parts[own].iter().enumerate();
        self.step.norm_parts = paths.map(|(place, (path, _))| (path.clone(), sum(place))).collect();
    }

    /// Sends this rank's part of the norm to every other rank.
    pub(super) fn send_norm_part(&mut self) {
        for to in self.other_ranks() {
            self.endpoint.send(to, Tag::GradientNorm, Payload::Contribution(self.step.norm_parts.clone()));
        }
    }

    /// Takes tensors that are about to be sent off this rank's count of bytes, where their storage goes with them.
    pub(super) fn uncount(&self, tensors: &[OptionalTensor]) {
        if self.endpoint.moves_storage() {
            self.memory.give_away(tensors.iter().flatten());
        }
    }

    /// Tells the other replicas that all ranks of this one have contributed: none updates before all are that far.
    pub(super) fn tell_ready(&mut self) {
        for (_, to) in self.endpoint.replicas().clone().others() {
            self.endpoint.send_world(to, Tag::Ready, Payload::Bytes(Arc::default()));
        }
    }

    pub(super) fn other_ranks(&self) -> impl Iterator<Item = Rank> + use<> {
        let own = self.rank;
        (0..self.endpoint.ranks()).map(Rank::new).filter(move |&rank| rank != own)
    }

    /// Takes another rank's part of the norm; false while it has not arrived.
    pub(super) fn take_norm_part(&mut self, from: Rank) -> bool {
        let Some(message) = self.endpoint.try_take(from, Tag::GradientNorm) else { return false };
        let Payload::Contribution(parts) = message.into_payload() else {
            unreachable!("the tag says a contribution")
        };
        self.step.norm_parts.extend(parts);
        true
    }

    /// The norm of the mean gradient over all parameters of all ranks. The squares are added in the order of the
    /// parameters' paths, so that every cut of the model gives the same bits.
    pub(super) fn gradient_norm(&mut self) -> Result<f64, Cause> {
        let parts = &mut self.step.norm_parts;
        parts.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        if let Some((parameter, _)) = parts.iter().find(|(_, square)| !square.is_finite()) {
            return Err(Cause::GradientNotFinite { parameter: parameter.clone() });
        }
        let sum: f64 = parts.iter().map(|(_, square)| square).sum();
        Ok(sum.sqrt() / f64::from(self.summed_microbatches()))
    }

    /// Microbatches whose gradients are in the sums: this step's, those of steps without an update before it, and those
    /// of all replicas.
    fn summed_microbatches(&self) -> u32 {
        (self.accumulated + self.program.microbatches()) * self.endpoint.replica_count()
    }

    /// Scales the gradient sums to the mean over the microbatches, clips them, and takes the optimizer step.
    pub(super) fn update(&mut self) {
        let norm = self.step.norm.expect("the norm is known before the update");
        let clip = self.clip_norm.map_or(1.0, |clip| (clip / (norm + CLIP_EPSILON)).min(1.0));
        let factor = clip / f64::from(self.summed_microbatches());
        self.accumulated = 0;
        for local in &mut self.stages {
            local.runner.update(factor, self.step.learning_rate);
        }
    }
}
