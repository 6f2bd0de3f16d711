//! Gradients of parameters that several stages hold, summed over the owners before the step ends.
//!
//! Stages declare such parameters ([`StageModule::shared_parameters`](crate::stage::StageModule::shared_parameters)).
//! Those with the same global path are one parameter. If two parameters have the same path and do not declare it,
//! launching fails (`parameters.rs`). The usual case is the embedding of the first stage and the tied head of the last
//! stage. Each owner holds a copy. The copies start equal, which is also checked at launch. They get the same gradient
//! sum and the same update, and so stay equal to the bit.
//!
//! A rank sends the gradients of its copies to the other owners ([`Tag::SharedGradient`]), then takes theirs. Each
//! owner adds all gradients in the order of the stages, so the sum does not depend on the cut.

use burn::tensor::Tensor;
use pipewright_schedule::Rank;

use super::machine::Executor;
use super::parameters::{Owner, Owners};
use super::step::Phase;
use crate::collective::{Exchange, Slot};
use crate::failure::Cause;
use crate::message::Tag;
use crate::progress::Waiting;
use crate::tensor::{OptionalTensors, Value};

/// A shared parameter whose gradient is being summed.
pub(super) struct SharedSum {
    /// The copies on this rank, which all get the sum.
    copies: Owners,
    /// The gradient of each copy, in the order of the owners.
    gradients: Exchange<OptionalTensors>,
}

impl Executor {
    /// Sends this rank's gradients of shared parameters to their other owners and waits for theirs.
    pub(super) fn exchange_shared_gradients(&mut self) -> Phase {
        let mut shared = self.parameters.as_ref().map(|known| known.shared.clone()).unwrap_or_default();
        // Integer and boolean tensors have no gradients.
        shared.retain(|(_, owners)| self.own_copies(owners).iter().all(|owner| self.has_gradient(owner)));
        for (parameter, owners) in &shared {
            self.send_shared_gradients(*parameter, owners);
        }
        let sums =
            shared.into_iter().map(|(parameter, owners)| self.expect_shared_gradients(parameter, owners));
        Phase::SharedGradients(sums.collect())
    }

    fn send_shared_gradients(&mut self, parameter: u32, owners: &Owners) {
        let mut others: Vec<Rank> =
            owners.iter().map(|owner| owner.rank).filter(|&rank| rank != self.rank).collect();
        others.sort_unstable();
        others.dedup();
        for owner in self.own_copies(owners) {
            for &to in &others {
                let gradient = self.local_stage(owner.stage).runner.gradient(owner.place);
                self.send_copies(self.endpoint.world_rank_of(to), tag(parameter, &owner), vec![gradient]);
            }
        }
    }

    fn expect_shared_gradients(&mut self, parameter: u32, owners: Owners) -> SharedSum {
        let copies = self.own_copies(&owners);
        let slot = |owner: &Owner| match owner.rank == self.rank {
            true => Slot::Filled(vec![self.local_stage(owner.stage).runner.gradient(owner.place)]),
            false => Slot::Expected(self.waiting(owner.rank, tag(parameter, owner))),
        };
        SharedSum { copies, gradients: Exchange::new(owners.iter().map(slot)) }
    }

    /// Takes the gradients that have arrived, or returns a missing message.
    pub(super) fn receive_shared_gradients(
        &mut self,
        sums: &mut [SharedSum],
    ) -> Result<Option<Waiting>, Cause> {
        let mut missing = None;
        for sum in sums {
            let device = self.stages[0].runner.device();
            let waiting = self.receive_tensors(&mut sum.gradients, &device)?;
            missing = missing.or(waiting);
        }
        Ok(missing)
    }

    /// Sets the gradient of each of this rank's copies to the sum over all copies.
    pub(super) fn add_shared_gradients(&mut self, sums: Vec<SharedSum>) {
        for SharedSum { copies, gradients } in sums {
            let gradients =
                gradients.into_contents().filter_map(|gradient| gradient.into_iter().next().flatten());
            let gradients = gradients.map(|gradient| Tensor::<1>::from_dispatch(gradient.into_dispatch()));
            let sum = gradients.reduce(|sum, gradient| sum + gradient);
            for owner in copies {
                let runner = &mut self.local_stage(owner.stage).runner;
                let device = runner.device();
                runner.set_gradient(owner.place, sum.clone().map(|sum| Value::of(sum).to_device(&device)));
            }
        }
    }

    fn has_gradient(&self, owner: &Owner) -> bool {
        let stage = self.stages.iter().find(|stage| stage.index == owner.stage);
        stage.is_some_and(|stage| owner.place < stage.runner.paths().len())
    }

    fn own_copies(&self, owners: &Owners) -> Owners {
        owners.iter().copied().filter(|owner| owner.rank == self.rank).collect()
    }
}

fn tag(parameter: u32, owner: &Owner) -> Tag {
    Tag::SharedGradient { parameter, stage: owner.stage, place: owner.place as u32 }
}
