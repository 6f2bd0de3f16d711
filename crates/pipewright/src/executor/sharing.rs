//! Gradients of parameters that several stages hold, summed over the owners before the step ends.
//!
//! Stages declare such parameters ([`StageModule::shared_parameters`](crate::stage::StageModule::shared_parameters)).
//! Those with the same global path are one parameter. If two parameters have the same path and do not declare it,
//! launching fails (`parameters.rs`). The usual case is the embedding of the first stage and the tied head of the last
//! stage. Each owner holds a copy. The copies start equal, which is also checked at launch. They get the same gradient
//! sum and the same update, and so stay equal to the bit.
//!
//! # Protocol
//!
//! If two ranks own a parameter, each sends the other the gradients of its copies ([`Tag::SharedGradient`]), and both
//! add all gradients. If more ranks own it, the rank of the lowest stage adds them: the others send it the gradients of
//! their copies, and it sends each of them the sum ([`Tag::SharedGradientSum`]). So `k` ranks send `2 (k - 1)` tensors,
//! and not `k (k - 1)`. The gradients are added in the order of the stages, so the sum has the same bits in both cases
//! and for every cut.

use burn::tensor::Tensor;
use pipewright_schedule::Rank;

use super::machine::Executor;
use super::parameters::{Owner, Owners};
use super::step::Phase;
use crate::collective::{Exchange, Slot};
use crate::failure::Cause;
use crate::message::{AwaitedMessage, Tag};
use crate::tensor::{OptionalTensor, OptionalTensors, Value};

/// A shared parameter whose gradient is being summed.
pub(super) struct SharedSum {
    parameter: u32,
    /// The copies on this rank, which all get the sum.
    copies: Owners,
    /// The other ranks that own the parameter.
    others: Vec<Rank>,
    state: State,
}

enum State {
    /// The rank waits for the gradient of each copy, in the order of the owners.
    Adding(Exchange<OptionalTensors>),
    /// The rank waits for the sum.
    Waiting(Exchange<OptionalTensors>),
    /// The sum; `None` if no copy has a gradient.
    Done(Box<OptionalTensor>),
}

impl Executor {
    /// Sends this rank's gradients of shared parameters and waits for the sums.
    pub(super) fn exchange_shared_gradients(&mut self) -> Phase {
        let mut shared = self.parameters.as_ref().map(|known| known.shared.clone()).unwrap_or_default();
        // Integer and boolean tensors have no gradients.
        shared.retain(|(_, owners)| self.own_copies(owners).iter().all(|owner| self.has_gradient(owner)));
        let sums = shared.into_iter().map(|(parameter, owners)| self.begin_shared_sum(parameter, &owners));
        Phase::SharedGradients(sums.collect())
    }

    fn begin_shared_sum(&mut self, parameter: u32, owners: &Owners) -> SharedSum {
        let mut others: Vec<Rank> =
            owners.iter().map(|owner| owner.rank).filter(|&rank| rank != self.rank).collect();
        others.sort_unstable();
        others.dedup();
        let adds_for_all = (others.len() > 1).then_some(owners[0].rank);
        let receivers = match adds_for_all {
            None => others.clone(),
            Some(rank) if rank == self.rank => Vec::new(),
            Some(rank) => vec![rank],
        };
        let copies = self.own_copies(owners);
        for owner in &copies {
            for &to in &receivers {
                let gradient = self.local_stage(owner.stage).runner.gradient(owner.place);
                self.send_copies(self.endpoint.world_rank_of(to), tag(parameter, owner), vec![gradient]);
            }
        }
        let state = match adds_for_all.filter(|&rank| rank != self.rank) {
            None => State::Adding(self.expect_shared_gradients(parameter, owners)),
            Some(rank) => {
                let AwaitedMessage { from, tag } = self.awaited(rank, Tag::SharedGradientSum { parameter });
                State::Waiting(Exchange::one(from, tag))
            }
        };
        SharedSum { parameter, copies, others, state }
    }

    fn expect_shared_gradients(&mut self, parameter: u32, owners: &Owners) -> Exchange<OptionalTensors> {
        let slot = |owner: &Owner| match owner.rank == self.rank {
            true => Slot::Filled(vec![self.local_stage(owner.stage).runner.gradient(owner.place)]),
            false => Slot::Expected(self.awaited(owner.rank, tag(parameter, owner))),
        };
        Exchange::new(owners.iter().map(slot))
    }

    /// Takes the gradients and sums that have arrived, or returns a missing message. A rank that adds for all sends a
    /// sum as soon as it has it, whatever the other sums wait for.
    pub(super) fn receive_shared_gradients(
        &mut self,
        sums: &mut [SharedSum],
    ) -> Result<Option<AwaitedMessage>, Cause> {
        let device = self.stages[0].runner.device().clone();
        let mut missing = None;
        for sum in sums {
            let awaited = match &mut sum.state {
                State::Adding(messages) | State::Waiting(messages) => {
                    self.receive_tensors(messages, &device)?
                }
                State::Done(_) => continue,
            };
            match awaited {
                Some(awaited) => missing = missing.or(Some(awaited)),
                None => self.complete_shared_sum(sum),
            }
        }
        Ok(missing)
    }

    fn complete_shared_sum(&mut self, sum: &mut SharedSum) {
        let total = match std::mem::replace(&mut sum.state, State::Done(Box::default())) {
            State::Adding(gradients) => {
                let total = added(gradients.into_contents());
                let receivers: &[Rank] = if sum.others.len() > 1 { &sum.others } else { &[] };
                for &to in receivers {
                    let tag = Tag::SharedGradientSum { parameter: sum.parameter };
                    self.send_copies(self.endpoint.world_rank_of(to), tag, vec![total.clone()]);
                }
                total
            }
            State::Waiting(message) => message.into_one().into_iter().next().flatten(),
            State::Done(total) => *total,
        };
        sum.state = State::Done(Box::new(total));
    }

    /// Sets the gradient of each of this rank's copies to the sum over all copies.
    pub(super) fn set_shared_gradients(&mut self, sums: Vec<SharedSum>) {
        for SharedSum { copies, state, .. } in sums {
            let State::Done(total) = state else { continue };
            for owner in copies {
                let runner = &mut self.local_stage(owner.stage).runner;
                let device = runner.device().clone();
                runner.set_gradient(owner.place, total.clone().map(|total| total.to_device(&device)));
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

/// Adds the gradients that exist, in their order.
fn added(gradients: impl Iterator<Item = OptionalTensors>) -> OptionalTensor {
    let gradients = gradients.filter_map(|gradient| gradient.into_iter().next().flatten());
    let gradients = gradients.map(|gradient| Tensor::<1>::from_dispatch(gradient.into_dispatch()));
    gradients.reduce(|sum, gradient| sum + gradient).map(Value::of)
}

fn tag(parameter: u32, owner: &Owner) -> Tag {
    Tag::SharedGradient { parameter, stage: owner.stage, place: owner.place as u32 }
}
